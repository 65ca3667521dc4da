"""The command that says which kernel serves a layer: explain."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from sglang_kt_sm120.cli.options import (
    EXIT_PROBLEM,
    DtypeOption,
    GpuOption,
    JsonOption,
    ModelOption,
    SetOption,
    ShapeOption,
    TpOption,
    asked_device,
    linears,
    parse_dtype,
    parse_ms,
    unusual,
)
from sglang_kt_sm120.cli.output import out, print_json, table

#: The kernel that the `auto` of a host with CUTLASS for SM120 takes.
HOST_KERNEL = "sglang_jit"


def explain(
    shape: ShapeOption = [],  # noqa: B006
    model: ModelOption = None,
    shape_set: SetOption = None,
    tp: TpOption = 1,
    m: Annotated[str, typer.Option(help="Rows, separated by commas.")] = "1,16,64,512,4096",
    gpu: GpuOption = None,
    dtype: DtypeOption = "bfloat16",
    host_cutlass: Annotated[
        bool | None,
        typer.Option(
            "--host-cutlass/--no-host-cutlass",
            help="Whether the host's own default is CUTLASS (default: what is installed here).",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say which kernel a layer will use, and why no other; prints what the op itself routes by."""
    from sglang_kt_sm120 import limits, system

    dtype = parse_dtype(dtype)
    layers, ms = linears(shape, model, shape_set, tp), parse_ms(m, least=0)
    device = asked_device(gpu, or_cpu=True)
    host = system.guarded(system.host)
    default = host.get("cutlass", False) if host_cutlass is None else host_cutlass
    found = [_row(layer, rows_of_x, device, dtype, default) for layer in layers for rows_of_x in ms]
    rows, briefs = zip(*found, strict=True)
    ok = all(row["backend"] for row in rows)
    if as_json:
        about = {"installed": host.get("path") is not None, "cutlass_by_default": default}
        asked = dataclasses.asdict(device)
        print_json(
            ok, device=asked, host=about, rows=rows, never=limits.REJECTED,
            kernels=[dataclasses.asdict(kernel) for kernel in limits.KERNELS],
        )  # fmt: skip
    else:
        _print(rows, briefs, device.name)
        if host_cutlass is None:
            out.print(f"\n{_about(host)}")
    raise typer.Exit(0 if ok else EXIT_PROBLEM)


def _row(layer, m: int, device, dtype: str, host_default: bool) -> tuple[dict, str]:
    """Return who serves `m` rows of `layer` where every probe succeeds, and how, in brief."""
    from sglang_kt_sm120 import select

    problem = select.Problem(select.bucket(max(m, 1)), layer.n, layer.k, dtype)
    row = {"name": layer.name, "n": layer.n, "k": layer.k, "m": m}
    try:
        choice = select.choose(problem, device, _as_if_proven(problem, device, host_default))
    except select.NoBackend as error:
        return row | {
            "backend": None, "config": None, "source": None, "table": None, "reason": str(error),
            "condition": None, "otherwise": None, "rejected": {},
        }, ""  # fmt: skip
    condition = otherwise = None
    if choice.backend == "cutlass":
        condition = "taken where it proves itself on this layer at load; not probed here"
        otherwise = _without(problem, device)
    return row | {
        "backend": choice.backend,
        "config": dataclasses.asdict(choice.config) if choice.config else None,
        "source": choice.evidence,
        "table": choice.table or None,
        "reason": choice.reason,
        "condition": condition,
        "otherwise": otherwise,
        "rejected": choice.rejected,
    }, " ".join(f"{key}={value}" for key, value in unusual(choice.config).items())


def _as_if_proven(problem, device, host_default: bool):
    """Return what a server would know where each kernel that it probes proves right.

    It probes what a tuned table or the host's default names, else the first that it can use.
    """
    from sglang_kt_sm120 import limits, select

    default = HOST_KERNEL if host_default else ""
    named, anyone = select.wanted_kernels(problem, device, default)
    known = dict.fromkeys((*(name for name in named if name == default), *named, *anyone[:1]))
    return limits.Known(proven=tuple(known), host_default=default)


def _without(problem, device) -> str:
    from sglang_kt_sm120 import select

    try:
        return select.choose(problem, device).backend
    except select.NoBackend:
        return "the load stops"


def _about(host: dict[str, Any]) -> str:
    if not host.get("path"):
        seen = "no sglang here: its default is taken to be no CUTLASS"
    elif host["cutlass"]:
        seen = "the default of the sglang here is CUTLASS"
    else:
        seen = "the default of the sglang here is no CUTLASS"
    return f"{seen} (--host-cutlass and --no-host-cutlass ask about another)"


def _print(rows: Sequence[dict[str, Any]], briefs: Sequence[str], title: str) -> None:
    from sglang_kt_sm120 import limits

    columns = ("layer", "N,K", "M", "backend", "configuration")
    shown = table(*columns, title=title, whole=columns[:4])
    for row, brief in zip(rows, briefs, strict=True):
        backend = row["backend"] or "[red]none[/]"
        if row["condition"]:
            backend += f", else {row['otherwise']}"
        shown.add_row(row["name"], f"{row['n']},{row['k']}", str(row["m"]), backend, escape(brief))
    shown.show()
    out.print("\n[bold]why[/]")
    for (backend, reason, source, condition), where in _grouped(
        rows, lambda row: [(row["backend"], row["reason"], row["source"], row["condition"])]
    ):
        said = escape(reason) + (f" ({source})" if source else "")
        said += f"; {condition}" if condition else ""
        out.print(f"  {backend or '[red]none[/]'}: {said}{where}")
    for source, file in {(row["source"], row["table"]): 0 for row in rows if row["table"]}:
        out.print(f"  {source}: {escape(file)}")
    out.print("\n[bold]not taken[/]")
    for (name, why), where in _grouped(rows, lambda row: row["rejected"].items()):
        out.print(f"  {name}: {escape(why)}{where}")
    for name, why in limits.REJECTED.items():
        out.print(f"  {name}: {escape(why)}")
    out.print("\n[bold]the host's CUTLASS kernels[/], as their sources limit them")
    for kernel in limits.KERNELS:
        out.print(f"  {kernel.name} ({escape(kernel.title)}): {escape(kernel.limits())}")


def _grouped(rows: Sequence[dict[str, Any]], facts) -> list[tuple[tuple, str]]:
    """Return each fact of `facts(row)` once, with the rows that it holds for unless all do."""
    found: dict[tuple, list] = {}
    for row in rows:
        for fact in facts(row):
            found.setdefault(fact, []).append(row)
    every = {(row["n"], row["k"]) for row in rows}
    return [
        (fact, "" if len(held) == len(rows) else f" \\[{_where(held, every)}]")
        for fact, held in found.items()
    ]


def _where(held: list[dict[str, Any]], every: set[tuple[int, int]]) -> str:
    """Say which rows those are: layers by their Ms, and "every layer" where it is each of them."""
    ms: dict[tuple[int, int], list[int]] = {}
    for row in held:
        of_layer = ms.setdefault((row["n"], row["k"]), [])
        if row["m"] not in of_layer:
            of_layer.append(row["m"])
    layers: dict[tuple[int, ...], list[str]] = {}
    for (n, k), of_layer in ms.items():
        layers.setdefault(tuple(of_layer), []).append(f"{n},{k}")
    return "; ".join(
        f"{'every layer' if len(names) == len(every) else ' '.join(names)} at M="
        + ",".join(map(str, of_layer))
        for of_layer, names in layers.items()
    )
