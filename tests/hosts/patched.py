"""The trees that the patches in patches/ are made for, from published wheels, patched.

A patch's `Base` names a release: `release sglang-kt 0.7.2`. A wheel holds part of a repository
under other names (`LAYOUTS`); what it does not hold, such as a repository's tests, is left out of
the trial, and only that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

from sglang_kt_sm120.patches import Patch, read
from tests.hosts import lab, releases

ROOT = lab.PROJECT / "patches"
WHEELS = lab.ROOT / "wheels"
#: Where the folders of a target's repository lie in its wheel.
LAYOUTS = {
    "sglang": {"python/": ""},
    "sglang-kt": {"python/": ""},
    "flashinfer-python": {"csrc/": "flashinfer/data/csrc/", "flashinfer/": "flashinfer/"},
    "kt-kernel": {"kt-kernel/python/": "kt_kernel/"},
}
#: Wheels of a few megabytes, which a test may fetch.
SMALL = {("sglang-kt", "0.5.2.post1"), ("sglang-kt", "0.6.1.post2"), ("sglang", "0.5.9")}


def all_patches() -> list[Patch]:
    """Return every patch of the project, local and to be sent."""
    return [read(path) for path in sorted(ROOT.glob("*/*/*.patch"))]


def release(patch: Patch) -> tuple[str, str]:
    """Return the distribution and version that the patch's `Base` names."""
    found = re.search(r"release ([\w-]+) (\S+?)(?=[;, ]|$)", patch.header["Base"])
    if found is None:
        raise ValueError(f"{patch.name}: Base names no release")
    return found[1], found[2]


def series(patch: Patch) -> list[Patch]:
    """Return the patch after those that it stands on."""
    found = re.match(r"(\S+\.patch) on ", patch.header["Base"])
    before = series(read(patch.path.with_name(found[1]))) if found else []
    return [*before, patch]


def tree(name: str, version: str, fetch: bool) -> Path | None:
    """Return a folder laid out as the wheel, or None where it is not here and not to be fetched."""
    if name == "kt-kernel":
        there = (lab.ROOT / f"kt-kernel-{version}" / "kt_kernel").is_dir()
        return lab.kt_kernel_cli() if fetch or there else None
    if name == "flashinfer-python":
        return _flashinfer(version, fetch)
    unpacked = lab.ROOT / f"package-{name}-{version}"
    if fetch or (name, version) in SMALL or (unpacked / ".stamp").is_file():
        return releases.package(name, version)
    return None


def _flashinfer(version: str, fetch: bool) -> Path | None:
    """Unpack FlashInfer's bindings too, which the hosts of releases.py do without."""
    folder = WHEELS / f"flashinfer-python-{version}"
    if not folder.is_dir():
        if not fetch:
            return None
        WHEELS.mkdir(parents=True, exist_ok=True)
        releases._download(f"flashinfer-python=={version}", str(WHEELS))
        wheel = next(WHEELS.glob(f"flashinfer_python-{version}-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith((".py", ".cu", ".h", ".hpp"))
                     or n.endswith((".cuh", ".inl", ".inc", ".jinja"))]  # fmt: skip
            part = folder.with_name(f".{folder.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            archive.extractall(part, names)
        part.rename(folder)  # whole or not there
        wheel.unlink()
    return folder


def apply(patch: Patch, source: Path, into: Path) -> list[str]:
    """Apply `patch` to the files of `source` that it names, and write the results below `into`.

    Returns the names of the files written. Raises RuntimeError with git's words where a hunk fails.
    """
    layout = LAYOUTS[release(patch)[0]]
    work = into.with_name(f".{into.name}.work")
    shutil.rmtree(work, ignore_errors=True)
    done, left = {}, []
    for name, (before, _) in patch.files.items():
        prefix = next((prefix for prefix in layout if name.startswith(prefix)), None)
        target = None if prefix is None else layout[prefix] + name.removeprefix(prefix)
        is_new = set(before) == {"0"}
        if target is None or not (is_new or (source / target).is_file()):
            left.append(name)
            continue
        done[name] = target
        if not is_new:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / target, work / name)
    work.mkdir(parents=True, exist_ok=True)
    command = ["git", "apply", "-v", *(f"--exclude={name}" for name in left)]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(work.parent)}
    result = subprocess.run(
        command, cwd=work, env=environment, input=patch.diff, capture_output=True, text=True
    )
    if result.returncode or not done:
        raise RuntimeError(f"{patch.name}: {result.stderr or 'touches nothing in the wheel'}")
    for name, target in done.items():
        (into / target).parent.mkdir(parents=True, exist_ok=True)
        (into / target).unlink(missing_ok=True)  # it may be a hard link
        shutil.move(work / name, into / target)
    shutil.rmtree(work)
    return sorted(done.values())


def patched(patch: Patch, source: Path, package: str) -> Path:
    """Return a folder with `package` of `source`, hard-linked but for what the patch changes."""
    into = lab.ROOT / "patched" / patch.name.removesuffix(".patch").replace("/", "-")
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source / package, into / package, copy_function=os.link, ignore=ignore)
    for step in series(patch):
        apply(step, into, into)
    return into
