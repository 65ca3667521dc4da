"""The command line; the only package here that imports typer and rich.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 ok, 1 a problem was found,
2 usage, 3 this needs a GPU. One file per kind of command: look.py and explain.py tell, kernels.py
compiles and captures, measure.py times, tune.py searches, patch.py changes a host; options.py and
output.py are what they share.
"""

from __future__ import annotations

from typing import Annotated

import typer

from sglang_kt_sm120 import __version__
from sglang_kt_sm120.cli import kernels, look
from sglang_kt_sm120.cli.explain import explain
from sglang_kt_sm120.cli.measure import bench
from sglang_kt_sm120.cli.output import Command, Commands
from sglang_kt_sm120.cli.patch import patch
from sglang_kt_sm120.cli.tune import tune

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Block-FP8 linear layers on SM120/SM121 GPUs for sglang-kt and sglang.",
)
for command in (
    look.doctor, explain, kernels.graphs, bench, tune, kernels.aot, kernels.warm, patch,
):  # fmt: skip
    app.command(cls=Command)(command)
app.command("env", cls=Command)(look.env_command)


def main() -> None:
    """Console script `sglang-kt-sm120`."""
    app()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
