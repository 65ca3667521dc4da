"""The contract on the real Python of one release per era; `make test-hosts` plays all releases."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.hosts import judge, play

from .conftest import ERAS

FLASHINFER = "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback"
DEEP_GEMM = "deepgemm_w8a8_block_fp8_linear_with_fallback"
CUTLASS = "cutlass_w8a8_block_fp8_linear_with_fallback"
TRITON = "triton_w8a8_block_fp8_linear"
TRTLLM = "gemm_fp8_nt_groupwise does not support backend 'trtllm' with capability 120"
#: What sglang alone answers on 12.0 under "auto", with DeepGEMM on and off.
STOCK = {
    "sglang-kt-0.5.2.post1": (DEEP_GEMM, FLASHINFER),
    "sglang-kt-0.6.1.post2": (DEEP_GEMM, FLASHINFER),
    "sglang-kt-0.6.4": (TRITON, TRITON),
    "sglang-kt-0.7.2": (CUTLASS, CUTLASS),
    "sglang-0.5.5": (DEEP_GEMM, TRITON),
    "sglang-0.5.9": (DEEP_GEMM, FLASHINFER),
    "sglang-0.5.10.post1": (TRITON, TRITON),
    "sglang-0.5.11": (TRITON, TRITON),
    "sglang-0.5.17": (CUTLASS, CUTLASS),
    "sglang-0.5.21": (CUTLASS, CUTLASS),
    "sglang-0.5.23": (CUTLASS, CUTLASS),
}
every_era = pytest.mark.parametrize("era", ERAS)


@every_era
def test_the_contract_holds(played, era):
    assert judge.findings(played(era)) == []


@every_era
def test_stock_answers_and_crashes_as_on_such_a_card(played, era):
    """Without the plugin (DeepGEMM on), and with it switched off (DeepGEMM off)."""
    scenarios = ("stock, 12.0, on", "plugin, 12.0, switched off")
    for scenario, expected in zip(scenarios, STOCK[era], strict=True):
        result = played(era)[scenario]
        assert f"package-{era}/" in result["file"]
        ask = result["asks"][0]
        assert ask["stock"] == ask["got"] == expected
        if expected == DEEP_GEMM:
            assert "Unknown recipe" in ask["error"]["message"]
        elif expected == FLASHINFER:
            assert ask["error"]["message"] == TRTLLM
            assert ask["error"]["frames"][-1] == "utils.py:wrapper"
        else:
            assert "error" not in ask


@every_era
def test_compressed_tensors_comes_through_its_own_import(played, era):
    ask = played(era)["plugin, 12.0, off"]["asks"][1]
    assert ask["method"] == "compressed-tensors"
    if era == "sglang-0.5.5":
        assert ask["error"]["message"] == judge.NO_BLOCK
    else:
        assert ask["ours"]
        assert ask["output"]["quantised"] < judge.ROUNDING


@pytest.mark.parametrize("era", ["sglang-0.5.5"])
def test_scales_that_the_model_loader_packed_are_unpacked(played, era):
    """Its DeepSeek loader repacks every scale for DeepGEMM, whatever function a layer will call."""
    ask = played(era)["plugin, 12.0, on"]["asks"][0]
    assert (ask["given"], ask["scale"]) == ("torch.int32", "torch.float32")
    assert ask["output"]["quantised"] < judge.ROUNDING


@pytest.mark.parametrize("era", ["sglang-0.5.23"])
def test_sglangs_own_loader_finds_us(build, plugin, era):
    """In processes that Python's spawn started: with and without the hook, and the allow-list."""
    loader = play.loader(build(era), plugin)
    assert judge.loader_findings(loader) == []


@pytest.mark.parametrize("era", ["sglang-kt-0.5.2.post1"])
def test_a_seam_that_is_not_known_is_one_error_and_stock(build, stage, era, tmp_path):
    host = build(era)
    shutil.copytree(host.own, tmp_path / "host", copy_function=_link)
    file = tmp_path / "host" / "sglang/srt/layers/quantization/fp8_utils.py"
    text = file.read_text()
    seam = "def dispatch_w8a8_block_fp8_linear("
    changed = text.replace(f"{seam})", f"{seam}shape=None)")
    assert changed != text
    file.unlink()
    file.write_text(changed)
    scenario = {"env": play.OFF, "path": [str(tmp_path / "host")], "asks": [{"load": False}]}
    result = stage(era)("plugin, 12.0, unknown seam", scenario)
    assert "died" not in result, result["died"]
    assert not result["wrapped"]
    assert result["asks"][0]["got"] == result["asks"][0]["stock"] == FLASHINFER
    ((level, text),) = result["log"]
    assert level == "ERROR"
    assert str(file) in text
    assert text.startswith("sglang-kt-sm120 0.")


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(source)
