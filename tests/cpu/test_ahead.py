"""Compiling ahead of serving, without a GPU: real cubins for the named card, and only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def warm(cache: Path, gpu: str) -> dict:
    # No nvcc, no ninja, no compiler: Triton brings what assembling takes.
    gone = {"CUDA_HOME", "CUDA_PATH", "CC", "CXX"}
    bare = {name: value for name, value in os.environ.items() if name not in gone}
    bare["PATH"] = "/nonexistent"
    command = [sys.executable, "-m", "sglang_kt_sm120", "warm", "--gpu", gpu, "--json"]
    result = subprocess.run(
        [*command, "--shape", "2112,256"],
        env={**bare, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("gpu", "capability"), [("NVIDIA GeForce RTX 5090", 120), ("NVIDIA GB10", 121)]
)
def test_the_cache_holds_kernels_for_the_card(gpu, capability, tmp_path):
    answer = warm(tmp_path, gpu)
    assert answer["cache"] == str(tmp_path)
    cubins = set(tmp_path.rglob("*.cubin"))
    assert len(cubins) >= len(answer["kernels"]) >= 4  # a variant may need two kernels
    for cubin in cubins:
        target = json.loads(cubin.with_suffix(".json").read_text())["target"]
        assert target["arch"] == capability
        assert f".target sm_{capability}" in cubin.with_suffix(".ptx").read_text()
    # Decode multiplies e4m3 on the tensor cores, whatever this Triton does for 121 by itself.
    ptx = "".join(file.read_text() for file in tmp_path.rglob("_direct_kernel.ptx"))
    assert "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32" in ptx

    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    warm(tmp_path, gpu)
    after = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    assert after == before
