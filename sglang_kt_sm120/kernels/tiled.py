"""Prefill: 128 x 128 tiles over quantised activations, raster order that reuses L2."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from .parts import GDC, as_it_is, split_range, wait_for_producer


@triton.jit
def _product(
    codes, weights, UNIT_SCALED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """codes [BLOCK_M, 128] x weights [BLOCK_N, 128]^T in fp32.

    UNIT_SCALED asks for the block-scaled instruction with every scale 1 (code 127), which
    GeForce cards run at twice the rate of the plain one; the numbers are the same.
    """
    if UNIT_SCALED:
        x_ones = tl.full([BLOCK_M, 4], 127, dtype=tl.uint8)
        w_ones = tl.full([BLOCK_N, 4], 127, dtype=tl.uint8)
        return tl.dot_scaled(codes, x_ones, "e4m3", tl.trans(weights), w_ones, "e4m3")
    else:
        return tl.dot(codes, tl.trans(weights))


@triton.jit(
    do_not_specialize=["M", "k_blocks", "splits", "stride_sm", "stride_sk"],
)
def _tiled_kernel(
    x,  # [M, K] e4m3, rows stride_xm apart
    x_scale,  # [M, K / 128] fp32, any strides
    w,  # [N, K] e4m3, contiguous
    w_scale,  # [ceil(N / 128), K / 128] fp32, contiguous
    out,  # [M, N] bf16 or fp16, contiguous
    M,
    N,
    k_blocks,  # K / 128
    splits,  # K ranges summed apart when SPLIT_ORDER
    stride_xm,
    stride_sm,
    stride_sk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    UNIT_SCALED: tl.constexpr,
    SPLIT_ORDER: tl.constexpr,
    GDC: tl.constexpr,
):
    # GROUP_M row tiles walk along N together, so that a weight strip is read once per group.
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    rank = tl.program_id(0) % (GROUP_M * tiles_n)
    group_m = min(tiles_m - group * GROUP_M, GROUP_M)
    first_token = (group * GROUP_M + rank % group_m) * BLOCK_M
    first_row = (rank // group_m) * BLOCK_N

    # Rows past N and tokens past M read the last one again and are not stored.
    token = tl.arange(0, BLOCK_M)
    row = tl.arange(0, BLOCK_N)
    column = tl.arange(0, 128)
    w += first_row.to(tl.int64) * k_blocks * 128
    w_rows = tl.minimum(row, N - 1 - first_row) * (k_blocks * 128)
    w_pointers = w + w_rows[:, None] + column[None, :]
    w_scale += (first_row // 128) * k_blocks
    x += first_token.to(tl.int64) * stride_xm
    x_rows = tl.minimum(token, M - 1 - first_token)
    x_pointers = x + x_rows[:, None] * stride_xm + column[None, :]
    x_scale_pointers = x_scale + first_token.to(tl.int64) * stride_sm + x_rows * stride_sm

    wait_for_producer(GDC)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if SPLIT_ORDER:
        # The sums that split-K would form and add, so that a row has the same bits at any M.
        for split in range(0, splits):
            begin, end = split_range(split, splits, k_blocks)
            part = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            for k_block in range(begin, end):
                codes = tl.load(x_pointers + k_block * 128)
                weights = tl.load(w_pointers + k_block * 128)
                scale = tl.load(x_scale_pointers + k_block * stride_sk) * tl.load(w_scale + k_block)
                product = _product(codes, weights, UNIT_SCALED, BLOCK_M, BLOCK_N)
                part = tl.fma(product, tl.broadcast_to(scale[:, None], product.shape), part)
            accumulator += part
    else:
        for k_block in range(0, k_blocks):
            codes = tl.load(x_pointers + k_block * 128)
            weights = tl.load(w_pointers + k_block * 128)
            scale = tl.load(x_scale_pointers + k_block * stride_sk) * tl.load(w_scale + k_block)
            product = _product(codes, weights, UNIT_SCALED, BLOCK_M, BLOCK_N)
            accumulator = tl.fma(
                product, tl.broadcast_to(scale[:, None], product.shape), accumulator
            )

    out += first_token.to(tl.int64) * N + first_row
    inside = (first_token + token[:, None] < M) & (first_row + row[None, :] < N)
    pointers = out + (token[:, None] * N + row[None, :])
    tl.store(pointers, accumulator.to(out.dtype.element_ty), mask=inside)


def tiled(
    n: int,
    k: int,
    *,
    block_m: int,
    block_n: int,
    group_m: int,
    num_warps: int,
    num_stages: int,
    unit_scaled: bool = False,
    split_order: int = 0,
    options: dict | None = None,
    through: Callable = as_it_is,
) -> Callable[..., None]:
    """Return a launcher of the prefill kernel: out = x @ w.T for any M.

    Args:
        n, k: size of the weight, k a multiple of 128.
        block_m: tokens per program. block_n: weight rows per program, a divisor of 128.
        group_m: row tiles that walk along N together.
        unit_scaled: use the block-scaled instruction with unit scales (same numbers).
        split_order: 0, or the number of K ranges to sum apart, in split-K's order.
        options: launch options such as `arch` and `launch_pdl`.
        through: makes of the jitted kernel what is launched (see `as_it_is`).

    Returns:
        launch(x, x_scale, w, w_scale, out), with
            x: [M, K] e4m3, M >= 1, inner stride 1.
            x_scale: [M, K / 128] fp32, any strides.
            w: [N, K] e4m3, contiguous.
            w_scale: [ceil(N / 128), K / 128] fp32, contiguous.
            out: [M, N] bf16 or fp16, contiguous, overwritten.
    """
    tiles_n = triton.cdiv(n, block_n)
    k_blocks = k // 128
    splits = max(split_order, 1)
    kernel = through(_tiled_kernel)
    constants = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "GROUP_M": group_m,
        "UNIT_SCALED": unit_scaled,
        "SPLIT_ORDER": split_order > 0,
        "GDC": GDC,
        "num_warps": num_warps,
        "num_stages": num_stages,
        **(options or {}),
    }

    def launch(x, x_scale, w, w_scale, out) -> None:
        m = x.shape[0]
        kernel[(-(-m // block_m) * tiles_n,)](
            x,
            x_scale,
            w,
            w_scale,
            out,
            m,
            n,
            k_blocks,
            splits,
            x.stride(0) if m > 1 else k,
            x_scale.stride(0),
            x_scale.stride(1),
            **constants,
        )

    return launch
