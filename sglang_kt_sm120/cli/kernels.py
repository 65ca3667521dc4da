"""Commands that compile or capture kernels: graphs, warm, aot."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.markup import escape

from sglang_kt_sm120 import env
from sglang_kt_sm120.cli.options import (
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
    need,
    need_gpu,
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
        str | None, typer.Option(help="Batch sizes (default: sglang's own list, 1 to 256).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Capture CUDA graphs of a model's layers, replay them, and compare with eager bit for bit."""
    from rich.progress import Progress

    layers = linears(shape, model, shape_set, tp)
    sizes = parse_ms(bs) if bs else None
    if sizes and min(sizes) < 1:
        raise typer.BadParameter("batch sizes start at 1")
    need_gpu()
    import torch

    from sglang_kt_sm120 import graphs

    sizes = sizes or graphs.sglang_batch_sizes(256)
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
    need("torch", "triton")
    import triton

    from sglang_kt_sm120 import ahead, aot, devices, system

    target = "sm_{}{}a".format(*device.capability)
    if not aot.assembler_knows(target):
        raise fail(
            f"the ptxas of Triton {triton.__version__} does not know {target} ({device.name}); set "
            "TRITON_PTXAS_PATH (from Triton 3.6 on TRITON_PTXAS_BLACKWELL_PATH) to the ptxas of "
            "CUDA 12.9 or newer, for serving too",
            EXIT_PROBLEM,
        )
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


def aot(
    model: ModelOption = None,
    shape: ShapeOption = [],  # noqa: B006
    shape_set: SetOption = None,
    tp: TpOption = 1,
    arch: Annotated[
        list[str], typer.Option(help="Target, sm_120a or sm_121a; may be repeated (default: both).")
    ] = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Compile every kernel that selection can return, and judge registers, spills and SASS."""
    need("torch", "triton")
    import triton
    from rich.progress import Progress

    from sglang_kt_sm120 import aot, devices, heuristic

    layers = linears(shape, model, shape_set, tp)
    unknown = set(arch) - set(aot.ARCHES)
    if unknown:
        raise typer.BadParameter(f"{sorted(unknown)}: expected {' or '.join(aot.ARCHES)}")
    named = [(layer.n, layer.k) for layer in layers]
    configs = {
        config.variant(): config
        for gpu in devices.GPUS
        for deterministic in (False, True)
        for prequantised in (False, True)
        for config in heuristic.all_configs(
            named, devices.describe(gpu.pattern), prequantised=prequantised,
            deterministic=deterministic,
        )
    }  # fmt: skip
    records, facts = [], []
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("compiling", total=(len(configs) + 1) * len(arch or aot.ARCHES))
        for target in arch or aot.ARCHES:
            if not aot.assembler_knows(target):
                facts.append(
                    f"{target}: this Triton ({triton.__version__}) has no assembler for it"
                )
                progress.advance(task, len(configs) + 1)
                continue
            for record in aot.report(configs.values(), target):
                records.append(record)
                progress.update(task, advance=1, description=f"{target} {record['name']}")
    ok = bool(records) and not any(record["failures"] for record in records)
    if as_json:
        print_json(ok, kernels=records, facts=facts)
        raise typer.Exit(0 if ok else EXIT_PROBLEM)
    columns = ("", "kernel", "arch", "regs", "shared", "mma", "/SM")
    shown = table(*columns, whole=columns)
    for record in records:
        mma = " ".join(f"{count} {name}" for name, count in record.get("mma", {}).items())
        numbers = [str(record.get(key, "")) for key in ("registers", "shared_bytes")]
        shown.add_row(
            "[red]✗[/]" if record["failures"] else "[green]✓[/]", record["name"], record["arch"],
            *numbers, mma, str(record.get("programs_per_sm", "")),
        )  # fmt: skip
    out.print(shown)
    for record in records:
        for failure in record["failures"]:
            err.print(f"[red]{record['arch']} {record['name']}:[/] {escape(failure)}")
    for fact in facts:
        out.print(escape(fact))
    raise typer.Exit(0 if ok else EXIT_PROBLEM)
