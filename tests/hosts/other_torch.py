"""`python -m tests.hosts.matrix --torch 2.9.1`: our ops and kernels on another torch and Triton.

Almost every sglang-kt pins torch 2.9.1, whose CUDA build brings its own Triton (3.5.1); the tests
usually run on a newer pair. The op, compile and ahead-of-time tests need neither a host nor a GPU,
and a CUDA build of torch can be imported without one. It is some gigabytes: made once, kept in
`.hosts/torch-VERSION`. What the tests said is kept as a record, which docs/compatibility.md shows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv

from rich.console import Console

from tests.hosts import lab, records

PINNED = "2.9.1"
TESTS = ("tests/cpu/test_op.py", "tests/cpu/test_linear.py", "tests/cpu/test_aot.py",
         "tests/cpu/test_ahead.py")  # fmt: skip
#: Not the `test` extra: it asks for a newer Triton than the one that this torch brings.
BESIDE = ("numpy", "pytest>=8", "typer>=0.12", "rich>=13")
#: torch and CUDA's libraries, downloaded and unpacked.
NEEDED_GB = 12
console = Console(stderr=True)


def run(version: str, again: bool = True) -> int:
    """Make the environment where it is not there yet, run the tests in it; return 0 or 1.

    Without `again`, a record of the same sources is taken at its word.
    """
    kept = record(version)
    if kept and not again and kept["made_from"] == _sources() and not kept["failed"]:
        console.print(f"{said(kept)} (found {kept['when']})")
        return 0
    python = _environment(version)
    # Before site-packages, so that every process runs the sources as they lie here.
    environment = os.environ | {"PYTHONPATH": str(lab.PROJECT)}
    versions = (
        "import json, torch, triton; print(json.dumps([torch.__version__, triton.__version__]))"
    )
    shown = subprocess.run(
        [python, "-c", versions], env=environment, capture_output=True, text=True
    )
    if shown.returncode:
        console.print(f"torch {version} cannot be imported\n{shown.stderr[-2000:]}", markup=False)
        return 1
    torch, triton = json.loads(shown.stdout)
    sources = _sources()
    with console.status(f"op, compile and aot tests on torch {torch}, Triton {triton} (minutes)"):
        tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        result = subprocess.run(
            tests, cwd=lab.PROJECT, env=environment, capture_output=True, text=True
        )
    counts = {
        word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped)", result.stdout)
    }
    found = {
        "torch": torch,
        "triton": triton,
        **{word: counts.get(word, 0) for word in ("passed", "failed", "skipped")},
        "when": time.strftime("%Y-%m-%d"),
        "made_from": sources,
    }
    good = not result.returncode and found["passed"] > 0
    if good or found["failed"]:
        records.write(_path(version), found)
    if not good:
        console.print(result.stdout[-6000:], markup=False, highlight=False)
    console.print(said(found))
    return 0 if good else 1


def record(version: str = PINNED) -> dict | None:
    """Return what the tests said on this torch when they last ran, or None."""
    return records.read(_path(version))


def said(found: dict) -> str:
    """Return a record in words."""
    counts = [f"{found[word]} {word}" for word in ("passed", "failed", "skipped") if found[word]]
    versions = f"torch {found['torch']}, Triton {found['triton']}"
    return f"op, compile and ahead-of-time tests on {versions}: {', '.join(counts)}"


def _path(version: str):
    return lab.ROOT / "records" / f"torch-{version}.json"


def _sources() -> dict[str, str | None]:
    """Every source file of the package and of these tests: kernels and all take part."""
    package = lab.PROJECT / "sglang_kt_sm120"
    files = [file for file in package.rglob("*") if file.suffix in (".py", ".json", ".toml")]
    files += [lab.PROJECT / name for name in (*TESTS, "tests/helpers.py", "tests/opchecks.py")]
    return {str(file.relative_to(lab.PROJECT)): records.digest(file) for file in sorted(files)}


def _environment(version: str):
    """Return the interpreter of a virtual environment with this torch."""
    root = lab.ROOT / f"torch-{version}"
    python, stamp = root / "bin" / "python", root / ".ready"
    lab.ROOT.mkdir(exist_ok=True)
    with lab._lock(root.name, lab.show):
        if stamp.is_file():
            return python
        free = shutil.disk_usage(lab.ROOT).free / 1e9
        if free < NEEDED_GB:
            raise lab.LabError(
                f"torch {version} takes {NEEDED_GB} GB of disk and {free:.0f} GB are free in "
                f"{lab.ROOT}; make room, or leave it out with --no-torch"
            )
        venv.EnvBuilder(symlinks=True, with_pip=True, clear=True).create(root)
        console.print(f"installing torch {version} with CUDA's libraries: some minutes, once")
        lab._run([str(python), "-m", "pip", "install", "-q", f"torch=={version}", *BESIDE],
                 f"cannot install torch {version}")  # fmt: skip
        stamp.touch()
    return python


if __name__ == "__main__":
    sys.exit(run(sys.argv[1] if sys.argv[1:] else PINNED))
