"""Machines without a compiler, and hosts whose libraries are broken: in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PLAIN = """
import sys, torch
from sglang_kt_sm120 import host, linear, op, plugin, warm
from sglang_kt_sm120.backends import cutlass, reference
plugin.register()
weight = torch.randn(256, 384).to(torch.float8_e4m3fn)
scale = torch.rand(2, 3)
layer = torch.nn.Module()
layer.weight = torch.nn.Parameter(weight, requires_grad=False)
layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
ours = linear.Sm120BlockFp8Linear(None)
host._prepare(None, ours, layer, "weight_scale_inv")
x = torch.randn(5, 384).bfloat16()
got = ours(input=x, weight=layer.weight, block_size=[128, 128], weight_scale=scale)
assert torch.equal(got, reference.run(x, weight, scale, None, x.dtype, None, None))
loaded = {"flashinfer", "deep_gemm", "sgl_kernel", "sglang"} & set(sys.modules)
assert not loaded, loaded
print("served")
"""

PROVE = """
import logging, sys, torch
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
from sglang_kt_sm120 import kernels, limits
from sglang_kt_sm120.backends import cutlass, reference
def quantise(x, *, column_major, rows, options):
    codes, scales = reference.quantise(torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0])))
    return codes, scales.t().contiguous().t() if column_major else scales
kernels.quantise = quantise
for n in (256, 512):
    known = cutlass.prove(torch.device("cpu"), n, 384, torch.bfloat16, (), limits.NAMES)
print(known.proven)
"""

SGL_KERNEL = """
import torch
library = torch.library.Library("sgl_kernel", "DEF")
library.define("fp8_blockwise_scaled_mm(Tensor a, Tensor b, Tensor sa, Tensor sb, ScalarType d) "
               "-> Tensor")
def multiply(a, b, sa, sb, dtype):
    {body}
library.impl("fp8_blockwise_scaled_mm", multiply, "CPU")
"""
RIGHT = (
    "from sglang_kt_sm120.backends import reference; "
    "return reference.multiply(a, sa, b.t(), sb.t()).to(dtype)"
)
FLASHINFER = """
def gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, scale_major_mode, out_dtype, backend):
    assert (scale_major_mode, backend) == ("K", "cutlass")
    {body}
"""
UNWRITTEN = "import torch; return torch.empty(a.shape[0], b.shape[0], dtype=out_dtype)"


def run(code: str, folder: Path, packages: dict[str, str]) -> str:
    """Run `code` with these packages in front of all others, and no compiler to be found."""
    for name, text in packages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    kept = ("HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
    variables = {name: os.environ[name] for name in kept if name in os.environ}
    variables |= {
        "PATH": str(folder / "empty"),
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "SGLANG_KT_SM120_TEST_CAPABILITY": "12.0",
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, cwd=folder
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_without_nvcc_ninja_and_cuda_home_the_default_path_serves(tmp_path):
    """And nothing of it imports a library whose kernels would want them."""
    traps = {
        f"{name}/__init__.py": "raise SystemExit('was imported')"
        for name in ("flashinfer", "deep_gemm", "sgl_kernel")
    }
    assert run(PLAIN, tmp_path, traps) == "served\n"


@pytest.mark.parametrize(
    ("packages", "proven", "says"),
    [
        (
            {"sgl_kernel.py": ""},
            "()",
            [("sgl-kernel's", "N=256 K=384, nor for any other layer", "fp8_blockwise_scaled_mm")],
        ),
        (
            {"sgl_kernel.py": SGL_KERNEL.format(body="raise RuntimeError('Error Internal')")},
            "()",
            [("N=256 K=384: RuntimeError: Error Internal",), ("N=512 K=384: RuntimeError",)],
        ),
        (
            {
                "sgl_kernel.py": "raise OSError('libcudart.so.13: cannot open shared object file')",
                "flashinfer/gemm.py": FLASHINFER.format(body=UNWRITTEN),
                "flashinfer/__init__.py": "",
            },
            "()",
            [("libcudart.so.13",), ("N=256 K=384: relative error",),
             ("N=512 K=384: relative error",)],
        ),
        ({"sgl_kernel.py": SGL_KERNEL.format(body=RIGHT)}, "('sgl_kernel',)", []),
    ],
    ids=["no such op", "Error Internal", "unwritten", "right"],
)  # fmt: skip
def test_a_broken_library_is_found_out_at_load(tmp_path, packages, proven, says):
    traps = {} if "flashinfer/gemm.py" in packages else {"flashinfer.py": "raise ImportError('x')"}
    if not traps:
        expected = says
    else:
        expected = says + ([] if proven != "()" else [("FlashInfer's", "ImportError: x")])
    *lines, last = run(PROVE, tmp_path, traps | packages).splitlines()
    assert last == proven
    assert len(lines) == len(expected), lines
    for words in expected:
        assert any(all(word in line for word in words) for line in lines), (words, lines)
