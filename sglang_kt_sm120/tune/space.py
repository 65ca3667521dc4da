"""What the tuner tries: launch configurations of our kernels, the likely ones first.

Two steps. `variants` lists what has to be compiled for a class of M; `schedules` puts split counts
on one of them, from the registers and shared memory that the compiler reported. `neighbours` is
the second look around a configuration that did well. Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from sglang_kt_sm120 import heuristic
from sglang_kt_sm120.configs import table
from sglang_kt_sm120.heuristic import Config

#: Rows of prefill up to which split-K over 64-row tiles may still win.
SPLIT_PREFILL = 1024


def variants(rows: int, mma: str = "plain") -> list[Config]:
    """Return the variants (one split) of a class of M, in the order in which to try them.

    Args:
        rows: From `table.row_class`: the Ms of a class share their variants.
        mma: `select.Device.mma`: "block_scale" adds the block-scaled instruction in prefill.
    """
    made = {
        8: lambda: [*_direct(8), *_pipelined(8, fused=(True,))],
        16: lambda: [*_direct(16), *_pipelined(16, fused=(False, True))],
        32: lambda: list(_pipelined(32, fused=(False,))),
        64: lambda: [*_pipelined(64, fused=(False,)), *_pipelined(32, fused=(False,))],
        table.PREFILL: lambda: [*_tiled(mma), *_pipelined(64, fused=(False,))],
    }[rows]()
    return list(dict.fromkeys(made))


def _direct(block_m: int) -> Iterator[Config]:
    tiles = ((128, 8), (64, 4), (64, 2), (128, 4), (32, 2), (32, 1), (64, 1))
    # A limit of 128 registers is two blocks of eight warps an SM; none lets four K blocks breathe.
    for (block_n, warps), unroll, registers in itertools.product(tiles, (2, 4, 1), (0, 128)):
        yield Config(
            "direct", block_m, block_n, num_warps=warps, unroll=unroll, registers=registers,
            fused=True,
        )  # fmt: skip


def _pipelined(block_m: int, fused: tuple[bool, ...]) -> Iterator[Config]:
    tiles = ((128, 4), (64, 4), (64, 2), (128, 8), (32, 4))
    choices = itertools.product(tiles, (3, 4, 2), fused, (True, False))
    for (block_n, warps), stages, is_fused, swap in choices:
        if not swap and block_m < 16:  # tokens on the 16-wide side would be half padding
            continue
        yield Config(
            "pipelined", block_m, block_n, num_warps=warps, num_stages=stages, fused=is_fused,
            swap=swap, prefetch=0 if is_fused else 1, chunk=4,
        )  # fmt: skip


def _tiled(mma: str) -> Iterator[Config]:
    tiles = ((128, 128, 8), (64, 128, 4), (128, 64, 4), (64, 128, 8), (128, 128, 4), (64, 64, 4))
    kinds = (True, False) if mma == "block_scale" else (False,)
    for (block_m, block_n, warps), stages, unit in itertools.product(tiles, (3, 4, 2), kinds):
        yield Config(
            "tiled", block_m, block_n, num_warps=warps, num_stages=stages, unit_scaled=unit
        )


def schedules(
    variant: Config, m: int, n: int, k: int, device, need: heuristic.Resources
) -> list[Config]:
    """Return `variant` with the split counts worth a look, the fullest single wave first.

    Args:
        variant: With one split. device: A `select.Device`.
        need: What the compiler says it takes.
    """
    if variant.kernel == "tiled":
        return [variant]
    if variant.kernel == "pipelined" and m > SPLIT_PREFILL:
        return []
    resident = heuristic.resident(need, variant.num_warps, device)
    tiles_m = -(-m // variant.block_m)
    found: dict[Config, None] = {}
    # All that an SM holds, less of it (fewer partial sums, less traffic), and three waves for
    # layers of which one wave holds less than two programs a tile.
    for waves in (1.0, 0.5, 0.75, 3.0):
        programs = int(device.sm_count * resident * waves) // tiles_m
        found[heuristic.one_wave(variant, n, k, max(programs, 1))[0]] = None
    return list(found)


def neighbours(config: Config, k: int) -> list[Config]:
    """Return what lies one step from `config`: splits, reduction width, stages, raster."""
    changes: list[dict] = []
    if config.kernel == "tiled":
        changes += [{"group_m": group} for group in (1, 4, 8, 16, 32)]
    else:
        steps = -(-k // (heuristic.GROUP * config.unroll))
        some = (config.splits - 1, config.splits + 1, 2 * config.splits, config.splits // 2)
        equal = (heuristic.equal_splits(steps, splits) for splits in some if splits > 0)
        changes += [{"splits": splits} for splits in equal]
        changes += [{"chunk": chunk} for chunk in (4, 6, 8, 16)] if config.splits > 1 else []
    if config.kernel == "direct":
        changes += [{"registers": registers} for registers in (0, 96, 128)]
    if config.kernel == "pipelined":
        changes += [{"prefetch": prefetch} for prefetch in (0, 1, 2)]
    if config.kernel != "direct":
        changes += [{"num_stages": config.num_stages + step} for step in (-1, 1)]
    found = dict.fromkeys(replace(config, **change) for change in changes)
    return [near for near in found if near != config and possible(near, config.block_m, k)]


def possible(config: Config, m: int, k: int, limit: int | None = None) -> bool:
    """True where a table would take `config` for M = `m` (and `limit` bytes of shared memory)."""
    try:
        table.check(config, m, k)
    except table.BadTable:
        return False
    return limit is None or table.shared_bytes(config) <= limit
