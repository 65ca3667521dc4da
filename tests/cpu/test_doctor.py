"""What doctor says of machines that are not at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_kt_sm120 import cli, doctor, env, system

ARCHES = ["sm_80", "sm_90", "sm_100", "sm_120", "compute_120"]
GOOD = {
    "torch": {
        "version": "2.9.1", "cuda": "12.8", "arch_list": ARCHES,
        "devices": [{"name": "NVIDIA GeForce RTX 5090", "capability": "12.0"}],
    },
    "versions": {"triton": "3.5.1", "sglang-kt": "0.7.2"},
    "owners": {"sglang": ["sglang-kt"], "triton": ["triton"]},
    "ptxas": {arch: {"ok": True, "path": "/p", "message": ""} for arch in ("sm_120a", "sm_121a")},
    "triton_cache": "/tmp",
}  # fmt: skip
WRAPPED = {"imported": True, "wrapped": True, "message": ""}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def judge(seam=WRAPPED, **changes):
    return doctor.rows(GOOD | changes, lambda: seam)


def failures(rows):
    return {row.check for row in rows if row.status == doctor.FAIL}


def test_a_good_machine_is_ready():
    rows = judge()
    assert {row.status for row in rows} == {doctor.OK}
    assert doctor.exit_code(rows) == 0


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"torch": GOOD["torch"] | {"arch_list": ["sm_80", "sm_90"]}}, "torch"),
        ({"torch": {"error": "ImportError: no torch"}}, "torch"),
        ({"ptxas": {"sm_120a": {"ok": False, "path": "/p", "message": "not defined"}}}, "Triton"),
        ({"ptxas": {"sm_120a": {"error": "ModuleNotFoundError: triton"}}}, "Triton"),
        ({"owners": {"sglang": ["sglang", "sglang-kt"]}}, "owner of sglang/"),
        ({"seam": WRAPPED | {"wrapped": False}}, "seam"),
        ({"triton_cache": "/proc/nobody/writes/here"}, "kernel cache"),
    ],
)
def test_each_problem_is_found_with_a_remedy(changes, check):
    rows = judge(**changes)
    assert failures(rows) == {check}
    assert doctor.exit_code(rows) == 1
    assert all(row.fix for row in rows if row.status != doctor.OK)


def test_gb10_needs_an_assembler_of_its_own():
    gb10 = {"torch": GOOD["torch"] | {"devices": [{"name": "NVIDIA GB10", "capability": "12.1"}]}}
    assert failures(judge(**gb10)) == set()
    refuses = {"ok": False, "path": "/p", "message": "Value 'sm_121a' is not defined"}
    ptxas = GOOD["ptxas"] | {"sm_121a": refuses}
    (row,) = [row for row in judge(**gb10, ptxas=ptxas) if row.check == "Triton"]
    assert row.status == doctor.FAIL
    assert "TRITON_PTXAS_PATH" in row.fix
    assert failures(judge(ptxas=ptxas)) == set()  # an RTX 5090 does not care


def test_metadata_that_cannot_be_read_is_a_row():
    rows = judge(owners={"error": "OSError: no"})
    assert [row.value for row in rows if row.check == "owners"] == ["OSError: no"]


NO_GPU = {"torch": GOOD["torch"] | {"devices": []}}
NO_HOST = {"owners": {}, "host": {"path": None, "cutlass": False}}
UNIMPORTABLE = {"imported": False, "wrapped": False, "message": "OSError: no libcuda"}
HOPPER = [{"name": "NVIDIA H100", "capability": "9.0"}]


def test_no_gpu_is_3_unless_something_is_broken():
    rows = judge(**NO_GPU)
    assert doctor.exit_code(rows) == 3
    assert doctor.verdict(rows) == "not ready: no GPU here"
    (remedy,) = [row.fix for row in rows if row.check == "GPU"]
    assert all(word in remedy for word in ("explain", "aot", "warm", "patch", "demo"))
    assert doctor.exit_code(judge(**NO_GPU, seam=WRAPPED | {"wrapped": False})) == 1
    assert doctor.exit_code(judge(**NO_GPU, **NO_HOST)) == 3


def test_a_cpu_build_of_torch_brings_no_triton():
    """That is no fault of the machine: what lacks is the GPU."""
    torch = {"version": "2.13.0+cpu", "cuda": None, "arch_list": [], "devices": []}
    lacking = {"sm_120a": {"error": "ModuleNotFoundError: triton"}}
    rows = judge(torch=torch, ptxas=lacking)
    (triton,) = [row for row in rows if row.check == "Triton"]
    assert triton.fix.startswith("pip install triton")
    assert doctor.exit_code(rows) == 3
    assert doctor.verdict(rows) == "not ready: no GPU here"
    (triton,) = [row for row in judge(ptxas=lacking) if row.check == "Triton"]
    assert triton.fix == "Triton comes with torch's CUDA builds: reinstall torch"


@pytest.mark.parametrize(
    ("changes", "variables", "said"),
    [
        (NO_HOST, {}, "no sglang here"),
        ({"seam": UNIMPORTABLE}, {}, "sglang does not import"),
        ({"torch": GOOD["torch"] | {"devices": HOPPER}}, {}, "no SM120/SM121 GPU here"),
        ({"seam": WRAPPED | {"wrapped": False}}, {env.ENABLE.name: "0"}, "switched off"),
        (
            {"seam": WRAPPED | {"wrapped": False}},
            {"SGLANG_PLUGINS": "other"},
            "left out by SGLANG_PLUGINS",
        ),
    ],
)
def test_where_nothing_can_be_served_it_is_not_ready(changes, variables, said, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    rows = judge(**changes)
    assert doctor.verdict(rows) == f"not ready: {said}"
    assert doctor.exit_code(rows) == 1
    assert doctor.exit_code(judge(**(NO_GPU | changes))) == (1 if "SM120" in said else 3)


def test_what_is_broken_is_named_beside_the_rest():
    rows = judge(**NO_HOST, triton_cache="/proc/nobody/writes/here")
    assert doctor.verdict(rows) == "not ready: no sglang here; see kernel cache above"


def test_an_sglang_that_no_distribution_owns_is_a_host():
    """An editable install, or a checkout on PYTHONPATH."""
    rows = judge(owners={}, host={"path": "/src/sglang/python/sglang", "cutlass": True})
    assert doctor.exit_code(rows) == 0
    assert [row.value for row in rows if row.check == "host"] == [
        "sglang in /src/sglang/python/sglang"
    ]
    assert "seam" in {row.check for row in rows}


def test_a_gpu_that_the_test_override_presents(monkeypatch):
    monkeypatch.setenv(env.TEST_CAPABILITY.name, "12.0")
    rows = judge(torch=GOOD["torch"] | {"devices": HOPPER})
    assert [row.status for row in rows if row.check == "GPU"] == [doctor.WARN]
    assert doctor.exit_code(rows) == 0


@pytest.mark.parametrize(
    ("file", "cutlass"),
    [
        ("jit_kernel/csrc/gemm/fp8_blockwise/fp8_blockwise_scaled_mm_sm120.cuh", True),
        ("kernels/jit/csrc/gemm/fp8_blockwise/fp8_blockwise_scaled_mm_sm120.cuh", True),
        ("jit_kernel/csrc/gemm/nvfp4/nvfp4_scaled_mm.cuh", False),
    ],
)
def test_the_hosts_default_is_read_from_its_files(file, cutlass, tmp_path, monkeypatch):
    """Found without running a line of it."""
    package = tmp_path / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text("raise OSError('imported')\n")
    (package / file).parent.mkdir(parents=True)
    (package / file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert system.host() == {"path": str(package), "cutlass": cutlass}


def test_variables_are_judged(monkeypatch):
    monkeypatch.setenv(env.BACKEND.name, "fastest")
    monkeypatch.setenv(env.TEST_CAPABILITY.name, "12.0")
    monkeypatch.setenv("SGLANG_ENABLE_FLASHINFER_FP8_GEMM", "true")
    rows = {row.check: row.status for row in judge()}
    assert rows[env.BACKEND.name] == doctor.FAIL
    monkeypatch.setenv("SGLANG_KT_SM120_BACKENDS", "triton")
    (typo,) = [row for row in judge() if row.check == "SGLANG_KT_SM120_BACKENDS"]
    assert (typo.status, typo.fix) == (doctor.FAIL, "did you mean SGLANG_KT_SM120_BACKEND?")
    assert rows[env.TEST_CAPABILITY.name] == doctor.WARN
    assert rows["SGLANG_ENABLE_FLASHINFER_FP8_GEMM"] == doctor.WARN


def test_switched_off_and_left_out_are_named(monkeypatch):
    unwrapped = WRAPPED | {"wrapped": False}
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert "SGLANG_PLUGINS=other" in next(r for r in judge(unwrapped) if r.check == "seam").value
    monkeypatch.setenv(env.ENABLE.name, "0")
    rows = {row.check: row for row in judge(unwrapped)}
    assert rows["hook"].status == rows["seam"].status == doctor.FAIL


def test_the_seam_probe_sees_what_a_fresh_interpreter_sees(tmp_path, monkeypatch):
    folder = tmp_path / "sglang/srt/layers/quantization"
    folder.mkdir(parents=True)
    for parent in (folder, folder.parent, folder.parents[1], folder.parents[2]):
        (parent / "__init__.py").touch()
    utils = folder / "fp8_utils.py"
    utils.write_text("def dispatch_w8a8_block_fp8_linear():\n    pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert system.seam() == WRAPPED
    monkeypatch.setenv(env.ENABLE.name, "0")
    assert system.seam() == WRAPPED | {"wrapped": False}
    utils.write_text("raise OSError('no libcuda')\n")
    assert system.seam()["message"] == "OSError: no libcuda"


def test_two_owners_of_one_folder_are_found(tmp_path):
    site = tmp_path / "site"
    for name in ("sglang", "sglang_kt"):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\n")
        (info / "RECORD").write_text("sglang/__init__.py,,\n")
    code = f"import sys; sys.path[:0] = [{str(site)!r}]\n"
    code += "from sglang_kt_sm120 import system; print(system.owners()['sglang'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "['sglang', 'sglang-kt']", result.stderr


def test_this_machine_is_reported_whatever_it_lacks():
    result = CliRunner().invoke(cli.app, ["doctor", "--quick", "--json"])
    answer = json.loads(result.stdout)
    assert answer["schema"] == 1
    assert answer["ok"] is (result.exit_code == 0)
    assert {"check", "status", "value", "fix", "verdict"} == set(answer["checks"][0])
    assert (answer["verdict"] == "ready") is answer["ok"]
    assert answer["facts"]["versions"]["sglang-kt-sm120"]
    assert Path(answer["facts"]["executable"]).exists()


def test_a_probe_that_fails_becomes_a_value():
    assert system.guarded(lambda: 1 / 0) == {"error": "ZeroDivisionError: division by zero"}


BOTH = """
from sglang_kt_sm120 import system
from sglang_kt_sm120.aot import compiling
print(system.ptxas()["ok"], compiling.assembler_knows("sm_120a"))
"""


@pytest.mark.parametrize("variable", ["TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"])
def test_the_ptxas_that_is_asked_is_the_one_that_triton_takes(variable, tmp_path):
    """From 3.6 on Triton has a second one for these cards, with a variable of its own."""
    refuses = tmp_path / "ptxas"
    text = "ptxas fatal   : Value 'sm_120a' is not defined for option 'gpu-name'"
    refuses.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "release 12.8, V12.8.93" && exit\n'
                       f'echo "{text}" >&2\nexit 1\n')  # fmt: skip
    refuses.chmod(0o755)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_PTXAS")}
    environ[variable] = str(refuses)
    result = subprocess.run(
        [sys.executable, "-c", BOTH], env=environ, capture_output=True, text=True, check=True
    )
    doctors, tritons = result.stdout.split()
    assert doctors == tritons
