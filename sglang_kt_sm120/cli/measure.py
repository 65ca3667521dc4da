"""The command that times: bench."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from sglang_kt_sm120 import env
from sglang_kt_sm120.cli import plots
from sglang_kt_sm120.cli.options import (
    EXIT_PROBLEM,
    JsonOption,
    ModelOption,
    SetOption,
    ShapeOption,
    TpOption,
    gpu_to_run_on,
    linears,
    need,
    parse_ms,
)
from sglang_kt_sm120.cli.output import print_finding, print_json, progress, table


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
    given: Annotated[
        list[Path],
        typer.Option("--from", help="Time nothing: show results written as JSON; may be repeated."),
    ] = [],  # noqa: B006
) -> None:
    """Time a model's layers: ours, the host's own functions, and reading the weight alone."""
    from sglang_kt_sm120 import shapes

    layers = shapes.unique(linears(shape, model, shape_set, tp))
    ms = parse_ms(m)
    for file in filter(None, (csv_file, plot)):  # minutes of timing must not end in an error
        if not file.parent.is_dir():
            raise typer.BadParameter(f"{file.parent} is no folder")
    if plot:
        need("matplotlib")
    if given:
        records, environment = _read(given)
        _finish(records, environment, as_json, csv_file, plot)
        return
    index = gpu_to_run_on()
    from sglang_kt_sm120 import bench, devices, host

    candidates = bench.candidates(
        devices.device(index), devices.arch(index), env.PDL.get(), host.linear_functions()
    )
    records: list[bench.Record] = []
    with progress() as bar:
        task = bar.add_task("timing", total=len(layers) * len(ms))

        def show(latest) -> None:
            first = latest[0]
            bar.update(task, advance=1, description=f"{first.shape} M={first.m}")

        records = bench.run(layers, ms, candidates, progress=show)
    _finish(records, bench.environment(), as_json, csv_file, plot)


def _finish(records, environment: dict, as_json: bool, csv_file, plot) -> None:
    """Write, draw and show records; exit 1 where ours was wrong."""
    wrong = [record for record in records if record.candidate == "ours" and record.us is None]
    rows = [dataclasses.asdict(record) for record in records]
    if csv_file:
        _write_csv(csv_file, rows)
    if plot:
        plots.draw(plot, records)
    if as_json:
        print_json(not wrong, environment=environment, records=rows)
    else:
        _print(records)
    raise typer.Exit(EXIT_PROBLEM if wrong else 0)


def _read(files: list[Path]) -> tuple[list, dict]:
    """Records and environment of earlier runs; of the same case the last file's count."""
    from sglang_kt_sm120.records import Record

    records, environment = {}, {}
    for file in files:
        try:
            found = json.loads(file.read_text())
            environment = found.get("environment", {})
            for row in found["records"]:
                record = Record(**row)
                key = (record.shape, record.n, record.k, record.m, record.candidate)
                records[key] = record
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise typer.BadParameter(f"{file} holds no benchmark: {error}") from None
    return list(records.values()), environment


def _print(records) -> None:
    scales = {record.candidate: record.scales for record in records}
    names = list(scales)
    # A bare read has no scales.
    labels = (n if n == plots.FLOOR else f"{n} ({scales[n]} scales)" for n in names)
    columns = ("layer", "N,K", "M", *labels)
    title = "microseconds: median, and in brackets (largest - smallest) / median of the rounds"
    shown = table(*columns, title=title, whole=columns[1:3])
    for (layer, n, k, m), by_name in plots.cases(records).items():
        best = min(
            (r.us for name, r in by_name.items() if r.us and name != plots.FLOOR), default=None
        )
        times = []
        for name in names:
            record = by_name.get(name)
            us = record.us if record else None
            text = "-" if us is None else f"{us:.2f} ({record.spread or 0:.0%})"
            times.append(f"[bold green]{text}[/]" if us is not None and us == best else text)
        shown.add_row(layer, f"{n},{k}", str(m), *times)
    shown.show()
    for record in records:
        if record.note:
            where = f"{record.candidate} {record.shape} M={record.m}"
            print_finding(where, record.note, "yellow")


def _write_csv(file: Path, rows: list[dict]) -> None:
    with file.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
