"""The wheel: what it holds, that installing it arms every process, and that it leaves nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: What a sglang-kt environment owns already: no dependency of ours may bring another owner.
OWNED = {"sglang", "sglang-kt", "kt-kernel", "deep-gemm", "sgl-deep-gemm", "flashinfer-python",
         "triton", "sgl-kernel", "sglang-kernel"}  # fmt: skip


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


def test_name_and_contents(wheel):
    assert re.fullmatch(r"sglang_kt_sm120-[\d.]+-py3-none-any\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in (
        "sglang_kt_sm120.pth",
        "sglang_kt_sm120.start",
        "sglang_kt_sm120/py.typed",
        "sglang_kt_sm120/kernels/quant.py",
    ):
        assert file in names
    local = {f"sglang_kt_sm120/patches_local/{p.relative_to(ROOT / 'patches/local')}"
             for p in (ROOT / "patches" / "local").rglob("*.patch")}  # fmt: skip
    assert local
    assert local <= names, "what `patch` applies comes with the wheel"
    tops = {name.split("/")[0] for name in names}
    assert all(top.startswith("sglang_kt_sm120") for top in tops), tops
    info = next(name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(info).decode()
    assert "kt_sm120 = sglang_kt_sm120.plugin:register" in text
    assert "sglang-kt-sm120 = sglang_kt_sm120.cli:main" in text


def test_a_plain_install_brings_no_second_owner():
    """Not directly, and not through what typer, rich and torch's CPU build require in turn."""
    seen: set[str] = set()
    todo = list(PROJECT["dependencies"])
    while todo:
        requirement = todo.pop()
        if "extra ==" in requirement:
            continue
        name = re.match(r"[A-Za-z0-9._-]+", requirement).group().lower().replace("_", "-")
        if name not in seen:
            seen.add(name)
            try:
                todo += metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # for another platform or Python
                continue
    assert "torch" in seen
    assert not seen & OWNED - {"triton"}  # torch's own CUDA builds bring triton; we do not
    assert not any("triton" in requirement for requirement in PROJECT["dependencies"])


def test_extras():
    assert set(PROJECT["optional-dependencies"]) == {
        "kt", "sglang", "flashinfer", "deepgemm", "plot", "test", "dev",
    }  # fmt: skip
    readme = (ROOT / "README.md").read_text()
    for extra in ("sglang", "deepgemm"):
        assert f"sglang-kt-sm120[{extra}]" in readme, "the README says where never to use it"


CHILD = """
import multiprocessing, sys
def main(queue):
    queue.put(any("sglang_kt_sm120" in type(f).__module__ for f in sys.meta_path))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=main, args=(queue,))
    child.start(); print(queue.get(timeout=60)); child.join()
"""


def test_install_spawn_uninstall(wheel, tmp_path):
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG")}

    def run(*command: str) -> str:
        result = subprocess.run(
            [str(python), *command], capture_output=True, text=True, env=environ, cwd=tmp_path
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    site = Path(run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    before = set(site.iterdir())
    run("-m", "pip", "install", "-q", "--no-deps", str(wheel))
    assert (site / "sglang_kt_sm120.pth").is_file()
    script = tmp_path / "spawner.py"
    script.write_text(CHILD)
    assert run(str(script)) == "True"

    run("-m", "pip", "uninstall", "-q", "-y", "sglang-kt-sm120")
    assert {p for p in site.iterdir() if p.name != "__pycache__"} == before - {site / "__pycache__"}
    assert run(str(script)) == "False"
