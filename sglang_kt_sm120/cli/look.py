"""Commands that look at this machine: doctor, env."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated

import typer
from rich.markup import escape

from sglang_kt_sm120 import __version__, env
from sglang_kt_sm120.cli.options import EXIT_PROBLEM, JsonOption
from sglang_kt_sm120.cli.output import err, out, print_json, table

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
    code, verdict = doctor.exit_code(rows), doctor.verdict(rows)
    if as_json:
        checks = [dataclasses.asdict(row) for row in rows]
        print_json(code == 0, verdict=verdict, checks=checks, facts=facts)
        raise typer.Exit(code)
    shown = table("", "check", "seen", "what to do", whole=("check",))
    for row in rows:
        mark = f"[{STYLES[row.status]}]{MARKS[row.status]}[/]"
        shown.add_row(mark, row.check, escape(row.value), escape(row.fix))
    shown.show()
    colour = "green" if code == 0 else "red"
    unseen = " (sglang was not imported)" if quick else ""
    out.print(f"\nsglang-kt-sm120 {__version__}: [{colour}]{escape(verdict)}[/]{unseen}")
    raise typer.Exit(code)


def env_command(
    as_json: JsonOption = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/environment.md.")
    ] = False,
) -> None:
    """List every environment variable with its value, default and meaning."""
    import os

    wrong = {name: "; ".join(said) for name, said in env.misread().items()}
    rows = [
        {
            "name": v.name,
            "value": os.environ.get(v.name),
            "default": v.default,
            "allowed": v.allowed,
            "help": v.help,
            "wrong": wrong.get(v.name),
        }
        for v in env.VARIABLES
    ]
    if markdown:
        _print_page(rows)
        return
    known = {v.name for v in env.VARIABLES}
    rows += [
        {"name": name, "value": os.environ[name], "default": None, "allowed": None, "help": None,
         "wrong": why}
        for name, why in wrong.items() if name not in known
    ]  # fmt: skip
    if as_json:
        print_json(not wrong, variables=rows)
        raise typer.Exit(EXIT_PROBLEM if wrong else 0)
    shown = table("variable", "value", "default", "meaning", whole=("variable",))
    for row in rows:
        meaning = f"{row['help']} ({row['allowed']})" if row["help"] else ""
        if row["wrong"]:
            meaning = f"[red]{escape(row['wrong'])}[/] {escape(meaning)}"
        else:
            meaning = escape(meaning)
        shown.add_row(row["name"], escape(row["value"] or ""), row["default"] or "", meaning)
    shown.show()
    for name, why in wrong.items():
        err.print(f"[red]{escape(name)}:[/] {escape(why)}", soft_wrap=True)
    raise typer.Exit(EXIT_PROBLEM if wrong else 0)


def _print_page(rows: list[dict]) -> None:
    """Print docs/environment.md."""
    write = functools.partial(typer.echo, file=out.file)
    write("# Environment variables\n\nMade by `make docs` from `sglang_kt_sm120/env.py`.\n")
    write("| variable | default | allowed | meaning |\n|---|---|---|---|")
    for row in rows:
        default = f"`{row['default']}`" if row["default"] else "empty"
        write(f"| `{row['name']}` | {default} | {row['allowed']} | {row['help']} |")
