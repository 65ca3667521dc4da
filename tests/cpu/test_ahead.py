"""Compiling ahead of serving, without a GPU: real cubins for the named card, and only once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_kt_sm120 import aot

#: Triton asks for its version before it uses it.
OLD_PTXAS = """#!/bin/sh
case "$*" in
*--version*) echo "Cuda compilation tools, release 12.8, V12.8.93" ;;
*) echo "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'" >&2; exit 1 ;;
esac
"""


def run(cache: Path, gpu: str, **further: str) -> subprocess.CompletedProcess:
    # No nvcc, no ninja, no compiler: Triton brings what assembling takes.
    gone = {"CUDA_HOME", "CUDA_PATH", "CC", "CXX"}
    bare = {name: value for name, value in os.environ.items() if name not in gone} | further
    bare["PATH"] = "/nonexistent"
    command = [sys.executable, "-m", "sglang_kt_sm120", "warm", "--gpu", gpu, "--json"]
    return subprocess.run(
        [*command, "--shape", "2112,256"],
        env={**bare, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )


def warm(cache: Path, gpu: str) -> dict:
    result = run(cache, gpu)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("gpu", "capability"), [("NVIDIA GeForce RTX 5090", 120), ("NVIDIA GB10", 121)]
)
def test_the_cache_holds_kernels_for_the_card(gpu, capability, tmp_path):
    if not aot.assembler_knows(f"sm_{capability}a"):
        pytest.skip(f"this Triton has no assembler for {gpu}; the next test says what warm says")
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


def test_an_assembler_too_old_for_the_card_is_one_line(tmp_path):
    """Triton 3.5's knows no GB10; here one that says what theirs says, by Triton's own variable."""
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(OLD_PTXAS)
    ptxas.chmod(0o755)
    paths = {"TRITON_PTXAS_PATH": str(ptxas), "TRITON_PTXAS_BLACKWELL_PATH": str(ptxas)}
    result = run(tmp_path / "cache", "NVIDIA GB10", **paths)
    assert result.returncode == 1
    answer = json.loads(result.stdout)
    assert not answer["ok"]
    assert "does not know sm_121a (NVIDIA GB10); set TRITON_PTXAS_PATH" in answer["error"]
    assert "Traceback" not in result.stderr


#: What a server does when it loads two layers, with the GPU's part of a launch left out: the real
#: callable, op and warm-up on CPU tensors, told that their device is the named card.
SERVE = """
import sys, torch
from triton.compiler import ASTSource
from sglang_kt_sm120 import ahead, devices, env, linear, op, shapes, warm
card = devices.as_this_triton_can(devices.describe(sys.argv[1]))
devices.device = lambda index: card
devices.arch = lambda index: devices.arch_of(seen=card.capability, real=card.capability)
dtype = getattr(torch, sys.argv[2])
if sys.argv[3] == "deterministic":
    op.set_deterministic(True)
compiled, make_ir = [], ASTSource.make_ir
def counted(self, *arguments, **named):
    compiled.append(self.name)
    return make_ir(self, *arguments, **named)
ASTSource.make_ir = counted
with ahead.compile_only(card.capability), torch.inference_mode():
    for n, k in ((576, 1024), (4096, 512)):
        layer = linear.Sm120BlockFp8Linear(None)
        weight = torch.empty(n, k, dtype=torch.float8_e4m3fn)
        scale = torch.empty(-(-n // 128), k // 128)
        layer.prepare(weight, scale)
        warm.layer(layer, weight, scale, dtype)
print(len(compiled), sorted(set(compiled)))
"""


@pytest.mark.parametrize(
    ("dtype", "order"),
    [("bfloat16", "any order"), ("bfloat16", "deterministic"), ("float16", "any order")],
)
def test_a_server_finds_all_it_looks_up(dtype, order, tmp_path):
    """Also what its first layer compiles for all."""
    gpu = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "sglang_kt_sm120", "warm", "--gpu", gpu, "--json"]
    layers = ["--shape", "576,1024", "--shape", "4096,512", "--dtype", dtype]
    subprocess.run([*command, *layers], env=environ, capture_output=True, check=True)
    files = set(tmp_path.rglob("*.cubin"))
    assert len(files) > 8

    serve = [sys.executable, "-c", SERVE, gpu, dtype, order]
    result = subprocess.run(serve, env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "0 []"
    for file in list(files)[::2]:  # and what is missing is compiled: the counter counts
        shutil.rmtree(file.parent, ignore_errors=True)
    result = subprocess.run(serve, env=environ, capture_output=True, text=True)
    assert int(result.stdout.split()[0]) > 0
