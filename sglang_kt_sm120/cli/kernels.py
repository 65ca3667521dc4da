"""Commands that compile or capture kernels: graphs, warm, aot."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.markup import escape

from sglang_kt_sm120 import env
from sglang_kt_sm120.cli.options import (
    DTYPE_HELP,
    DTYPES,
    EXIT_PROBLEM,
    DtypeOption,
    GpuOption,
    JsonOption,
    ModelOption,
    SetOption,
    ShapeOption,
    TpOption,
    asked_device,
    fail,
    linears,
    need,
    need_gpu,
    parse_dtype,
    parse_ms,
)
from sglang_kt_sm120.cli.output import err, out, print_json, table


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
        try:
            for row in graphs.check(layers, sizes, device):
                rows.append(row)
                progress.update(task, advance=1, description=f"captured batch size {row.bs}")
        except torch.OutOfMemoryError as error:
            text = f"{error}; is a server running on this GPU? Stop it first, or take fewer --shape"
            raise fail(text, EXIT_PROBLEM) from None
        except Exception as error:  # the layers could not be made: no batch size to name
            raise fail(f"{type(error).__name__}: {error}", EXIT_PROBLEM) from error
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
    shown.show()
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
    dtype: DtypeOption = "bfloat16",
    jobs: Annotated[int, typer.Option(min=1, help="Compilations at a time.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Compile a model's kernels into Triton's cache ahead of serving, also without a GPU."""
    from rich.progress import Progress

    dtype = parse_dtype(dtype)
    layers, device = linears(shape, model, shape_set, tp), asked_device(gpu)
    need("torch", "triton")
    import torch
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
        found = ahead.compile_all(
            layers, devices.as_this_triton_can(device), arch, env.PDL.get(),
            dtype=getattr(torch, dtype), jobs=jobs,
        )  # fmt: skip
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
    dtype: Annotated[
        list[str], typer.Option(help=f"{DTYPE_HELP} May be repeated (default: both).")
    ] = [],  # noqa: B006
    jobs: Annotated[int, typer.Option(min=1, help="Compilations at a time.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Compile every kernel that selection can return, and judge registers, spills and SASS."""
    wanted = [parse_dtype(name) for name in dtype]
    need("torch", "triton")
    from rich.progress import Progress

    from sglang_kt_sm120 import aot, shapes

    layers = [(layer.n, layer.k) for layer in linears(shape, model, shape_set, tp)]
    unknown = set(arch) - set(aot.ARCHES)
    if unknown:
        raise typer.BadParameter(f"{sorted(unknown)}: expected {' or '.join(aot.ARCHES)}")
    dtypes = [short for short in aot.DTYPES if not wanted or DTYPES[short] in wanted]
    judged = [(layer.n, layer.k) for name in JUDGED_SETS for layer in shapes.SHAPE_SETS[name]]
    judged = list(dict.fromkeys(judged))
    records, facts, schedules = [], [], []
    with Progress(console=err, transient=True) as progress:
        for target in arch or aot.ARCHES:
            facts += aot.facts(target)
            if not aot.assembler_knows(target):
                continue
            cards = _cards_of(target)
            configs = {
                met.config.variant() for card in cards for met in _met([*layers, *judged], card)
            }
            configs = sorted(configs, key=aot.name_of)
            total = (len(configs) + 1) * len(dtypes)
            task = progress.add_task(f"compiling for {target}", total=total)
            made = []
            for record in aot.report(configs, target, dtypes, jobs=jobs):
                made.append(record)
                progress.update(task, advance=1, description=f"{target} {record['name']}")
            records += made
            if made and target == aot.ARCHES[0]:  # 188 SMs, whatever flags a server runs with
                for given, fixed in ((False, False), (True, False), (False, True)):
                    schedules += aot.judge_schedules(
                        judged, cards[0], made, prequantised=given, deterministic=fixed
                    )
    ok = bool(records) and not any(record["failures"] for record in records)
    ok = ok and not any(schedule.failures for schedule in schedules)
    if as_json:
        listed = [schedule.as_dict() for schedule in schedules]
        print_json(ok, kernels=records, schedules=listed, facts=facts)
        raise typer.Exit(0 if ok else EXIT_PROBLEM)
    _print_aot(records, schedules)
    for fact in facts:
        out.print(escape(fact))
    raise typer.Exit(0 if ok else EXIT_PROBLEM)


#: Sets whose decode schedules are judged on a card of 188 SMs, whatever layers are asked for.
JUDGED_SETS = ("deepseek-r1", "qwen3.6-27b")


def _cards_of(target: str) -> list:
    """The cards that `target` is for, the largest first, as the installed Triton serves them.

    Each with both prefill instructions: SGLANG_KT_SM120_MMA may ask for either on any card.
    """
    from sglang_kt_sm120 import aot, devices

    cards = [devices.describe(gpu.pattern) for gpu in devices.GPUS]
    cards = [card for card in cards if "sm_{}{}a".format(*card.capability) == target]
    block_scale = aot.features(target).block_scale
    kinds = ("plain", "block_scale") if block_scale else ("plain",)
    return [
        devices.as_this_triton_can(dataclasses.replace(card, mma=kind))
        for card in cards
        for kind in kinds
    ]


def _met(layers: list[tuple[int, int]], card) -> list:
    from sglang_kt_sm120 import variants

    return variants.met(layers, card)


def _print_aot(records: list[dict], schedules: list) -> None:
    columns = ("", "kernel", "arch", "dtype", "regs", "spills", "shared", "mma")
    shown = table(*columns, whole=columns)
    for record in records:
        mma = " ".join(f"{count} {name}" for name, count in record.get("mma", {}).items())
        numbers = [record.get(key, "") for key in ("registers", "spills", "shared_bytes")]
        shown.add_row(
            "[red]✗[/]" if record["failures"] else "[green]✓[/]", record["name"],
            record["arch"].removeprefix("sm_"), record["dtype"], *map(str, numbers), mma,
        )  # fmt: skip
    shown.show()
    resources = _resource_table(records)
    if resources.rows:
        resources.show()
    read_in_ptx = {record["arch"] for record in records if record.get("source") == "ptx"}
    for arch in sorted(read_in_ptx):
        out.print(f"{arch}: this Triton's nvdisasm cannot read it; judged from PTX")
    for record in records:
        for failure in record["failures"]:
            where = f"{record['arch']} {record['name']} {record['dtype']}"
            err.print(f"[red]{where}:[/] {escape(failure)}")
    failed = [schedule for schedule in schedules if schedule.failures]
    if not schedules:  # judged with the kernels for sm_120a
        return
    out.print(
        f"{len(schedules)} decode schedules on 188 SMs: {len(schedules) - len(failed)} keep every "
        "SM busy with 32 KiB in flight, or all of its share"
    )
    for schedule in failed:
        for failure in schedule.failures:
            err.print(f"[red]{schedule.n} x {schedule.k} from M = {schedule.m}:[/] {failure}")


def _resource_table(records: list[dict]):
    """What bounds a variant: its place on an SM, and a trip of its loop by the model."""
    resources = ("tensor", "issue", "shared", "l2")  # of aot/tile_model.py, in cycles
    columns = ("kernel", "CTAs/SM", "KiB in flight", "mma/K block", *resources, "limit")
    shown = table(*columns, whole=columns, title="one SM, and cycles of one trip of the loop")
    for record in records:
        model = record.get("model")
        if not model or record["dtype"] != "bf16":
            continue
        flight = record.get("bytes_in_flight")
        shown.add_row(
            record["name"], str(record["programs_per_sm"]), f"{flight >> 10}" if flight else "",
            f"{record['mma_per_k_block']:g}", *(str(model["cycles"][name]) for name in resources),
            model["limit"],
        )  # fmt: skip
    return shown
