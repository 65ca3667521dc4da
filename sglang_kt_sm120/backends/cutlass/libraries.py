"""Where each of the host's kernels is found, and how it is called with quantised operands.

A product takes (codes [M, K] e4m3, weight [N, K] e4m3, scales [M, K/128] fp32 in the kernel's
layout, weight_scale [N/128, K/128] fp32, out_dtype) and returns a new `[M, N]`. Importing this
module imports none of the libraries: `load` does, when a layer is probed.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable

import torch

Product = Callable[..., torch.Tensor]

_offered: dict[str, Callable] = {}

#: What an error says that has nothing to do with a layer's shape: nothing is gained by building,
#: for a minute and more, once more for the next layer. In the words of tvm_ffi, FlashInfer, torch,
#: ninja, Python and the CUDA loader.
_EVERY_SHAPE = re.compile(
    r"^(ImportError|FileNotFoundError|AttributeError|BackendSupportedError)|"
    r"ninja|nvcc|CUDA_HOME|CUDA installation|requires SM120|not supported on|"
    r"No compiled|No implemented|for CUDA device capability|no kernel image",
    re.IGNORECASE,
)


def offer(product: Callable | None) -> str | None:
    """Take the host's own `fp8_blockwise_scaled_mm`; return the name of the kernel that it is.

    sglang's own one is a JIT kernel; older hosts hand on sgl-kernel's, which `load` finds by
    itself.
    """
    module = getattr(product, "__module__", None) or ""
    if product is None or not module.startswith("sglang."):
        return None if product is None else "sgl_kernel"
    _offered["sglang_jit"] = product
    return "sglang_jit"


def forget() -> None:
    """Forget what was offered (tests)."""
    _offered.clear()


def is_installed(name: str) -> bool:
    """True where the library of this kernel is in this environment, whether it works or not."""
    if name == "sglang_jit":
        return name in _offered
    return name in sys.modules or importlib.util.find_spec(name) is not None


def load(name: str) -> Product:
    """Import what the kernel needs and return its product.

    Raises:
        Exception: Whatever a library raises that is not there, broken, or without this kernel.
    """
    return {"sgl_kernel": _sgl_kernel, "sglang_jit": _sglang_jit, "flashinfer": _flashinfer}[name]()


def concerns_every_shape(why: str) -> bool:
    """True where an error ("Type: text") would come up on every other layer too."""
    return _EVERY_SHAPE.search(why) is not None


def _sgl_kernel() -> Product:
    importlib.import_module("sgl_kernel")  # it registers its ops
    operator = torch.ops.sgl_kernel.fp8_blockwise_scaled_mm.default

    def product(codes, weight, scales, weight_scale, out_dtype):
        return operator(codes, weight.t(), scales, weight_scale.t(), out_dtype)

    return product


def _sglang_jit() -> Product:
    if "sglang_jit" not in _offered:
        raise ModuleNotFoundError("this host has no JIT kernel for block FP8")
    function = _offered["sglang_jit"]

    def product(codes, weight, scales, weight_scale, out_dtype):
        return function(codes, weight.t(), scales, weight_scale.t(), out_dtype)

    return product


def _flashinfer() -> Product:
    gemm = importlib.import_module("flashinfer.gemm").gemm_fp8_nt_groupwise

    def product(codes, weight, scales, weight_scale, out_dtype):
        return gemm(
            codes, weight, scales, weight_scale, scale_major_mode="K", out_dtype=out_dtype,
            backend="cutlass",
        )  # fmt: skip

    return product
