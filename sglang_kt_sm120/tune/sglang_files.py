"""Tuned files for sglang's own Triton kernel, in sglang's own format, so that stock profits too.

sglang looks for one file per (N, K) in the folder `configs` beside its fp8_kernel.py, and takes the
entry whose M is nearest. The search times stock's real kernel, called through stock's real linear
function, over the six keys that the files have.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_kt_sm120.configs import store
from sglang_kt_sm120.tune.contract import Contender, Event, Outcome, Timing
from sglang_kt_sm120.tune.engine import BATCH, COARSE, CONFIRM, MIN_GAIN, keep

KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
#: What stock launches where it has no file.
DEFAULT = dict(zip(KEYS, (64, 128, 128, 32, 4, 3), strict=True))
#: The module function through which stock's launcher asks for its file's content.
LOOKUP = "get_w8a8_block_fp8_configs"
LAUNCHER = "w8a8_block_fp8_matmul_triton"
SHARED_LIMIT = 101376


@dataclass(frozen=True)
class Stock:
    """A configuration of stock's kernel: the values of `KEYS` in order."""

    values: tuple[int, ...]
    kernel: str = field(default="stock", compare=False)

    def as_dict(self) -> dict[str, int]:
        """Return it as sglang's files have it."""
        return dict(zip(KEYS, self.values, strict=True))


def file_name(n: int, k: int, device_name: str) -> str:
    """Return the name under which sglang looks for the configurations of an [n, k] weight."""
    device = device_name.replace(" ", "_")
    return f"N={n},K={k},device_name={device},dtype=fp8_w8a8,block_shape=[128, 128].json"


def grid(m: int, shared_bytes: int = SHARED_LIMIT) -> list[Stock]:
    """Return the configurations to try for `m` rows, small tiles first where rows are few.

    Shared memory: the ring of `num_stages` tiles must fit (stock's kernel is pipelined by Triton).
    """
    sizes_m = (16, 32) if m <= 16 else (16, 32, 64) if m <= 64 else (64, 128, 32)
    found = []
    for block_m, block_n, warps, stages, group in itertools.product(
        sizes_m, (128, 64, 32), (4, 8), (3, 4, 5, 2), (1, 32) if m > 64 else (1,)
    ):
        if (stages - 1) * (block_m + block_n) * 128 <= shared_bytes:
            found.append(Stock((block_m, block_n, 128, group, warps, stages)))
    return found


@contextlib.contextmanager
def launched_with(function: Callable, config: dict[str, int]) -> Iterator[None]:
    """Let stock's linear function launch its kernel with `config`, whatever files there are.

    Args:
        function: The host's `triton_w8a8_block_fp8_linear`.

    Raises:
        RuntimeError: This host's launcher is not as in any release that is known here.
    """
    launcher = inspect.unwrap(function).__globals__.get(LAUNCHER)
    names = getattr(launcher and inspect.unwrap(launcher), "__globals__", {})
    if LOOKUP not in names:
        raise RuntimeError(f"this sglang's {LAUNCHER} does not ask {LOOKUP}: nothing to tune here")
    before = names[LOOKUP]
    names[LOOKUP] = lambda *args, **kwargs: {1: dict(config)}
    try:
        yield
    finally:
        names[LOOKUP] = before


def search(
    measure: Callable[..., list[Timing]],
    shapes: Sequence,
    ms: Sequence[int],
    cases: dict[str, dict],
    *,
    budget: float,
    shared_bytes: int = SHARED_LIMIT,
    save: Callable[[], None] = lambda: None,
    notify: Callable[[Event], None] = lambda event: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Find what stock's kernel should use for every (shape, M) that `cases` does not hold yet.

    Args:
        measure: As `engine.Bench.time`, for contenders whose config is a `Stock`.
        shapes, ms, cases, save, notify, clock: As for `engine.Tuner`.
        budget: Seconds.
    """
    end, outcome = clock() + budget, Outcome()
    # As in the tuner: a search that the clock cut short is done again.
    todo = [(s, m) for m in ms for s in shapes if cases.get(key(s, m), {}).get("effort") != "full"]
    total = len(ms) * len(shapes)
    try:
        for index, (shape, m) in enumerate(todo):
            if clock() >= end:
                outcome.ended = "budget"
                break
            event = Event(shape, m, total - len(todo) + index, total, "coarse", 0)
            try:
                found = _case(measure, event, shared_bytes, notify, lambda: end - clock())
            except Exception as error:  # one case (its memory, say) must not end the run
                found = f"{type(error).__name__}: {error}"
            if isinstance(found, str):
                outcome.failures.append(f"N={shape.n} K={shape.k} M={m}: {found}")
                continue
            cases[key(shape, m)] = found
            if found["effort"] == "cut":
                outcome.ended = "budget"
            keep(save, outcome)
    except KeyboardInterrupt:
        outcome.ended = "interrupted"
    return outcome


def _case(measure, event: Event, shared_bytes: int, notify, left) -> dict | str:
    """Return the record of one (shape, M), or what is wrong with stock's kernel there."""
    shape, m = event.shape, event.m
    default = Contender("stock", Stock(tuple(DEFAULT.values())))
    listed = [Contender("stock", config) for config in grid(m, shared_bytes)]
    listed = [contender for contender in listed if contender != default]
    times: dict[Contender, float] = {}
    effort = "full"
    for first in range(0, len(listed), BATCH):
        if first and left() <= 0:
            effort = "cut"
            break
        batch = listed[first : first + BATCH]
        base, *rest = measure(shape, m, [default, *batch], **COARSE)
        if base.us is not None:
            done = zip(batch, rest, strict=True)
            times |= {c: t.us / base.us for c, t in done if t.us is not None}
        event.tried = min(first + BATCH, len(listed))
        event.part, event.left = event.tried / len(listed), max(left(), 0.0)
        if times:
            best = min(times, key=times.__getitem__)
            event.best, event.ratio = str(best.config.values), times[best]
        notify(event)
    best = min(times, key=times.__getitem__, default=None)
    finalists = [default] if best is None else [default, best]
    before, *after = measure(shape, m, finalists, **CONFIRM, fresh=True)
    if before.us is None:
        return f"stock: {before.note}"
    won = after and after[0].us is not None and after[0].us <= (1 - MIN_GAIN) * before.us
    return {
        "name": shape.name, "n": shape.n, "k": shape.k, "m": m, "old_us": before.us,
        "us": after[0].us if won else before.us, "effort": effort,
        "config": (best if won else default).config.as_dict(),
    }  # fmt: skip


def key(shape, m: int) -> str:
    """Return the name of a case in the state file."""
    return f"stock:{shape.n},{shape.k},{m}"


def write(folder: Path, cases: Iterable[dict], device_name: str) -> list[Path]:
    """Write one file per (N, K) of the finished cases, each M as key; return their paths.

    Only the six keys that sglang passes to its kernel: an unknown one would fail the launch.

    Raises:
        OSError: The folder cannot be written.
    """
    files: dict[str, dict[int, Any]] = {}
    for case in cases:
        name = file_name(case["n"], case["k"], device_name)
        files.setdefault(name, {})[case["m"]] = {one: case["config"][one] for one in KEYS}
    written = []
    for name, by_m in sorted(files.items()):
        store.save(folder / name, {str(m): by_m[m] for m in sorted(by_m)})
        written.append(folder / name)
    return written
