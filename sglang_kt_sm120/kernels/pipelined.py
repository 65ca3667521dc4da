"""Decode for 9 to 64 rows, and any small batch that arrives quantised: a shared-memory pipeline.

One program per (tile, split): an asynchronous-copy ring over the K blocks of its range, one
128-wide dot per block, scales one block ahead. SWAP makes the weights the 16-wide side of the
product and the tokens the 8-wide side.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from .parts import (
    GDC,
    as_it_is,
    prefetch_lines,
    quantise_groups,
    split_range,
    store_tile,
    wait_for_producer,
)


@triton.jit(
    do_not_specialize=["M", "k_blocks", "splits", "stride_sm", "stride_sk"],
)
def _pipelined_kernel(
    x,  # [M, K] bf16 or fp16 (FUSED), else e4m3; rows stride_xm apart
    x_scale,  # [M, K / 128] fp32, any strides; unused when FUSED
    w,  # [N, K] e4m3, contiguous
    w_scale,  # [ceil(N / 128), K / 128] fp32, contiguous
    out,  # [M, N] bf16 or fp16, contiguous
    scratch,  # [tiles, splits, BLOCK_M * BLOCK_N] fp32; unused when splits is 1
    counters,  # [tiles] int32, zero before and after; unused when splits is 1
    M,
    N,
    k_blocks,  # K / 128
    splits,
    stride_xm,
    stride_sm,
    stride_sk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FUSED: tl.constexpr,
    SWAP: tl.constexpr,
    PREFETCH: tl.constexpr,
    CHUNK: tl.constexpr,
    GDC: tl.constexpr,
):
    tile = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_row = (tile % tiles_n) * BLOCK_N
    first_token = (tile // tiles_n) * BLOCK_M
    token = tl.arange(0, BLOCK_M)
    column = tl.arange(0, 128)
    # Rows past N and tokens past M read the last one again and are not stored.
    w += first_row.to(tl.int64) * k_blocks * 128
    w_rows = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first_row) * (k_blocks * 128)
    w_pointers = w + w_rows[:, None] + column[None, :]
    x += first_token.to(tl.int64) * stride_xm
    x_rows = tl.minimum(token, M - 1 - first_token)
    x_pointers = x + x_rows[:, None] * stride_xm + column[None, :]
    w_scale += (first_row // 128) * k_blocks

    begin, end = split_range(split, splits, k_blocks)
    w_scale_next = tl.load(w_scale + begin)
    for ahead in tl.static_range(PREFETCH):
        # The pipeline's own loads start behind the wait; each row of a K block is one line.
        prefetch_lines(w + w_rows + tl.minimum(begin + ahead, end - 1) * 128, GDC)
    wait_for_producer(GDC)
    if not FUSED:
        x_scale += first_token.to(tl.int64) * stride_sm
        x_scale_pointers = x_scale + x_rows * stride_sm
        x_scale_next = tl.load(x_scale_pointers + begin * stride_sk)
    if SWAP:
        accumulator = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        accumulator = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k_block in range(begin, end):
        weights = tl.load(w_pointers + k_block * 128)
        values = tl.load(x_pointers + k_block * 128)
        following = tl.minimum(k_block + 1, end - 1)
        w_scale_now = w_scale_next
        w_scale_next = tl.load(w_scale + following)
        if FUSED:
            codes, x_scale_now = quantise_groups(values)
        else:
            codes = values
            x_scale_now = x_scale_next
            x_scale_next = tl.load(x_scale_pointers + following * stride_sk)
        scale = x_scale_now * w_scale_now
        if SWAP:
            product = tl.dot(weights, tl.trans(codes))
            scales = tl.broadcast_to(scale[None, :], product.shape)
        else:
            product = tl.dot(codes, tl.trans(weights))
            scales = tl.broadcast_to(scale[:, None], product.shape)
        accumulator = tl.fma(product, scales, accumulator)

    if SWAP:
        row = tl.arange(0, BLOCK_N)[:, None]
        token = token[None, :]
    else:
        row = tl.arange(0, BLOCK_N)[None, :]
        token = token[:, None]
    out += first_token.to(tl.int64) * N
    pointers = out + (token * N + first_row + row)
    inside = (first_token + token < M) & (first_row + row < N)
    store_tile(
        accumulator, pointers, inside, token, row, scratch, counters,
        tile, split, splits, BLOCK_M, BLOCK_N, CHUNK,
    )  # fmt: skip


def pipelined(
    n: int,
    k: int,
    *,
    block_m: int,
    block_n: int,
    splits: int,
    num_warps: int,
    num_stages: int,
    swap: bool,
    prefetch: int,
    chunk: int,
    options: dict | None = None,
    through: Callable = as_it_is,
) -> Callable[..., None]:
    """Return a launcher of the shared-memory pipeline: out = x @ w.T, any M.

    Args:
        n, k: size of the weight, k a multiple of 128.
        block_m: tokens per program. block_n: weight rows per program, a divisor of 128.
        splits: programs per tile, at most K / 128.
        swap: weights on the 16-wide side of the product.
        prefetch: K blocks of the weight asked of L2 before the dependency wait.
        chunk: partial sums loaded at once in the reduction.
        options: launch options such as `arch` and `launch_pdl`.
        through: makes of the jitted kernel what is launched (see `as_it_is`).

    Returns:
        launch(x, x_scale, w, w_scale, out, scratch, counters), with
            x: [M, K] bf16 or fp16 (then x_scale is None and it is quantised on the way) or e4m3;
                M >= 1, inner stride 1.
            x_scale: [M, K / 128] fp32, any strides, or None.
            w: [N, K] e4m3, contiguous.
            w_scale: [ceil(N / 128), K / 128] fp32, contiguous.
            out: [M, N] bf16 or fp16, contiguous, overwritten.
            scratch: fp32, at least tiles * splits * block_m * block_n elements when splits > 1.
            counters: int32, at least `tiles` zeros when splits > 1; zero again afterwards.
    """
    per_row_tile = triton.cdiv(n, block_n) * splits
    k_blocks = k // 128
    kernel = through(_pipelined_kernel)
    constants = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "SWAP": swap,
        "PREFETCH": prefetch,
        "CHUNK": chunk,
        "GDC": GDC,
        "num_warps": num_warps,
        "num_stages": num_stages,
        **(options or {}),
    }

    def launch(x, x_scale, w, w_scale, out, scratch, counters) -> None:
        m = x.shape[0]
        fused = x_scale is None
        kernel[(-(-m // block_m) * per_row_tile,)](
            x,
            w_scale if fused else x_scale,
            w,
            w_scale,
            out,
            scratch,
            counters,
            m,
            n,
            k_blocks,
            splits,
            x.stride(0) if m > 1 else k,
            0 if fused else x_scale.stride(0),
            0 if fused else x_scale.stride(1),
            FUSED=fused,
            **constants,
        )

    return launch
