"""How the commands print: consoles, tables that lose nothing, JSON objects, errors."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

SCHEMA = 1
GAP = 2  # blanks between columns
PIPE_WIDTH = 200  # columns of a table where no terminal and no COLUMNS says how many there are
#: What each command lists under --json: the same key when it succeeds and when it fails.
LISTS = {
    "doctor": "checks",
    "explain": "rows",
    "graphs": "rows",
    "bench": "records",
    "tune": "cases",
    "aot": "kernels",
    "warm": "kernels",
    "patch": "lines",
    "env": "variables",
}

# Lines are left to the terminal to wrap, so that nothing is cut and paths can be copied whole.
out, err = Console(soft_wrap=True), Console(stderr=True)


class Grid:
    """A table of a title, a header and rows of markup; `show` prints it without losing a cell."""

    def __init__(self, columns: tuple[str, ...], title: str = "", whole: tuple[str, ...] = ()):
        """Take the column names; those in `whole` are never broken into lines."""
        self.columns, self.title, self.whole = columns, title, whole
        self.rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Add a row, one cell for each column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def widths(self, room: int) -> list[int] | None:
        """Return the columns' widths in a terminal of `room` columns, breaking no word.

        None where that cannot be: the widest columns give way first, down to their longest word.
        """
        widths, least = [], []
        for index, column in enumerate(self.columns):
            cells = [column, *(Text.from_markup(row[index]).plain for row in self.rows)]
            widths.append(max(map(cell_len, cells)))
            pieces = cells if column in self.whole else [w for cell in cells for w in cell.split()]
            least.append(max(map(cell_len, pieces), default=0))
        room -= GAP * (len(widths) - 1)
        while sum(widths) > room:
            able = [i for i in range(len(widths)) if widths[i] > least[i]]
            if not able:
                return None
            widths[max(able, key=widths.__getitem__)] -= 1
        return widths

    def show(self) -> None:
        """Print as a table where it fits, else each row as a block of `name: value` lines."""
        if self.title:
            out.print(f"[bold]{escape(self.title)}[/]")
        room = _width()
        widths = self.widths(room)
        if widths is None:
            self._show_blocks()
            return
        made = Table(header_style="bold", box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        for column, width in zip(self.columns, widths, strict=True):
            made.add_column(column, overflow="fold", width=width)
        for row in self.rows:
            made.add_row(*row)
        Console(width=room, file=out.file).print(made)

    def _show_blocks(self) -> None:
        for row in self.rows:
            for column, cell in zip(self.columns, row, strict=True):
                if cell:
                    out.print(f"[bold]{escape(column)}:[/] {cell}" if column else cell)
            out.print()


def _width() -> int:
    if os.environ.get("COLUMNS", "").isdigit():
        return int(os.environ["COLUMNS"])
    return out.width if out.is_terminal else PIPE_WIDTH


def table(*columns: str, title: str = "", whole: tuple[str, ...] = ()) -> Grid:
    """Return an empty table; columns in `whole` are never broken into lines."""
    return Grid(columns, title, whole)


def print_json(ok: bool, **lists: Any) -> None:
    """Print the stable form of every command: one object with schema, ok and a list."""
    typer.echo(json.dumps({"schema": SCHEMA, "ok": ok, **lists}, indent=1), file=out.file)


def print_error(message: str) -> None:
    """Print an error to stderr."""
    err.print(f"[red]error:[/] {escape(message)}", soft_wrap=True)


def print_finding(where: str, what: str, colour: str = "red") -> None:
    """Print to stderr, as one line that can be searched for, what was found wrong, and where."""
    err.print(f"[{colour}]{escape(where)}:[/] {escape(what)}", soft_wrap=True)


def progress(*columns: ProgressColumn) -> Progress:
    """Return a progress bar on stderr, of rich's columns; none where stderr is no terminal."""
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def print_note(message: str) -> None:
    """Print to stderr what a person should know beside the result."""
    err.print(f"[yellow]note:[/] {escape(message)}", soft_wrap=True)


def print_failure(message: str) -> None:
    """Where the running command was given --json, print the object of its failure to stdout.

    Its list is there, and empty.
    """
    if "--json" in _running:
        print_json(False, error=message, **{LISTS.get(_running[0], "rows"): []})


@contextlib.contextmanager
def only_ours_on_stdout() -> Iterator[None]:
    """Keep stdout for `out` and `print_json`: what others print goes to stderr.

    Triton prints a whole kernel where its assembler refuses one, and hosts print when imported.
    """
    stdout = out.file
    out.file = stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        out.file = None  # follow sys.stdout again


class Command(TyperCommand):
    """A command whose stdout is its own."""

    def invoke(self, ctx):
        """Run it."""
        with only_ours_on_stdout():
            return super().invoke(ctx)


_running: list[str] = []  # the words of the running command, its name first
_UsageError = typer.BadParameter.__bases__[0]  # typer names it only as a base, and vendors click


class Commands(TyperGroup):
    """The group of commands; whatever ends one under --json is a JSON object as well."""

    def resolve_command(self, ctx, args):
        """Note the words of the command before click reads them."""
        _running[:] = args
        return super().resolve_command(ctx, args)

    def invoke(self, ctx):
        """Run the command that `ctx` names."""
        _running.clear()
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            print_failure(error.format_message())
            raise
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:  # a mistake of ours, or a disk that is full
            with contextlib.suppress(OSError):
                print_failure(f"{type(error).__name__}: {error}")
            raise
