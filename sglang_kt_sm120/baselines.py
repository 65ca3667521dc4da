"""What the benchmark compares with, beyond the host's own linear functions: other libraries.

Each is asked for where it imports, with our quantisation kernel in front where it wants quantised
input, so that quantisation is inside its timing. A library that refuses this GPU shows up in the
benchmark as a candidate with its error and no time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from sglang_kt_sm120 import kernels

#: Against float64 on our quantised operands. The first two multiply exactly those operands; the
#: last rounds both to MXFP8 again (2.6 % each, and 2.6 % that ours has, added in squares: 4.5 %).
EXACT, ROUNDED = 2e-3, 6e-2


def _quantised(x: torch.Tensor, align: int = 1):
    """Codes and column-major scales, by our kernel with dependent launch."""
    return kernels.quantise(x, column_major=True, align=align, options={"launch_pdl": True})


def _deep_gemm(case) -> Callable[[int], torch.Tensor]:
    """DeepGEMM's own entry with fp32 scales, as on Hopper. Compiles when it is first called."""
    import deep_gemm

    gemm = getattr(deep_gemm, "fp8_gemm_nt", None) or deep_gemm.gemm_fp8_fp8_bf16_nt

    def call(index: int) -> torch.Tensor:
        operand = _quantised(case.x, align=4)
        out = torch.empty((case.m, case.n), dtype=torch.bfloat16, device=case.x.device)
        gemm(operand, (case.weights[index], case.scales[index]), out)
        return out

    return call


def _cutlass(case) -> Callable[[int], torch.Tensor]:
    """sgl-kernel's CUTLASS, as sglang's linear function calls it."""
    from sgl_kernel import fp8_blockwise_scaled_mm as gemm

    def call(index: int) -> torch.Tensor:
        codes, scale = _quantised(case.x)
        weight, weight_scale = case.weights[index], case.scales[index]
        return gemm(codes, weight.T, scale, weight_scale.T, out_dtype=case.x.dtype)

    return call


def _cutile(case) -> Callable[[int], torch.Tensor]:
    """FlashInfer's cuTile kernel (0.7.2 on): exact fp32 scales, K-major."""
    from flashinfer.gemm import gemm_fp8_nt_groupwise as gemm

    def call(index: int) -> torch.Tensor:
        codes, scale = kernels.quantise(case.x, options={"launch_pdl": True})
        return gemm(
            codes, case.weights[index], scale, case.scales[index], scale_major_mode="K",
            out_dtype=case.x.dtype, backend="cutile",
        )  # fmt: skip

    return call


def _b12x(case) -> Callable[[int], torch.Tensor]:
    """b12x's kernel in FlashInfer (0.7 on): MXFP8, so weights are rounded anew before timing."""
    from flashinfer import mm_mxfp8, mxfp8_quantize

    packed = []
    for weight, scale in zip(case.weights, case.scales, strict=True):
        rows = scale.repeat_interleave(128, 0)[: case.n].repeat_interleave(128, 1)
        packed.append(mxfp8_quantize((weight.float() * rows).bfloat16(), True))

    def call(index: int) -> torch.Tensor:
        codes, scale = mxfp8_quantize(case.x, True)
        weight, weight_scale = packed[index]
        return mm_mxfp8(
            codes, weight.t(), scale, weight_scale, out_dtype=case.x.dtype,
            use_8x4_sf_layout=False, backend="b12x",
        )  # fmt: skip

    return call


#: name -> (module that must import, how to prepare, activation scales, tolerance)
LIBRARIES = {
    "deepgemm": ("deep_gemm", _deep_gemm, "fp32", EXACT),
    "cutlass": ("sgl_kernel", _cutlass, "fp32", EXACT),
    "cutile": ("flashinfer", _cutile, "fp32", EXACT),
    "b12x": ("flashinfer", _b12x, "ue8m0", ROUNDED),
}


def importable(without: set[str] | None = None) -> dict[str, tuple[Callable, str, float]]:
    """Return what this environment can import: name -> (prepare(case), scales, tolerance).

    `without`: names that are not wanted, such as those that the host already offers.
    """
    found = {}
    for name, (module, prepare, scales, tolerance) in LIBRARIES.items():
        if without and name in without:
            continue
        try:
            importlib.import_module(module)
        except Exception:  # a library that breaks on import is one that is not there
            continue
        found[name] = (prepare, scales, tolerance)
    return found
