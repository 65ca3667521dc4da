"""Benchmark results as a picture: for each layer, time over the measured read floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FLOOR = "read"  # the candidate that only reads the weight
#: Not candidates: the floor, a foreign kernel, and ours with that kernel's own time in it.
NOT_DRAWN = {FLOOR, "plain", "ours behind plain"}
COLUMNS = 4


def cases(records) -> dict[tuple, dict[str, Any]]:
    """Group records by (layer, N, K, M): candidate -> record."""
    found: dict[tuple, dict[str, Any]] = {}
    for record in records:
        key = (record.shape, record.n, record.k, record.m)
        found.setdefault(key, {})[record.candidate] = record
    return found


def curves(records) -> dict[tuple, dict[str, list[tuple[int, float]]]]:
    """Return, for each (layer, N, K), candidate -> [(M, time over the read floor)], M ascending.

    Where several benchmarks were given, the last one's record counts. What was not timed, or has no
    floor beside it, is left out.
    """
    found: dict[tuple, dict[str, list]] = {}
    for (name, n, k, m), row in sorted(cases(records).items(), key=lambda item: item[0][3]):
        floor = row[FLOOR].us if FLOOR in row else None
        for candidate, record in row.items():
            if floor and record.us and candidate not in NOT_DRAWN:
                lines = found.setdefault((name, n, k), {})
                lines.setdefault(candidate, []).append((m, record.us / floor))
    return found


def draw(file: Path, records, title: str = "") -> None:
    """Write a PNG: a panel per layer, a line per candidate, M and ratio on logarithmic axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    layers = curves(records)
    columns = min(COLUMNS, max(1, len(layers)))
    rows = -(-len(layers) // columns) or 1
    figure = Figure(figsize=(4 * columns, 3 * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    names = list(dict.fromkeys(name for lines in layers.values() for name in lines))
    handles: dict[str, Any] = {}
    for axis, ((layer, n, k), lines) in zip(axes, layers.items(), strict=False):
        for index, name in enumerate(names):
            if name in lines:
                style = {"color": f"C{index}", "marker": "o", "markersize": 3}
                style["linewidth"] = 2.2 if name == "ours" else 1.2
                (handles[name],) = axis.plot(*zip(*lines[name], strict=True), **style)
        axis.axhline(1, color="grey", linewidth=0.8, linestyle="--")
        axis.set(title=f"{n} x {k}  ({layer})", xscale="log", yscale="log", xlabel="M")
        axis.set_ylabel("time / read floor")
        ms = sorted({m for line in lines.values() for m, _ in line})
        axis.set_xticks(ms, [str(m) for m in ms])
        for direction in (axis.xaxis, axis.yaxis):
            direction.set_minor_formatter(NullFormatter())
        axis.yaxis.set_major_locator(_ticks())
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.title.set_fontsize("medium")
    for axis in axes[len(layers) :]:
        axis.set_visible(False)
    figure.suptitle(title or "lower is better; the dashed line is reading the weight and no more")
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=COLUMNS)
    figure.savefig(file, dpi=110)


def _ticks():
    from matplotlib.ticker import FixedLocator

    return FixedLocator([1, 1.5, 2, 3, 5, 8, 12, 20])
