"""The command that times: bench."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from sglang_kt_sm120 import env
from sglang_kt_sm120.cli.options import (
    EXIT_PROBLEM,
    JsonOption,
    ModelOption,
    SetOption,
    ShapeOption,
    TpOption,
    err,
    linears,
    need,
    need_gpu,
    out,
    parse_ms,
    print_json,
    table,
)

FLOOR = "read"  # the candidate that only reads the weight


def bench(
    model: ModelOption = None,
    shape: ShapeOption = [],  # noqa: B006
    shape_set: SetOption = None,
    tp: TpOption = 1,
    m: Annotated[str, typer.Option(help="Rows, separated by commas.")] = "1,2,4,8,16,32,64",
    as_json: JsonOption = False,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the records there.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time over the read floor there (PNG; matplotlib).")
    ] = None,
) -> None:
    """Time a model's layers: ours, the host's own functions, and reading the weight alone."""
    from rich.progress import Progress

    from sglang_kt_sm120 import shapes

    layers = shapes.unique(linears(shape, model, shape_set, tp))
    ms = parse_ms(m)
    if min(ms) < 1:
        raise typer.BadParameter("rows start at 1")
    for file in filter(None, (csv_file, plot)):  # minutes of timing must not end in an error
        if not file.parent.is_dir():
            raise typer.BadParameter(f"{file.parent} is no folder")
    if plot:
        need("matplotlib")
    need_gpu()
    from sglang_kt_sm120 import bench, devices, host

    candidates = bench.candidates(
        devices.device(0), devices.arch(0), env.PDL.get(), host.linear_functions()
    )
    records: list[bench.Record] = []
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("timing", total=len(layers) * len(ms))

        def show(latest) -> None:
            first = latest[0]
            progress.update(task, advance=1, description=f"{first.shape} M={first.m}")

        records = bench.run(layers, ms, candidates, progress=show)
    wrong = [record for record in records if record.candidate == "ours" and record.us is None]
    rows = [record.as_dict() for record in records]
    if csv_file:
        _write_csv(csv_file, rows)
    if plot:
        _draw(plot, records)
    if as_json:
        print_json(not wrong, environment=bench.environment(), records=rows)
    else:
        _print(records)
    raise typer.Exit(EXIT_PROBLEM if wrong else 0)


def _print(records) -> None:
    names = list(dict.fromkeys(record.candidate for record in records))
    columns = ("layer", "N,K", "M", *(f"{name} us" for name in names))
    shown = table(*columns, whole=columns[1:])
    for (layer, n, k, m), by_name in _cases(records).items():
        best = min((r.us for name, r in by_name.items() if r.us and name != FLOOR), default=None)
        times = []
        for name in names:
            us = by_name[name].us if name in by_name else None
            text = "-" if us is None else f"{us:.2f}"
            times.append(f"[bold green]{text}[/]" if us is not None and us == best else text)
        shown.add_row(layer, f"{n},{k}", str(m), *times)
    out.print(shown)
    for record in records:
        if record.note:
            where = f"{record.candidate} {record.shape} M={record.m}"
            err.print(f"[yellow]{where}:[/] {escape(record.note)}")


def _cases(records) -> dict[tuple, dict[str, Any]]:
    cases: dict[tuple, dict[str, Any]] = {}
    for record in records:
        key = (record.shape, record.n, record.k, record.m)
        cases.setdefault(key, {})[record.candidate] = record
    return cases


def _write_csv(file: Path, rows: list[dict]) -> None:
    with file.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _draw(file: Path, records) -> None:
    """Draw, for each layer, time over the measured read floor against M, a line per candidate."""
    from matplotlib.figure import Figure

    layers = list(dict.fromkeys((record.shape, record.n, record.k) for record in records))
    figure = Figure(figsize=(4 * min(4, len(layers)), 3 * -(-len(layers) // 4)), layout="tight")
    axes = figure.subplots(-(-len(layers) // 4), min(4, len(layers)), squeeze=False).flatten()
    for axis, (name, n, k) in zip(axes, layers, strict=False):
        cases = {c[3]: r for c, r in _cases(records).items() if c[:3] == (name, n, k)}
        for candidate in dict.fromkeys(record.candidate for record in records):
            points = [
                (m, row[candidate].us / row[FLOOR].us)
                for m, row in cases.items()
                if candidate in row and row[candidate].us and row[FLOOR].us
            ]
            if points and candidate != FLOOR:
                axis.plot(*zip(*points, strict=True), marker="o", label=candidate)
        axis.set(title=f"{name} {n}x{k}", xscale="log", xlabel="M", ylabel="time / read floor")
        axis.axhline(1, color="grey", linewidth=0.5)
        axis.legend(fontsize="small")
    figure.savefig(file, dpi=120)
