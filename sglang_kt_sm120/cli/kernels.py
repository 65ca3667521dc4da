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
    bad,
    fail,
    gpu_to_run_on,
    linears,
    need,
    parse_dtype,
    parse_ms,
)
from sglang_kt_sm120.cli.output import (
    out,
    print_error,
    print_finding,
    print_json,
    print_note,
    progress,
    table,
)

#: Sets whose decode schedules are judged on a card of 188 SMs, whatever layers are asked for.
JUDGED_SETS = ("deepseek-r1", "qwen3.6-27b")


def graphs(
    model: ModelOption = None,
    shape: ShapeOption = [],  # noqa: B006
    shape_set: SetOption = None,
    tp: TpOption = 1,
    bs: Annotated[
        str | None,
        typer.Option(
            help="Batch sizes (default: sglang's own list up to 256; a server's log names its own)."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Capture CUDA graphs of a model's layers, replay them, and compare with eager bit for bit.

    Exit codes: 0 every graph equals eager, 1 one does not or could not be made, 2 a value that no
    option takes, 3 no CUDA device.
    """
    layers = linears(shape, model, shape_set, tp)
    sizes = None if bs is None else parse_ms(bs, "--bs")
    index = gpu_to_run_on()
    import torch

    from sglang_kt_sm120 import graphs, host, op
    from sglang_kt_sm120.backends import cutlass

    sizes = sizes or graphs.sglang_batch_sizes(256)
    device, name = torch.device("cuda", index), torch.cuda.get_device_name(index)
    try:
        host.offer_cutlass()
    except Exception as error:  # this is the tool for a server that is broken
        why = f"{type(error).__name__}: {error}"
        print_note(f"sglang does not import ({why}): only our own kernels are checked")
    wanted = {
        kernel
        for layer in layers
        for kernels in op.cutlass_to_prove(device, layer.n, layer.k, torch.bfloat16)
        for kernel in kernels
    }
    if any(map(cutlass.is_built_at_use, wanted)):
        print_note("the host's CUTLASS kernel is tried first; building it once takes nvcc minutes")
    rows, stopped = [], None
    with progress() as bar:
        task = bar.add_task("making layers", total=len(sizes))
        try:
            for row in graphs.check(layers, sizes, device):
                rows.append(row)
                bar.update(task, advance=1, description=f"captured batch size {row.bs}")
        except torch.OutOfMemoryError as error:
            stopped = (
                f"{error} Is a server running on this GPU? Stop it first; or take a larger --tp, "
                "or a smaller --bs"
            )
        except Exception as error:  # the layers could not be made: no batch size to name
            stopped = f"{type(error).__name__}: {error}"
    ok = stopped is None and all(row.equal for row in rows)
    if as_json:
        why = {"error": stopped} if stopped else {}
        print_json(ok, **why, device=name, rows=[dataclasses.asdict(row) for row in rows])
    elif rows:
        _print_graphs(name, rows)
    for row in rows:
        for failure in row.failures:
            print_finding(f"batch size {row.bs}", failure)
    if stopped:
        print_error(stopped)
    raise typer.Exit(0 if ok else EXIT_PROBLEM)


def _print_graphs(name: str, rows: list) -> None:
    columns = ("batch size", "kernels per graph", "capture ms", "pool MiB", "replay us", "equal")
    shown = table(*columns, title=name)
    for row in rows:
        values = (row.kernels, row.capture_ms, row.pool_mib, row.replay_us)
        formats = ("d", ".2f", ".1f", ".1f")
        numbers = (
            "?" if value is None else format(value, how)
            for value, how in zip(values, formats, strict=True)
        )  # fmt: skip
        mark = "[green]✓[/]" if row.equal else "[red]✗[/]"
        shown.add_row(str(row.bs), *numbers, mark)
    shown.show()


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
    kernels, cache = [], system.triton_cache()
    try:
        with progress() as bar:
            task = bar.add_task("compiling", total=None)
            found = ahead.compile_all(
                layers, devices.as_this_triton_can(device), arch, env.PDL.get(),
                dtype=getattr(torch, dtype), jobs=jobs,
            )  # fmt: skip
            for done, total, item in found:
                kernels.append(dataclasses.asdict(item))
                bar.update(task, completed=done, total=total)
    except OSError as error:
        text = f"{error}. Triton's cache is {cache}; TRITON_CACHE_DIR names another folder"
        raise fail(text, EXIT_PROBLEM) from None
    if as_json:
        print_json(True, cache=str(cache), kernels=kernels)
        return
    made = f"{len(kernels)} kernel variants for {device.name} in {cache}"
    out.print(escape(made), highlight=False)


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
    from sglang_kt_sm120 import aot, shapes

    layers = [(layer.n, layer.k) for layer in linears(shape, model, shape_set, tp)]
    unknown = set(arch) - set(aot.ARCHES)
    if unknown:
        raise bad("--arch", f"{sorted(unknown)}: expected {' or '.join(aot.ARCHES)}")
    dtypes = [short for short in aot.DTYPES if not wanted or DTYPES[short] in wanted]
    judged = [(layer.n, layer.k) for name in JUDGED_SETS for layer in shapes.SHAPE_SETS[name]]
    judged = list(dict.fromkeys(judged))
    records, facts, schedules = [], [], []
    with progress() as bar:
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
            task = bar.add_task(f"compiling for {target}", total=total)
            made = []
            for record in aot.report(configs, target, dtypes, jobs=jobs):
                made.append(record)
                bar.update(task, advance=1, description=f"{target} {record['name']}")
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
            print_finding(where, failure)
    failed = [schedule for schedule in schedules if schedule.failures]
    if not schedules:  # judged with the kernels for sm_120a
        return
    out.print(
        f"{len(schedules)} decode schedules on 188 SMs: {len(schedules) - len(failed)} keep every "
        "SM busy with 32 KiB in flight, or all of its share"
    )
    for schedule in failed:
        for failure in schedule.failures:
            print_finding(f"{schedule.n} x {schedule.k} from M = {schedule.m}", failure)


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
