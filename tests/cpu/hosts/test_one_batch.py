"""sglang's benchmark without a server: the plugin comes in by the start-up hook alone, once."""

from __future__ import annotations

import pytest

from tests.hosts import one_batch

OURS = "sglang_kt_sm120.linear.Sm120BlockFp8Linear"


@pytest.mark.parametrize(
    ("era", "module"),
    [("sglang-0.5.11", one_batch.MODULES[0]), ("sglang-0.5.23", one_batch.MODULES[1])],
)
def test_the_hook_brings_us_in_once(build, plugin, tmp_path, era, module):
    said = one_batch.play(build(era), plugin, tmp_path)
    assert said["module"] == module
    assert one_batch.END in said["stderr"], said["stderr"][-2000:]
    assert said["armed"]
    assert (said["wrapped"], said["twice"], said["loader_ran"]) == (True, False, False)
    assert said["answers"] == [OURS, OURS]
    assert said["stderr"].count("is active on stand-in GPU") == 1
    # The command itself configured the backend: `auto` on such a card is no longer "auto" here.
    assert said["configured"] not in ("None", "Fp8GemmRunnerBackend.AUTO")


@pytest.mark.parametrize("era", ["sglang-0.5.11"])
def test_without_the_hook_nothing_does(build, plugin, tmp_path, era):
    said = one_batch.play(build(era), plugin, tmp_path, hook=False)
    assert one_batch.END in said["stderr"], said["stderr"][-2000:]
    assert [said["armed"], said["wrapped"], said["loader_ran"]] == [False, False, False]
    assert said["answers"] == ["builtins.function"] * 2
