"""Real sglang-kt hosts on a machine without a GPU: `python -m tests.hosts.lab install NAME`.

A host is a virtual environment in `.hosts/NAME` with the real sglang-kt wheel, the real FlashInfer
and the Python packages that they import, at the versions in `requirements/`, and nothing else: no
GPU package, and no plugin. Three layers keep it small, joined by one `.pth` file:

    .hosts/NAME       sglang-kt and the packages whose version it dictates
    .hosts/common     what all hosts share
    this environment  torch, numpy, triton: wherever the running Python has its torch

Everything is idempotent: a stamp holds the hash of what was asked for. Two processes may ask for
the same host at once; one builds it while the other waits.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
ROOT = PROJECT / ".hosts"
HOSTS = ("sglang-kt-0.6.1", "sglang-kt-0.7.2")
KT_KERNEL = "kt-kernel==0.7.2"
RECIPE = "1"  # part of every stamp: raise it when the way of building changes
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

#: Called with (name, packages done, packages in all, what happens now).
Progress = Callable[[str, int, int, str], None]


class LabError(RuntimeError):
    """A host could not be built; the message ends with what pip or venv said."""


@dataclass(frozen=True)
class Host:
    """A built host: its interpreter and its own site-packages folder."""

    name: str
    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def site(self) -> Path:
        return self.root / "lib" / f"python{PYTHON}" / "site-packages"


def show(name: str, done: int, total: int, message: str) -> None:
    """Progress for people: one line per package on stderr."""
    print(f"[{name}] {done}/{total} {message}", file=sys.stderr, flush=True)


def install(name: str, progress: Progress = show) -> Host:
    """Build host `name` where it is not built yet, and return it.

    Raises:
        LabError: An unknown name, no torch here, or pip failed.
    """
    if name not in HOSTS:
        raise LabError(f"unknown host {name!r}; there are {', '.join(HOSTS)}")
    ROOT.mkdir(exist_ok=True)
    common = _build("common", _common, progress)
    return Host(name, _build(name, lambda *a: _venv(*a, common), progress))


def kt_kernel_cli(progress: Progress = show) -> Path:
    """Return a folder with the command line of the real kt-kernel 0.7.2 (`kt_kernel.cli`) alone.

    Its wheel holds CUDA libraries for one Python version; only Python source and metadata are kept.
    """
    ROOT.mkdir(exist_ok=True)
    return _build("kt-kernel-0.7.2", _kt_kernel, progress)


def plugin(progress: Progress = show) -> Path:
    """Return a site folder with this project's wheel installed, start-up hook and metadata and all.

    The folder's name holds the hash of the sources, so a run keeps what it started with while the
    sources change. `site.addsitedir` on it does what an interpreter does with site-packages.
    """
    ROOT.mkdir(exist_ok=True)
    sources = hashlib.sha256()
    for path in sorted([*PROJECT.glob("sglang_kt_sm120*"), *PROJECT.glob("patches")]):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                sources.update(f"{file}\0".encode() + file.read_bytes())
    sources.update((PROJECT / "pyproject.toml").read_bytes())
    return _build(f"plugin-{sources.hexdigest()[:12]}", _plugin, progress)


def layers(host: Host) -> list[Path]:
    """Return the folders that `host` adds to its own site-packages, nearest first."""
    return [ROOT / "common", torch_site()]


def torch_site() -> Path:
    """Return the site-packages folder that holds this environment's torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise LabError(f"no torch in {sys.prefix}: hosts borrow it from the environment that tests")
    return Path(spec.origin).parents[1]


# ---------------------------------------------------------------- building


def _build(name: str, make: Callable[[Path, Path, Progress], None], progress: Progress) -> Path:
    """Run `make(folder, requirements)` into `.hosts/name` unless the stamp there fits already."""
    folder = ROOT / name
    requirements = HERE / "requirements" / f"{name}.txt"
    wanted = _fingerprint(name, requirements)
    with _lock(name, progress):
        stamp = folder / ".stamp"
        if stamp.is_file() and stamp.read_text() == wanted:
            return folder
        started = time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        make(folder, requirements, progress)
        stamp.write_text(wanted)
        progress(name, 1, 1, f"ready in {time.monotonic() - started:.0f} s")
    return folder


def _fingerprint(name: str, requirements: Path) -> str:
    parts = [RECIPE, name, sys.version, str(torch_site()), str(PROJECT), KT_KERNEL]
    if requirements.is_file():
        parts.append(requirements.read_text())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@contextlib.contextmanager
def _lock(name: str, progress: Progress) -> Iterator[None]:
    with (ROOT / f".{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(name, 0, 1, "another process is building it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _common(folder: Path, requirements: Path, progress: Progress) -> None:
    _pip(["--target", str(folder), "-r", str(requirements)], "common", requirements, progress)


def _venv(folder: Path, requirements: Path, progress: Progress, common: Path) -> None:
    host = Host(folder.name, folder)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], "cannot create a venv")
    _pip(["--target", str(host.site), "-r", str(requirements)], folder.name, requirements, progress)
    if not (host.site / "sglang").is_dir():
        raise LabError(f"{folder.name}: pip left no sglang in {host.site}")
    (host.site / "layers.pth").write_text(f"{common}\n{torch_site()}\n")


def _plugin(folder: Path, requirements: Path, progress: Progress) -> None:
    progress(folder.name, 0, 1, "building the wheel and installing it")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    _run([*command, str(PROJECT)], "cannot install this project")


def _kt_kernel(folder: Path, requirements: Path, progress: Progress) -> None:
    progress(folder.name, 0, 1, "downloading the wheel for its command line (about 100 MB)")
    with tempfile.TemporaryDirectory(dir=ROOT) as download:
        python = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
        platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (35, 28, 17)]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        what = [*python, *platforms, "--only-binary=:all:", "-d", download, KT_KERNEL]
        _run([*command, *what], f"cannot download {KT_KERNEL}")
        wheel = next(Path(download).glob("kt_kernel-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            kept = [
                name
                for name in archive.namelist()
                if name.startswith("kt_kernel/cli/") or name.endswith(".dist-info/METADATA")
            ]
            archive.extractall(folder, kept)


def _pip(arguments: list[str], name: str, requirements: Path, progress: Progress) -> None:
    """Install exactly the listed versions (`--no-deps`), reporting each package as pip meets it."""
    total = sum(1 for line in requirements.read_text().splitlines() if "==" in line)
    command = [
        sys.executable, "-m", "pip", "install", "--no-deps", "--ignore-installed",
        "--disable-pip-version-check", *arguments,
    ]  # fmt: skip
    lines: list[str] = []
    done = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith(("Collecting ", "Processing ")):
                progress(name, done, total, Path(line.split()[1]).name)
                done = min(done + 1, total)
            elif line.startswith("Installing collected"):
                progress(name, total, total, "unpacking")
    if process.returncode:
        raise LabError(f"{name}: {' '.join(command)} failed\n{''.join(lines[-15:])}")


def _run(command: list[str], what: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise LabError(f"{what}: {' '.join(command)}\n{result.stdout}{result.stderr}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.lab", description=__doc__)
    parser.add_argument("command", choices=["install", "path"])
    parser.add_argument("name", nargs="*", default=list(HOSTS), help=f"default: {' '.join(HOSTS)}")
    chosen = parser.parse_args(arguments)
    try:
        for name in chosen.name:
            host = install(name)
            print(host.python if chosen.command == "path" else f"{host.name}: {host.root}")
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.chdir(PROJECT)
    sys.exit(main())
