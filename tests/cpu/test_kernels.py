"""Runs interpreted_kernels.py, and shows that it needs the interpreter's casts repaired."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the interpreter comes with triton")

HERE = Path(__file__).parent


def interpreted(*arguments: str, casts: str = "repaired") -> subprocess.CompletedProcess:
    environment = {**os.environ, "CASTS": casts}
    environment.pop("TRITON_INTERPRET", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    return subprocess.run(
        [*command, str(HERE / "interpreted_kernels.py"), *arguments],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_kernels_under_the_interpreter():
    result = interpreted()
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


def test_the_interpreters_own_casts_are_wrong():
    """Without this the repair could rot unseen, or outlive its reason."""
    result = interpreted("-k", "bit_identical", casts="as shipped")
    assert result.returncode == 1, result.stdout[-4000:]
