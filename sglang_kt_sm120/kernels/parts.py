"""Device functions shared by the kernels: quantisation, split-K, dependent launch, stores.

Vocabulary used in this package: a *K block* is 128 columns of K (one weight scale row block, one
activation scale); a *tile* is the part of the output that one program computes; a *split* is one
of the programs that share a tile, each over its own range of K blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# Dependent-launch instructions exist on every GPU these kernels are for, not in the interpreter.
# They are written out because Triton 3.4.0's own wrappers do not compile.
GDC = not knobs.runtime.interpret


def as_it_is(kernel):
    """Launch `kernel` itself. Whoever wants to see launches instead passes another function.

    What that returns is used as `returned[grid](*arguments, **constants_and_options)`.
    """
    return kernel


@triton.jit
def _gdc_wait():
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _gdc_launch_dependents():
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _over_448(a):
    """a / 448, correctly rounded, without the branches of a general division.

    One step of Markstein's correction of a * fl(1 / 448): right for every fp32 mantissa (checked
    exhaustively), a between 1e-10 and the largest fp32.
    """
    guess = a * (1.0 / 448.0)
    return tl.fma(tl.fma(guess, -448.0, a), 1.0 / 448.0, guess)


@triton.jit
def _reciprocal(s):
    """1 / s, correctly rounded, without branches: two corrections of a division of 2 ulp.

    Right for every mantissa but the one of all ones, which a / 448 never has for an a of 11 bits
    (bf16 and fp16 maxima).
    """
    guess = 1.0 / s
    guess = tl.fma(tl.fma(guess, -s, 1.0), guess, guess)
    return tl.fma(tl.fma(guess, -s, 1.0), guess, guess)


@triton.jit
def quantise_groups(x):
    """Quantise rows of one K block each.

    x: [R, 128] bf16 or fp16. Returns (codes [R, 128] e4m3, scales [R] fp32) with
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
    scale = tl.where(top >= 0x7F800000, float("nan"), _over_448(absmax))
    codes = (values * _reciprocal(scale)[:, None]).to(tl.float8e4nv)
    return codes, scale


@triton.jit
def wait_for_producer(GDC: tl.constexpr):
    """Wait until the kernel before this one has finished, then let the next one start.

    Both do nothing where the launch does not ask for dependent launch. Triggering only after the
    wait keeps the order transitive: a kernel that starts early knows that everything before its
    direct predecessor is complete. That is why weights, which no kernel of ours writes, may be
    requested before the wait, and nothing else may.
    """
    if GDC:
        _gdc_wait()
        _gdc_launch_dependents()


@triton.jit
def prefetch_lines(pointers, GDC: tl.constexpr):
    """Ask L2 for the line of each pointer. A hint: it may come before the wait, for weights."""
    if GDC:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def fence(GDC: tl.constexpr):
    """Keep memory requests above this line above it.

    A dependent-launch wait that is already satisfied costs one instruction and, unlike a barrier,
    holds in a program of one warp too.
    """
    if GDC:
        _gdc_wait()


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


@triton.jit
def store_tile(
    accumulator,  # [R, C] fp32, this split's sum
    pointers,  # [R, C], where the output's elements lie
    inside,  # [R, C] bool
    token,  # [R, 1] or [1, C] int32
    row,  # the other way round
    scratch,
    counters,
    tile,
    split,
    splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store a tile of the output: at once if it has one split, else by the split that ends last."""
    if splits == 1:
        tl.store(pointers, accumulator.to(pointers.dtype.element_ty), mask=inside)
    else:
        offsets = token * BLOCK_N + row
        partials, is_last = publish_partial(
            accumulator, offsets, inside, scratch, counters, tile, split, splits, BLOCK_M * BLOCK_N
        )
        if is_last:
            total = sum_partials(partials, offsets, inside, splits, BLOCK_M * BLOCK_N, CHUNK)
            tl.store(pointers, total.to(pointers.dtype.element_ty), mask=inside)
