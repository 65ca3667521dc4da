"""Commands that only look: doctor, explain, env."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.markup import escape

from sglang_kt_sm120 import __version__, env
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
    unusual,
)

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}


def doctor(
    as_json: JsonOption = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the check that imports sglang (seconds).")
    ] = False,
) -> None:
    """Check this machine: GPU, torch, Triton, who owns sglang/, and whether the hook is live."""
    from sglang_kt_sm120 import doctor, system

    with err.status("looking at this machine"):
        facts = system.facts()
        rows = doctor.rows(facts, None if quick else system.seam)
    code = doctor.exit_code(rows)
    if as_json:
        print_json(code == 0, checks=[dataclasses.asdict(row) for row in rows], facts=facts)
        raise typer.Exit(code)
    shown = table("", "check", "seen", "what to do")
    for row in rows:
        mark = f"[{STYLES[row.status]}]{MARKS[row.status]}[/]"
        shown.add_row(mark, row.check, escape(row.value), escape(row.fix))
    out.print(shown)
    verdict = {0: "ready", EXIT_NO_GPU: "no GPU here"}.get(code, "not ready")
    out.print(f"\nsglang-kt-sm120 {__version__}: [{'green' if code == 0 else 'red'}]{verdict}[/]")
    raise typer.Exit(code)


def explain(
    shape: ShapeOption = [],  # noqa: B006
    model: ModelOption = None,
    shape_set: SetOption = None,
    tp: TpOption = 1,
    m: Annotated[str, typer.Option(help="Rows, separated by commas.")] = "1,16,64,512,4096",
    gpu: GpuOption = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    host_cutlass: Annotated[
        bool, typer.Option(help="Assume that the host's CUTLASS was proven at load.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say which kernel a layer will use, and why no other; prints what the op itself routes by."""
    from sglang_kt_sm120 import limits, select

    if dtype not in ("bfloat16", "float16"):
        raise typer.BadParameter(f"{dtype!r}: expected bfloat16 or float16")
    layers, ms = linears(shape, model, shape_set, tp), parse_ms(m)
    device = asked_device(gpu)
    proven = select.NOTHING_KNOWN
    if host_cutlass:
        proven = limits.Known(proven=("sglang_jit",), host_default=True)
    columns = ("layer", "N,K", "M", "backend", "configuration")
    rows, shown = [], table(*columns, title=device.name, whole=columns[:4])
    for layer in layers:
        for rows_of_x in ms:
            problem = select.Problem(select.bucket(max(rows_of_x, 1)), layer.n, layer.k, dtype)
            try:
                choice = select.choose(problem, device, proven)
            except select.NoBackend as error:
                raise fail(str(error), EXIT_PROBLEM) from None
            config = dataclasses.asdict(choice.config) if choice.config else None
            rows.append(
                {
                    "name": layer.name, "n": layer.n, "k": layer.k, "m": rows_of_x,
                    "backend": choice.backend, "config": config, "source": choice.evidence,
                    "table": choice.table or None, "reason": choice.reason,
                    "rejected": choice.rejected,
                }
            )  # fmt: skip
            brief = " ".join(f"{key}={value}" for key, value in unusual(choice.config).items())
            shown.add_row(layer.name, f"{layer.n},{layer.k}", str(rows_of_x), choice.backend, brief)
    if as_json:
        print_json(True, device=dataclasses.asdict(device), rows=rows, never=limits.REJECTED)
        return
    out.print(shown)
    out.print("\n[bold]why[/]")
    for row in {(row["backend"], row["reason"]): row for row in rows}.values():
        out.print(f"  {row['backend']}: {escape(row['reason'])} ({row['source']})")
    for source, file in {(row["source"], row["table"]): 0 for row in rows if row["table"]}:
        out.print(f"  {source}: {escape(file)}", soft_wrap=True)
    out.print("\n[bold]not taken[/] (first row)")
    for name, why in (rows[0]["rejected"] | limits.REJECTED).items():
        out.print(f"  {name}: {escape(why)}")


def env_command(
    as_json: JsonOption = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/environment.md.")
    ] = False,
) -> None:
    """List every environment variable with its value, default and meaning."""
    import os

    rows = [
        {
            "name": v.name,
            "value": os.environ.get(v.name),
            "default": v.default,
            "allowed": v.allowed,
            "help": v.help,
        }
        for v in env.VARIABLES
    ]
    if as_json:
        print_json(True, variables=rows)
        return
    if markdown:
        typer.echo(
            "# Environment variables\n\nMade by `make docs` from `sglang_kt_sm120/env.py`.\n"
        )
        typer.echo("| variable | default | allowed | meaning |\n|---|---|---|---|")
        for row in rows:
            default = f"`{row['default']}`" if row["default"] else "empty"
            typer.echo(f"| `{row['name']}` | {default} | {row['allowed']} | {row['help']} |")
        return
    shown = table("variable", "value", "default", "meaning", whole=("variable",))
    for row in rows:
        value = "" if row["value"] is None else row["value"]
        shown.add_row(row["name"], value, row["default"], f"{row['help']} ({row['allowed']})")
    out.print(shown)
