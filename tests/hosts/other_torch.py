"""`python -m tests.hosts.matrix --torch 2.9.1`: our ops and kernels on another torch and Triton.

Almost every sglang-kt pins torch 2.9.1, whose CUDA build brings its own Triton (3.5.1); the tests
usually run on a newer pair. The op, compile and ahead-of-time tests need neither a host nor a GPU,
and a CUDA build of torch can be imported without one. It is some gigabytes: made once, kept in
`.hosts/torch-VERSION`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv

from tests.hosts import lab

TESTS = ("tests/cpu/test_op.py", "tests/cpu/test_linear.py", "tests/cpu/test_aot.py",
         "tests/cpu/test_ahead.py")  # fmt: skip
#: Not the `test` extra: it asks for a newer Triton than the one that this torch brings.
BESIDE = ("numpy", "pytest>=8", "typer>=0.12", "rich>=13")


def run(version: str) -> int:
    """Make the environment where it is not there yet, run the tests in it; pytest's exit status."""
    root = lab.ROOT / f"torch-{version}"
    python = root / "bin" / "python"
    stamp = root / ".ready"
    if not stamp.is_file():
        venv.EnvBuilder(symlinks=True, with_pip=True, clear=True).create(root)
        install = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*install, f"torch=={version}", *BESIDE], check=True)
        subprocess.run([*install, "--no-deps", str(lab.PROJECT)], check=True)
        stamp.touch()
    show = "import torch, triton; print(f'torch {torch.__version__}, Triton {triton.__version__}')"
    subprocess.run([python, "-c", show], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    sys.stdout.flush()
    tests = [python, "-m", "pytest", "-q", *TESTS]
    return subprocess.run(tests, cwd=lab.PROJECT, env=environment).returncode
