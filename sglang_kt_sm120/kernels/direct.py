"""Decode for up to 16 rows: weights go from global memory straight into mma fragments.

A [rows, 64 byte] piece of a row-major weight, loaded 16 bytes per lane (8 rows by 4 lanes), *is*
the A fragment of mma.m16n8k32 up to an order of K inside the 64 bytes, and that order is free as
long as the activation is permuted the same way. So the weights need no shared memory, no shuffle
and no barrier: the reshape, permute, reshape below only renames registers. The weights are the
16-wide side of the product and the tokens its 8-wide side, so one token wastes little. The
activation is quantised on the way, by the program's warps together.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from .parts import (
    GDC,
    as_it_is,
    fence,
    quantise_groups,
    split_range,
    store_tile,
    wait_for_producer,
)


@triton.jit
def _load_weights(base, row_offsets, k_block):
    """One K block of a tile as [BLOCK_N, 2, 64] bytes: 16 per lane, 8 rows by 4 lanes a warp.

    base: the tile's first byte; row_offsets: [BLOCK_N] byte offsets of its rows.
    """
    half = tl.arange(0, 2)[None, :, None] * 64
    byte = tl.arange(0, 64)[None, None, :]
    pointers = base + (row_offsets[:, None, None] + (k_block * 128 + half + byte))
    return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def _load_activations(x, k_block, M, stride_xm, BLOCK_M: tl.constexpr):
    """One K block of the activation, [BLOCK_M, 128]. Rows past M are zero."""
    token = tl.arange(0, BLOCK_M)
    pointers = x + token[:, None] * stride_xm + (k_block * 128 + tl.arange(0, 128))[None, :]
    return tl.load(pointers, mask=(token < M)[:, None], other=0.0)


@triton.jit
def _weight_operand(w, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """[BLOCK_N, 2, 64] as loaded -> [BLOCK_N, 128] in fragment order.

    Dimensions in: repeat, upper, warp, row of 8; half; lane, step, upper, byte.
    """
    w = tl.reshape(w, [BLOCK_N // (16 * WARPS), 2, WARPS, 8, 2, 4, 2, 2, 4])
    return tl.reshape(tl.permute(w, (0, 2, 1, 3, 4, 6, 7, 5, 8)), [BLOCK_N, 128])


@triton.jit
def _activation_operand(codes, BLOCK_M: tl.constexpr):
    """[BLOCK_M, 128] codes -> [128, BLOCK_M] in the weights' order of K.

    Dimensions in: token; half; lane, step, upper, byte.
    """
    codes = tl.reshape(codes, [BLOCK_M, 2, 4, 2, 2, 4])
    return tl.trans(tl.reshape(tl.permute(codes, (0, 1, 3, 4, 2, 5)), [BLOCK_M, 128]))


@triton.jit
def _in_memory_order(
    accumulator, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, WARPS: tl.constexpr
):
    """[BLOCK_N, BLOCK_M] whose rows are in fragment order -> rows as the weight has them."""
    rows = tl.reshape(accumulator, [BLOCK_N // (16 * WARPS), WARPS, 2, 8, BLOCK_M])
    return tl.reshape(tl.permute(rows, (0, 2, 1, 3, 4)), [BLOCK_N, BLOCK_M])


@triton.jit
def _accumulate(
    accumulator,  # [BLOCK_N, BLOCK_M] fp32
    w,  # [BLOCK_N, 2, 64] e4m3
    w_scale,  # scalar fp32
    x,  # [BLOCK_M, 128] bf16 or fp16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
):
    """accumulator + scales * (weights of one K block) x (activations of it)."""
    codes, scale = quantise_groups(x)
    weights = _weight_operand(w, BLOCK_N, WARPS)
    product = tl.dot(weights, _activation_operand(codes, BLOCK_M))
    scales = tl.broadcast_to((scale * w_scale)[None, :], product.shape)
    return tl.fma(product, scales, accumulator)


@triton.jit
def _step(
    accumulator,
    k_block,
    k_blocks,
    x,
    w,
    row_offsets,
    w_scale,
    M,
    stride_xm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr,
    WARPS: tl.constexpr,
    FIRST: tl.constexpr,
    GDC: tl.constexpr,
):
    """UNROLL K blocks from `k_block` on. Past the last block it reads that one again, times 0."""
    last = k_blocks - 1
    w0 = _load_weights(w, row_offsets, k_block)
    s0 = tl.load(w_scale + k_block)
    if UNROLL >= 2:
        k1 = min(k_block + 1, last)
        w1 = _load_weights(w, row_offsets, k1)
        s1 = tl.load(w_scale + k_block + 1, mask=k_block + 1 < k_blocks, other=0.0)
    if UNROLL >= 4:
        k2, k3 = min(k_block + 2, last), min(k_block + 3, last)
        w2 = _load_weights(w, row_offsets, k2)
        w3 = _load_weights(w, row_offsets, k3)
        s2 = tl.load(w_scale + k_block + 2, mask=k_block + 2 < k_blocks, other=0.0)
        s3 = tl.load(w_scale + k_block + 3, mask=k_block + 3 < k_blocks, other=0.0)
    if FIRST:
        wait_for_producer(GDC)
    if UNROLL >= 2:
        x1 = _load_activations(x, k1, M, stride_xm, BLOCK_M)
    if UNROLL >= 4:
        x2 = _load_activations(x, k2, M, stride_xm, BLOCK_M)
        x3 = _load_activations(x, k3, M, stride_xm, BLOCK_M)
    # The assembler sinks a load to its first use, so that few bytes would be in flight. It keeps
    # them above a fence if a load behind the fence feeds the first mma: hence block 0 comes last.
    if not FIRST or UNROLL > 1:
        fence(GDC)
    x0 = _load_activations(x, k_block, M, stride_xm, BLOCK_M)
    accumulator = _accumulate(accumulator, w0, s0, x0, BLOCK_M, BLOCK_N, WARPS)
    if UNROLL >= 2:
        accumulator = _accumulate(accumulator, w1, s1, x1, BLOCK_M, BLOCK_N, WARPS)
    if UNROLL >= 4:
        accumulator = _accumulate(accumulator, w2, s2, x2, BLOCK_M, BLOCK_N, WARPS)
        accumulator = _accumulate(accumulator, w3, s3, x3, BLOCK_M, BLOCK_N, WARPS)
    return accumulator


@triton.jit(do_not_specialize=["M", "k_blocks", "splits"])
def _direct_kernel(
    x,  # [M, K] bf16 or fp16, rows stride_xm apart
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr,
    WARPS: tl.constexpr,
    CHUNK: tl.constexpr,
    GDC: tl.constexpr,
):
    tile = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    first_row = tile * BLOCK_N
    w += first_row.to(tl.int64) * k_blocks * 128
    w_scale += (first_row // 128) * k_blocks
    # Rows past N read the last row again and are not stored.
    row_offsets = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first_row) * (k_blocks * 128)

    begin, end = split_range(split, splits, tl.cdiv(k_blocks, UNROLL))
    accumulator = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    accumulator = _step(
        accumulator, begin * UNROLL, k_blocks, x, w, row_offsets, w_scale,
        M, stride_xm, BLOCK_M, BLOCK_N, UNROLL, WARPS, True, GDC,
    )  # fmt: skip
    for step in range(begin + 1, end):
        accumulator = _step(
            accumulator, step * UNROLL, k_blocks, x, w, row_offsets, w_scale,
            M, stride_xm, BLOCK_M, BLOCK_N, UNROLL, WARPS, False, GDC,
        )  # fmt: skip
    accumulator = _in_memory_order(accumulator, BLOCK_N, BLOCK_M, WARPS)

    row = tl.arange(0, BLOCK_N)[:, None]
    token = tl.arange(0, BLOCK_M)[None, :]
    pointers = out + (token * N + first_row + row)
    inside = (token < M) & (first_row + row < N)
    store_tile(
        accumulator, pointers, inside, token, row, scratch, counters,
        tile, split, splits, BLOCK_M, BLOCK_N, CHUNK,
    )  # fmt: skip


def direct(
    n: int,
    k: int,
    *,
    block_m: int,
    block_n: int,
    unroll: int,
    splits: int,
    num_warps: int,
    chunk: int,
    options: dict | None = None,
    through: Callable = as_it_is,
) -> Callable[..., None]:
    """Return a launcher of the register-direct kernel: out = x @ w.T for at most `block_m` rows.

    Args:
        n, k: size of the weight, k a multiple of 128.
        block_m: 8 or 16 tokens.
        block_n: weight rows per program, a multiple of 16 * num_warps that divides 128.
        unroll: K blocks requested at once (1, 2 or 4).
        splits: programs per tile, at most ceil(K / 128 / unroll).
        chunk: partial sums loaded at once in the reduction.
        options: launch options such as `arch`, `launch_pdl` and `maxnreg`.
        through: makes of the jitted kernel what is launched (see `as_it_is`).

    Returns:
        launch(x, w, w_scale, out, scratch, counters), with
            x: [M, K] bf16 or fp16, 1 <= M <= block_m, inner stride 1.
            w: [N, K] e4m3, contiguous.
            w_scale: [ceil(N / 128), K / 128] fp32, contiguous.
            out: [M, N] bf16 or fp16, contiguous, overwritten.
            scratch: fp32, at least tiles * splits * block_m * block_n elements when splits > 1.
            counters: int32, at least `tiles` zeros when splits > 1; zero again afterwards.
    """
    kernel = through(_direct_kernel)[(triton.cdiv(n, block_n) * splits,)]
    k_blocks = k // 128
    constants = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "UNROLL": unroll,
        "WARPS": num_warps,
        "CHUNK": chunk,
        "GDC": GDC,
        "num_warps": num_warps,
        "num_stages": 1,
        **(options or {}),
    }

    def launch(x, w, w_scale, out, scratch, counters) -> None:
        m = x.shape[0]
        stride = x.stride(0) if m > 1 else k
        kernel(
            x, w, w_scale, out, scratch, counters, m, n, k_blocks, splits, stride, **constants
        )  # fmt: skip

    return launch
