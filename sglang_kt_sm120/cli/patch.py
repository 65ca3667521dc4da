"""The command that patches a pinned, old host in place: for users who cannot update it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.text import Text

from sglang_kt_sm120.cli.options import EXIT_PROBLEM, JsonOption, fail
from sglang_kt_sm120.cli.output import err, out, print_json


def patch(
    path: Annotated[
        Path | None,
        typer.Argument(help="A source checkout, or the site-packages that holds sglang."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only look (the default).")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Apply the patch that fits.")] = False,
    revert: Annotated[bool, typer.Option("--revert", help="Take it back.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask after showing the diff.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show, apply or revert the local patch for an old sglang: no plugin is needed then."""
    from sglang_kt_sm120 import patches

    if check + apply + revert > 1:
        raise typer.BadParameter("give one of --check, --apply and --revert")
    try:
        place = path or patches.installed()
        plan = patches.plan(place)
        if as_json and not (apply or revert):
            print_json(plan.state != "none", state=plan.state, lines=plan.lines())
            raise typer.Exit(0 if plan.state != "none" else EXIT_PROBLEM)
        if not as_json:
            for line in plan.lines():
                out.print(escape(line), soft_wrap=True)
            if plan.patch is not None and (plan.state != "applied" or revert):
                _show(plan.patch.diff)
            if apply and plan.state in ("applied", "none", "not needed"):
                back = "; --revert takes it back" if plan.state == "applied" else ""
                raise fail(f"nothing to apply{back}", EXIT_PROBLEM)
            if revert and plan.state != "applied":
                raise fail("nothing to revert", EXIT_PROBLEM)
        if not (apply or revert):
            raise typer.Exit(0 if plan.state != "none" else EXIT_PROBLEM)
        if as_json and not yes:
            raise typer.BadParameter("--json does not ask: add --yes to change files")
        if not yes and not typer.confirm("Go on?", err=True):
            raise typer.Exit(EXIT_PROBLEM)
        done = patches.apply(place) if apply else patches.revert(place)
    except patches.PatchError as error:
        raise fail(str(error), EXIT_PROBLEM) from None
    if as_json:
        print_json(True, lines=done)
        return
    for line in done:
        err.print(escape(line), soft_wrap=True)


def _show(diff: str) -> None:
    """Print a diff as it is, coloured: neither wrapped nor cut at the terminal's edge."""
    styles = {"+": "green", "-": "red", "@": "cyan", "d": "bold", "i": "bold"}
    for line in diff.splitlines():
        out.print(Text(line, styles.get(line[:1], "")), soft_wrap=True)
