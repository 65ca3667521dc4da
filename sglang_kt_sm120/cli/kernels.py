"""Commands that compile or run kernels: graphs, warm."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.markup import escape

from sglang_kt_sm120 import env
from sglang_kt_sm120.cli.options import (
    EXIT_NO_GPU,
    EXIT_PROBLEM,
    GpuOption,
    JsonOption,
    ModelOption,
    SetOption,
    ShapeOption,
    TpOption,
    asked_device,
    err,
    fail,
    linears,
    out,
    parse_ms,
    print_json,
    table,
)


def graphs(
    model: ModelOption = None,
    shape: ShapeOption = [],  # noqa: B006
    shape_set: SetOption = None,
    tp: TpOption = 1,
    bs: Annotated[
        str | None, typer.Option(help="Batch sizes [default: sglang's own list, 1 to 256].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Capture CUDA graphs of a model's layers, replay them, and compare with eager bit for bit."""
    import torch
    from rich.progress import Progress

    if not torch.cuda.is_available():
        raise fail("this needs a CUDA device, and torch sees none here", EXIT_NO_GPU)
    from sglang_kt_sm120 import graphs

    layers = linears(shape, model, shape_set, tp)
    sizes = parse_ms(bs) if bs else graphs.sglang_batch_sizes(256)
    if min(sizes) < 1:
        raise typer.BadParameter("batch sizes start at 1")
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("capturing", total=len(sizes))
        for row in graphs.check(layers, sizes, device):
            rows.append(row)
            progress.update(task, advance=1, description=f"captured batch size {row.bs}")
    ok = all(row.equal for row in rows)
    if as_json:
        name = torch.cuda.get_device_name(device)
        print_json(ok, device=name, rows=[dataclasses.asdict(row) for row in rows])
        raise typer.Exit(0 if ok else EXIT_PROBLEM)
    columns = ("batch size", "kernels per graph", "capture ms", "pool MiB", "replay us", "equal")
    shown = table(*columns, title=torch.cuda.get_device_name(device))
    for row in rows:
        kernels = "?" if row.kernels is None else str(row.kernels)
        mark = "[green]✓[/]" if row.equal else "[red]✗[/]"
        numbers = (f"{row.capture_ms:.2f}", f"{row.pool_mib:.1f}", f"{row.replay_us:.1f}")
        shown.add_row(str(row.bs), kernels, *numbers, mark)
    out.print(shown)
    for row in rows:
        for failure in row.failures:
            err.print(f"[red]batch size {row.bs}:[/] {escape(failure)}")
    raise typer.Exit(0 if ok else EXIT_PROBLEM)


def warm(
    model: ModelOption = None,
    shape: ShapeOption = [],  # noqa: B006
    shape_set: SetOption = None,
    tp: TpOption = 1,
    gpu: GpuOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilations at a time.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Compile a model's kernels into Triton's cache ahead of serving, also without a GPU."""
    from rich.progress import Progress

    layers, device = linears(shape, model, shape_set, tp), asked_device(gpu)
    from sglang_kt_sm120 import ahead, devices, system

    arch = devices.arch_of(seen=device.capability, real=device.capability)
    kernels = []
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("compiling", total=None)
        found = ahead.compile_all(layers, device, arch, env.PDL.get(), jobs=jobs)
        for done, total, item in found:
            kernels.append(dataclasses.asdict(item))
            progress.update(task, completed=done, total=total)
    if as_json:
        print_json(True, cache=str(system.triton_cache()), kernels=kernels)
        return
    out.print(f"{len(kernels)} kernel variants for {device.name} in {system.triton_cache()}")
