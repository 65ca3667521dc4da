"""Other Tritons than the installed one, each in a folder of its own in `.hosts`.

`python -m tests.hosts.tritons` installs those that the tests compile with.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.hosts import lab

#: What released hosts bring (3.4.0 with torch 2.8, 3.5.1 with 2.9, 3.6.0 with 2.10 and 2.11).
RELEASED = ("3.4.0", "3.5.1", "3.6.0")


def newest() -> str:
    """Return the newest release's version, asked of the package index by name.

    Raises:
        lab.LabError: The index cannot be asked.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", "triton"]
    result = subprocess.run(command, capture_output=True, text=True)
    match = re.search(r"^triton \(([0-9.]+)\)", result.stdout, re.M)
    if not match:
        raise lab.LabError(f"cannot ask for Triton's newest release: {result.stderr[-500:]}")
    return match[1]


def install(version: str, progress: lab.Progress = lab.show) -> Path:
    """Return a folder with Triton `version` alone, to be put first on PYTHONPATH."""

    def make(folder: Path, requirements: Path, progress: lab.Progress) -> None:
        progress(folder.name, 0, 1, "downloading (about 200 MB)")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
        lab._run([*command, "--target", str(folder), f"triton=={version}"], f"no Triton {version}")

    lab.ROOT.mkdir(exist_ok=True)
    return lab._build(f"triton-{version}", make, progress)


if __name__ == "__main__":
    for name in dict.fromkeys((*RELEASED, newest())):
        print(install(name))
