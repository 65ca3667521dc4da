"""The first report's host: sglang-kt as an editable source install, started from scratch.

Here the plugin is pip-installed into the environment's own site-packages, so its start-up hook
runs at interpreter start, before setuptools' finder for the editable package does its work.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import client, lab

from .conftest import OLD
from .test_with_us import serves
from .test_without_us import crashed_in_flashinfer

PYPROJECT = """
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "sglang-kt"
version = "0.6.1"

[tool.setuptools.packages.find]
where = ["{where}"]
include = ["sglang*"]
"""


def pip(python: Path, *arguments: str) -> None:
    """Run this environment's pip on another environment."""
    command = [sys.executable, "-m", "pip", "--python", python, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def environment(folder: Path, layout: str) -> Path:
    """Make a venv whose only sglang is an editable install of 0.6.1's source; return its python.

    `layout` decides how setuptools makes it editable: "src" by a path in a `.pth` file, "flat" (a
    second top-level folder beside the package) by a finder on `sys.meta_path`.
    """
    host = lab.install(OLD)
    source = folder / "source"
    root = source / ("python" if layout == "src" else ".")
    root.mkdir(parents=True)
    shutil.copytree(host.site / "sglang", root / "sglang")
    (source / "benchmark").mkdir()
    where = "python" if layout == "src" else "."
    (source / "pyproject.toml").write_text(PYPROJECT.format(where=where))

    others = folder / "others"  # the host's packages without its sglang
    others.mkdir()
    for entry in host.site.iterdir():
        if not entry.name.startswith(("sglang", "layers.pth")):
            (others / entry.name).symlink_to(entry)
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    layers = [others, *lab.layers(host)]
    (site / "layers.pth").write_text("".join(f"{layer}\n" for layer in layers))
    python = venv / "bin" / "python"
    pip(python, "install", "--no-deps", "--no-build-isolation", "-e", str(source))
    finder = list(site.glob("__editable__*finder.py"))
    assert bool(finder) == (layout == "flat"), list(site.iterdir())
    return python


LAYOUTS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("src", "flat")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_start_up_hook_reaches_an_editable_host(tmp_path, layout):
    python = environment(tmp_path, layout)
    variables = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
    if layout == "src":
        without = client.once(python, {"env": variables})
        assert str(tmp_path / "source") in without["host"]["fp8_utils"]
        crashed_in_flashinfer(without["layers"][0])

    pip(python, "install", "--no-deps", str(lab.PROJECT))
    variables["SGLANG_KT_SM120_TEST_CAPABILITY"] = "12.0"
    ours = client.once(python, {"env": variables})
    assert str(tmp_path / "source") in ours["host"]["fp8_utils"]
    serves(ours["layers"][0])
