"""Run `sglang-kt-sm120` in this process, for tests of what it prints and how it ends."""

from __future__ import annotations

from typer.testing import CliRunner

from sglang_kt_sm120 import cli

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
runner = CliRunner()


def run(*arguments: str, code: int = 0):
    """Return typer's result of the command; it must end with `code`."""
    result = runner.invoke(cli.app, list(arguments))
    assert result.exit_code == code, result.output
    return result
