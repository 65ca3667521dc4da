"""Activation quantisation: one scale per row and 128 columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .parts import GDC, as_it_is, quantise_groups, wait_for_producer

GROUPS = 16  # K blocks per program


@triton.jit(do_not_specialize=["k_blocks", "stride_sm", "stride_sk"])
def _quantise_kernel(
    x,  # [M, K] bf16 or fp16, rows stride_xm apart
    codes,  # [M, K] e4m3, contiguous
    scales,  # [M, K / 128] fp32, any strides
    k_blocks,  # K / 128
    stride_xm,
    stride_sm,
    stride_sk,
    GROUPS: tl.constexpr,
    GDC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offsets = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = group < k_blocks
    wait_for_producer(GDC)
    values = tl.load(x + row * stride_xm + offsets, mask=inside[:, None], other=0.0)
    q, scale = quantise_groups(values)
    tl.store(codes + row * k_blocks * 128 + offsets, q, mask=inside[:, None])
    tl.store(scales + row * stride_sm + group * stride_sk, scale, mask=inside)


def quantise(
    x: torch.Tensor,
    *,
    column_major: bool = False,
    align: int = 1,
    rows: int | None = None,
    options: dict | None = None,
    through: Callable = as_it_is,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations to e4m3 with one fp32 scale per row and 128 columns.

    Args:
        x: [M, K] bf16 or fp16, M >= 1, K a multiple of 128, inner stride 1, any row stride.
        column_major: lay the scales out as CUTLASS reads them, stride 1 along M.
        align: column_major's columns begin at multiples of so many scales (4 for a TMA copy).
        rows: hand out tensors of so many rows, at least M, for a kernel that wants a multiple of
            something; what lies in the rows beyond M is anybody's guess.
        options: launch options such as `arch` and `launch_pdl`.
        through: makes of the jitted kernel what is launched (see `as_it_is`).

    Returns:
        (codes [rows or M, K] float8_e4m3fn, scales [rows or M, K / 128] fp32).
    """
    m, k = x.shape
    k_blocks = k // 128
    rows = m if rows is None else rows
    codes = torch.empty((rows, k), dtype=torch.float8_e4m3fn, device=x.device)
    if column_major:
        column = -(-rows // align) * align
        scales = torch.empty((k_blocks, column), dtype=torch.float32, device=x.device).t()[:rows]
    else:
        scales = torch.empty((rows, k_blocks), dtype=torch.float32, device=x.device)
    options = options or {}
    through(_quantise_kernel)[(m, triton.cdiv(k_blocks, GROUPS))](
        x,
        codes,
        scales,
        k_blocks,
        x.stride(0) if m > 1 else k,
        scales.stride(0),
        scales.stride(1),
        GROUPS=GROUPS,
        GDC=GDC,
        num_warps=4,
        **options,
    )
    return codes, scales
