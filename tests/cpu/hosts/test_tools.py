"""The laboratory's own tools: they must say no where there is something to say no to."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.hosts import cuda_units, lab, matrix, other_torch, patched, patched_flashinfer, records

RECORD = {"torch": "2.9.1+cu128", "triton": "3.5.1", "passed": 7, "failed": 0, "skipped": 1}


def _pip(monkeypatch, stdout: str, code: int = 0) -> None:
    answer = subprocess.CompletedProcess([], code, stdout, "no network")
    monkeypatch.setattr(matrix.subprocess, "run", lambda *a, **k: answer)


def test_the_newest_are_asked_by_name(monkeypatch):
    _pip(monkeypatch, "sglang (0.9.1)\nAvailable versions: 0.9.1, 0.9.0\n")
    assert [str(release) for release in matrix.newest()] == ["sglang-kt-0.9.1", "sglang-0.9.1"]
    assert all(release.era for release in matrix.newest()), "its loader is played in full"


@pytest.mark.parametrize(("stdout", "code"), [("", 1), ("nothing found", 0)])
def test_no_answer_about_the_newest_is_one_line(monkeypatch, stdout, code):
    _pip(monkeypatch, stdout, code)
    with pytest.raises(lab.LabError, match="does not say which sglang-kt is newest"):
        matrix.newest()
    assert matrix.main(["--newest"]) == 1


def test_the_documents_stay_where_records_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(matrix, "RECORDS", tmp_path)
    monkeypatch.setattr(matrix.compatibility, "write", lambda done: pytest.fail("written"))
    assert matrix.main(["--report", "--plugin", str(tmp_path)]) == 1


def test_a_record_of_the_other_torch_holds_for_its_sources_only(monkeypatch, tmp_path):
    monkeypatch.setattr(other_torch, "_path", lambda version: tmp_path / "torch.json")
    ran = []
    monkeypatch.setattr(other_torch, "_environment", lambda version: ran.append(version) or "/no")
    record = RECORD | {"when": "today", "made_from": other_torch._sources()}
    records.write(tmp_path / "torch.json", record)
    assert other_torch.run("2.9.1", again=False) == 0
    assert not ran
    for change in ({"made_from": {}}, {"failed": 1}):
        records.write(tmp_path / "torch.json", record | change)
        with pytest.raises(FileNotFoundError):
            other_torch.run("2.9.1", again=False)
    assert len(ran) == 2
    assert other_torch.said(RECORD).endswith("2.9.1+cu128, Triton 3.5.1: 7 passed, 1 skipped")


def test_what_does_not_compile_is_quoted():
    good = cuda_units.Unit("good", "__global__ void kernel() {}\n", "120a", ("-std=c++17",))
    bad = cuda_units.Unit("bad", "#include <no_such_header.h>\n", "120a", ())
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here")
    assert cuda_units.compile_one(good) is None
    assert "no_such_header.h" in cuda_units.compile_one(bad)


def test_no_compiler_is_no_failure(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(cuda_units.NoCompiler, match="no nvcc here"):
        cuda_units.compiler("120a")


def test_the_test_that_a_patch_adds_is_found():
    (patch,) = (p for p in patched.all_patches() if "name-supported-backends" in p.name)
    text = patched_flashinfer.added_test(patch)
    compile(text, "added", "exec")
    assert text.strip().startswith("def test_unsupported_backend_names_those_that_work(")
