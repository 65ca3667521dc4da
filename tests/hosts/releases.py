"""Any released host as a folder of Python source: `build("sglang==0.5.17")`.

lab.py installs two hosts whole, for the demo. Going through all of them wants less of each: the
wheel's Python and its metadata, unpacked and nothing installed; FlashInfer and transformers at the
very versions that the release pins, one copy for all releases with the same pin; everything else
from lab.py's common folder. torch is borrowed from the environment that tests.

    .hosts/package-NAME-VERSION    one unpacked wheel
    .hosts/torch-links             links to torch and its kind, without this project's own metadata
    .hosts/released/NAME-VERSION   a virtual environment of nothing but `.pth` lines to the above

Where the plugin must be there from the interpreter's start, `with_plugin` makes a second
environment with one more line.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.hosts import lab

LIST = lab.HERE / "requirements" / "releases.txt"
#: What a release pins and we take at that very version, because its FP8 decision may run through
#: it (FlashInfer) or because sglang subclasses its internals (the others).
PINNED = ("flashinfer-python", "transformers", "transformers-kt", "compressed-tensors")
#: For releases that leave it open.
OPEN = {"compressed-tensors": "0.18.0"}
#: transformers 4 and 5 exclude each other's huggingface-hub.
HUB = {"4": "0.36.0", "5": "1.33.0"}
#: What a transformers refuses to be imported without, where common.txt has an older one.
TOKENIZERS = {"5.19.0": {"tokenizers": "0.23.1"}}
PLATFORMS = ("manylinux_2_39", "manylinux_2_35", "manylinux_2_34", "manylinux_2_28",
             "manylinux_2_27", "manylinux_2_17", "manylinux2014")  # fmt: skip
#: sglang looks for the folder of its CUDA sources; FlashInfer's CUTLASS is a thousand files.
KEPT = (".py", ".json", ".jinja", ".txt", ".cuh")
LEFT = "flashinfer/data/"


@dataclass(frozen=True)
class Release:
    """One released host: `name` is the distribution's."""

    name: str
    version: str
    era: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{self.version}"


@dataclass(frozen=True)
class Host:
    """A built host: its interpreter, its sglang, and the pinned packages beside it."""

    release: Release
    root: Path
    own: Path
    pins: dict[str, str]

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"


def released(era: bool = False) -> list[Release]:
    """Return the listed releases, or one per era only."""
    releases = []
    for line in LIST.read_text().splitlines():
        requirement, _, remark = line.partition("#")
        if "==" in requirement:
            name, _, version = requirement.strip().partition("==")
            releases.append(Release(name, version, "era" in remark))
    return [release for release in releases if release.era or not era]


def build(release: Release, progress: lab.Progress = lab.show) -> Host:
    """Fetch what is not here yet and return the host.

    Raises:
        lab.LabError: pip found no wheel for this Python, or no torch is here.
    """
    lab.ROOT.mkdir(exist_ok=True)
    own = package(release.name, release.version, progress)
    pins = pinned(own)
    layers = [own, *(package(*pin, progress) for pin in pins.items())]
    layers += [lab._build(name, lab._common, progress) for name in ("released-common", "common")]
    layers.append(_torch(progress))
    root = lab.ROOT / "released" / str(release)
    return Host(release, _venv(root, layers), own, pins)


def with_plugin(host: Host, plugin: Path, hook: bool = True) -> Host:
    """Return `host` as after `pip install`: its interpreter's start-up finds the plugin.

    Without `hook` the plugin can be imported and has its metadata, but no line runs at start-up.
    """
    root = host.root.with_name(f"{host.root.name}-{plugin.name}{'' if hook else '-loader'}")
    layers = _site(host.root).joinpath("layers.pth").read_text().splitlines()
    line = f"import site; site.addsitedir({str(plugin)!r})" if hook else plugin
    return dataclasses.replace(host, root=_venv(root, [*layers, line]))


def pinned(folder: Path) -> dict[str, str]:
    """Return the versions that the unpacked wheel in `folder` asks for, of `PINNED` and the hub."""
    metadata = next(folder.glob("*.dist-info/METADATA")).read_text()
    pins = {}
    for name in PINNED:
        pattern = rf"^Requires-Dist: {name.replace('-', '[-_]')}(?:\[\w+\])?(?:==([\w.]+))?\s*$"
        found = re.search(pattern, metadata, re.MULTILINE | re.IGNORECASE)
        if found:
            pins[name] = found[1] or OPEN[name]
    pins.setdefault("compressed-tensors", OPEN["compressed-tensors"])
    transformers = pins.get("transformers") or pins["transformers-kt"]
    return pins | {"huggingface-hub": HUB[transformers[0]]} | TOKENIZERS.get(transformers, {})


def package(name: str, version: str, progress: lab.Progress = lab.show) -> Path:
    """Return a folder with the Python of one wheel and its metadata, fetched at most once."""
    folder = f"{name}-{version}"
    lab.ROOT.mkdir(exist_ok=True)

    def make(target: Path, requirements: Path, progress: lab.Progress) -> None:
        progress(folder, 0, 1, "fetching the wheel")
        with tempfile.TemporaryDirectory(dir=lab.ROOT) as download:
            _download(f"{name}=={version}", download)
            wheel = next(Path(download).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target, filter(_kept, archive.namelist()))

    return lab._build(f"package-{folder}", make, progress)


def _kept(name: str) -> bool:
    if name.startswith("sglang/") or name.startswith(LEFT):
        return name.endswith(KEPT) and not name.startswith(LEFT)
    return True


def _download(requirement: str, folder: str) -> None:
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder,
               "--only-binary=:all:", "--python-version", python, "--implementation", "cp",
               "--abi", f"cp{python}", "--abi", "abi3", "--abi", "none"]  # fmt: skip
    command += [f"--platform={platform}_x86_64" for platform in PLATFORMS]
    for attempt in (1, 2, 3):
        result = subprocess.run([*command, requirement], capture_output=True, text=True)
        if not result.returncode:
            return
        time.sleep(attempt)  # a registry hiccup
    raise lab.LabError(f"cannot download {requirement}\n{result.stderr[-2000:]}")


def _torch(progress: lab.Progress) -> Path:
    """Return a folder of links to the packages beside torch, but for this project.

    An editable install of it leaves metadata there, whose entry point sglang's loader would find in
    a host that is meant to be stock.
    """
    site = lab.torch_site()

    def make(target: Path, requirements: Path, progress: lab.Progress) -> None:
        target.mkdir(parents=True)
        for entry in site.iterdir():
            if "sglang" not in entry.name and entry.suffix not in (".pth", ".start"):
                (target / entry.name).symlink_to(entry)

    return lab._build("torch-links", make, progress)


def _site(root: Path) -> Path:
    return root / "lib" / f"python{lab.PYTHON}" / "site-packages"


def _venv(root: Path, lines: list) -> Path:
    text = "".join(f"{line}\n" for line in lines)
    with lab._lock(root.name, lambda *a: None):
        pth = _site(root) / "layers.pth"
        if not pth.is_file() or pth.read_text() != text:
            shutil.rmtree(root, ignore_errors=True)
            venv.EnvBuilder(symlinks=True).create(root)
            pth.write_text(text)
    return root


def main(arguments: list[str] | None = None) -> int:
    """Fetch hosts, so that what plays them needs no network."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.releases", description=__doc__)
    parser.add_argument("--era", action="store_true", help="only the releases that tests play")
    chosen = parser.parse_args(arguments)
    failed = 0
    for release in released(chosen.era):
        try:
            print(build(release).root)
        except lab.LabError as error:
            failed += 1
            print(f"{release}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
