"""`make capture-graphs`: whose Python it takes, and what it says where that cannot serve."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
PROJECT = Path(__file__).parents[2]
#: Answers the recipe's two questions as told, and names itself and what it was asked to run.
PYTHON = """#!/bin/sh
case "$*" in
  *torch.version.cuda*) exit {no_cuda} ;;
  *"import rich, typer"*) exit {no_commands} ;;
  *sys.executable*) echo "$0" ;;
  *) echo "ran $0 $*" ;;
esac
"""


def environment(folder: Path, *, cuda: bool = True, commands: bool = True) -> Path:
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(no_cuda=int(not cuda), no_commands=int(not commands)))
    python.chmod(0o755)
    return folder


def make(tmp_path: Path, *flags: str, **variables: Path) -> subprocess.CompletedProcess:
    none = {"VENV": tmp_path / "venv", "PY": "/nonexistent/python"}
    given = [f"{name}={value}" for name, value in none.items()]
    env = {"PATH": "/usr/bin:/bin", **{name: str(value) for name, value in variables.items()}}
    command = ["make", *flags, "capture-graphs", *given, "ARGS=--bs 4"]
    return subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_active_environment_is_used_though_it_is_not_on_the_path(tmp_path, variable):
    active = environment(tmp_path / "server")
    result = make(tmp_path, **{variable: active})
    assert result.returncode == 0, result.stderr
    assert f"ran {active}/bin/python -m sglang_kt_sm120 graphs --bs 4" in result.stdout
    assert f"using {active}/bin/python" in result.stderr


def test_an_environment_without_cuda_gives_way(tmp_path):
    without, conda = environment(tmp_path / "cpu", cuda=False), environment(tmp_path / "conda")
    result = make(tmp_path, VIRTUAL_ENV=without, CONDA_PREFIX=conda)
    assert f"ran {conda}/bin/python" in result.stdout
    assert f"{without} has no torch for CUDA that imports" in result.stderr
    assert f"{conda} has no" not in result.stderr


def test_an_environment_without_the_commands_is_told_what_to_install(tmp_path):
    active = environment(tmp_path / "server", commands=False)
    result = make(tmp_path, VIRTUAL_ENV=active)
    assert result.returncode != 0
    assert f"{active}/bin/python -m pip install ." in result.stderr
    assert "ran" not in result.stdout


def test_where_no_environment_can_be_made_that_is_all_that_is_said(tmp_path):
    result = make(tmp_path)
    assert result.returncode != 0
    assert "/nonexistent/python is older than Python 3.11" in result.stderr
    assert "using" not in result.stderr
    assert "torch for CUDA" not in result.stderr


def test_a_dry_run_runs_nothing(tmp_path):
    active = environment(tmp_path / "server")
    result = make(tmp_path, "-n", VIRTUAL_ENV=active)
    assert result.returncode == 0
    assert not any(line.startswith("ran") for line in result.stdout.splitlines())
