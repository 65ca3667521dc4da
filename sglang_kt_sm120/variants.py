"""Which compiled kernel variants layers can meet: the one enumeration of what selection returns.

Warming, compiling ahead and judging all ask here. Two configurations are one variant where they
differ only in what is passed at run time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sglang_kt_sm120 import heuristic, limits, select

#: Rows beyond decode at which a prefill configuration could change, each the M of a bucket.
PREFILL_MS = (96, 128, 256, 512, 1024, 2048, 4096, 8192)

#: Narrow, square, wide, short and tiny layers: between them every kernel variant comes up.
SHAPES = ((2112, 7168), (7168, 2048), (4096, 7168), (24576, 1536), (36864, 7168), (576, 256))


def rows(problem: select.Problem, device: select.Device) -> list[int]:
    """Return Ms among which every configuration of this shape comes up."""
    tuned = select.tuned_rows(problem, device)
    if not tuned:
        return [*range(1, select.DECODE_M + 1), *PREFILL_MS]
    # A table may cut any range out of the heuristic's: then every bucket is asked.
    return select.buckets(5 * max(*tuned, PREFILL_MS[-1]))


def representatives(
    problem: select.Problem,
    device: select.Device,
    cutlass: limits.Known = select.NOTHING_KNOWN,
) -> list[int]:
    """Return one M for each compiled kernel variant that the shape of `problem` can take."""
    found: dict[tuple, int] = {}
    for m in rows(problem, device):
        choice = select.choose(replace(problem, m=m), device, cutlass)
        variant = choice.config.variant() if hasattr(choice.config, "variant") else None
        found.setdefault((choice.backend, variant), m)
    return list(found.values())


@dataclass(frozen=True)
class Met:
    """A variant of ours and where it is met first: launching it there compiles it."""

    problem: select.Problem
    config: heuristic.Config


def shared(
    device: select.Device,
    *,
    dtype: str = "bfloat16",
    deterministic: Iterable[bool] = (False, True),
    prequantised: Iterable[bool] = (False, True),
) -> list[Met]:
    """Return what the first layer of a process compiles for all: every variant of `SHAPES`."""
    return _each_once(SHAPES, device, dtype, deterministic, prequantised)


def met(
    layers: Iterable[tuple[int, int]],
    device: select.Device,
    *,
    dtype: str = "bfloat16",
    deterministic: Iterable[bool] = (False, True),
    prequantised: Iterable[bool] = (False, True),
) -> list[Met]:
    """Return every variant of ours that a process with these (n, k) layers compiles, each once.

    The layers' own, those of tuned tables among them, and what the first layer compiles for all.
    A layer whose N is no multiple of 16 has kernels of its own; where the first layer is one, those
    for all are compiled for such.
    """
    layers = list(dict.fromkeys(layers))
    flags = (dtype, tuple(deterministic), tuple(prequantised))
    found = {
        (met.config.variant(), met.problem.n % 16 == 0): met
        for met in reversed(_each_once(layers, device, *flags))
    }
    tuned = [Met(select.Problem(1, 1, 128, dtype), c) for c in select.tuned_configs(device)]
    for item in (*_each_once(SHAPES, device, *flags), *tuned):
        for aligned, n in {n % 16 == 0: n for n, _ in layers}.items():
            config = replace(item.config, splits=1)
            problem = replace(item.problem, m=config.block_m, n=n)
            found.setdefault((config.variant(), aligned), Met(problem, config))
    return list(found.values())


def _each_once(layers, device, dtype, deterministic, prequantised) -> list[Met]:
    found: dict[tuple, Met] = {}
    for n, k in layers:
        for fixed in deterministic:
            for given in prequantised:
                first = select.Problem(1, n, k, dtype, given, fixed)
                try:
                    ms = representatives(first, device)
                except select.NoBackend:  # forced or switched off by hand: none of ours is met
                    continue
                for m in ms:
                    problem = replace(first, m=m)
                    config = select.choose(problem, device).config
                    if isinstance(config, heuristic.Config):
                        key = (config.variant(), n % 16 == 0)
                        found.setdefault(key, Met(problem, config))
    return list(found.values())
