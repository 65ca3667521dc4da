"""`sglang-kt-sm120 doctor`, the real command, on copies of a real host whose seam has changed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.hosts import client, lab, one_batch, releases

ERA = "sglang-kt-0.5.2.post1"
FOLDER = Path("sglang/srt/layers/quantization")
DISPATCH = "dispatch_w8a8_block_fp8_linear"
#: Only what imports sglang is helped: doctor itself sees this machine as it is.
START = f"{one_batch.START}; stand_in.present_to_sglang()"
#: The file, what is there, by what a later release might have replaced it.
CHANGES = {
    "as released": ("fp8_utils.py", "", ""),
    "signature": ("fp8_utils.py", f"def {DISPATCH}()", f"def {DISPATCH}(shape=None)"),
    "missing": (
        "fp8.py",
        "def process_weights_after_loading(self, layer: Module) -> None:",
        "def finish_loading(self, layer: Module) -> None:",
    ),
}


@pytest.fixture(params=CHANGES)
def changed(request, build, plugin, tmp_path):
    """(kind of change, the changed file, an interpreter that has the copy and the plugin)."""
    host = build(ERA)
    name, before, after = CHANGES[request.param]
    copy = tmp_path / "host"
    shutil.copytree(host.own, copy, copy_function=_link)
    file = copy / FOLDER / name
    text = file.read_text()
    assert before in text
    file.unlink()
    file.write_text(text.replace(before, after, 1) if before else text)
    lines = releases._site(host.root).joinpath("layers.pth").read_text().splitlines()
    lines = [copy if line == str(host.own) else line for line in lines]
    hook = f"import site; site.addsitedir({str(plugin)!r})"
    root = releases._venv(tmp_path / "env", [*lines, hook, START])
    return request.param, file, root / "bin" / "python"


def test_doctor_says_what_has_changed_and_ends_with_1(changed):
    change, file, python = changed
    result = subprocess.run(
        [python, "-m", "sglang_kt_sm120", "doctor", "--json"],
        env=client.environment(SGLANG_ENABLE_JIT_DEEPGEMM="0"), cwd=lab.ROOT,
        capture_output=True, text=True,
    )  # fmt: skip
    answer = json.loads(result.stdout)
    rows = {row["check"]: row for row in answer["checks"]}
    assert ERA.replace("kt-0", "kt 0") in rows["host"]["value"]
    seam = rows["seam"]
    if change == "as released":
        assert seam["status"] == "ok"
        assert result.returncode in (0, 3)  # 3: no GPU here
        return
    assert (result.returncode, answer["ok"]) == (1, False)
    assert seam["status"] == "fail"
    assert f"{file} of sglang-kt 0.5.2.post1 is not as in any release" in seam["value"]
    assert "\n" not in seam["value"]


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(source)
