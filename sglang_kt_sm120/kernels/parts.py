"""Device functions shared by the kernels: quantisation, split-K, dependent launch, stores.

Vocabulary used in this package: a *K block* is 128 columns of K (one weight scale row block, one
activation scale); a *tile* is the part of the output that one program computes; a *split* is one
of the programs that share a tile, each over its own range of K blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def quantise_groups(x):
    """Quantise rows of one K block each.

    x: [R, 128] bf16, fp16 or fp32. Returns (codes [R, 128] e4m3, scales [R] fp32) with
    a = max(absmax, 1e-10), scale = a / 448, codes = e4m3(clamp(x * (1 / scale), -448, 448)),
    both divisions correctly rounded. The conversion saturates, which is the clamp. A row that
    holds NaN or Inf gets the scale NaN, so whatever it is multiplied into becomes NaN.
    """
    values = x.to(tl.float32)
    # Bit patterns of |x| order like the numbers, with Inf above them and NaN above Inf: one
    # integer maximum finds the absolute maximum and non-finite values alike.
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(magnitude, axis=1)
    absmax = tl.maximum(top.to(tl.float32, bitcast=True), 1e-10)
    scale = tl.where(top >= 0x7F800000, float("nan"), tl.div_rn(absmax, 448.0))
    codes = (values * tl.div_rn(1.0, scale)[:, None]).to(tl.float8e4nv)
    return codes, scale


@triton.jit
def wait_for_producer(PDL: tl.constexpr):
    """Wait until the kernel before this one has finished, then let the next one start.

    Triggering only after the wait keeps the order transitive: a kernel that starts early knows
    that everything before its direct predecessor is complete. That is why weights, which no
    kernel of ours writes, may be requested before the wait, and nothing else may.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def split_range(split, splits, steps):
    """[begin, end) of `split` when `steps` equal pieces of work are shared by `splits`."""
    return split * steps // splits, (split + 1) * steps // splits


@triton.jit
def publish_partial(
    partial,  # [R, C] fp32
    offsets,  # [R, C] int32, where each element lies in a partial of SIZE elements
    mask,  # [R, C] bool
    scratch,  # [tiles, splits, SIZE] fp32
    counters,  # [tiles] int32, zero
    tile,
    split,
    splits,
    SIZE: tl.constexpr,
):
    """Store this split's partial sum and count it. Returns (where the tile's partials begin,
    True in the program that arrived last). The last one also sets the counter back to zero."""
    base = scratch + tile.to(tl.int64) * splits * SIZE
    tl.store(base + split * SIZE + offsets, partial, mask=mask)
    tl.debug_barrier()  # all threads have stored before one of them publishes
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == splits - 1
    if last:
        tl.store(counters + tile, 0)
    return base, last


@triton.jit
def sum_partials(base, offsets, mask, splits, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Sum a tile's partials in the order of the splits, CHUNK loads in flight. [R, C] fp32."""
    total = tl.zeros(offsets.shape, dtype=tl.float32)
    for first in range(0, splits, CHUNK):
        for i in tl.static_range(CHUNK):
            total += tl.load(
                base + (first + i) * SIZE + offsets,
                mask=mask & (first + i < splits),
                other=0.0,
                cache_modifier=".cg",
            )
    return total
