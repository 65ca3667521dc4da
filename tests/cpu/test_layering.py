"""Who may import whom, read from the source: the rooms of the package stay rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "sglang_kt_sm120"
ROOT = "sglang_kt_sm120"
#: For each module (or folder), what of ours it may import, and which libraries beyond the standard.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "__init__": (set(), set()),
    "__main__": ({"cli"}, set()),
    "_startup": ({"plugin"}, set()),
    "env": (set(), set()),
    "plugin": ({"_startup", "env", "host"}, set()),
    "host": (
        {
            "__init__",
            "_startup",
            "env",
            "request",
            "linear",
            "op",
            "devices",
            "select",
            "backends",
            "ranks",
            "warm",
        },
        {"sglang", "torch"},
    ),
    "ranks": ({"backends", "devices", "op", "select"}, {"torch"}),
    "request": ({"env"}, {"sglang"}),
    "method": ({"host", "linear"}, {"sglang"}),
    "linear": ({"checks", "eager", "scales", "select"}, {"torch"}),
    "eager": ({"op", "select"}, {"torch"}),
    "scales": (set(), {"torch"}),
    "op": ({"checks", "select", "devices", "env", "heuristic", "limits", "backends"}, {"torch"}),
    "checks": ({"select"}, {"torch"}),
    "devices": ({"env", "select", "aot"}, {"torch"}),
    "select": ({"env", "heuristic", "limits", "configs"}, set()),
    "heuristic": (set(), set()),
    "limits": (set(), set()),
    "shapes": (set(), set()),
    "models": ({"shapes"}, set()),
    "records": (set(), set()),
    "patches": (set(), set()),
    "configs": ({"env", "heuristic", "limits"}, set()),
    "backends": ({"backends", "kernels", "heuristic", "limits"}, {"torch"}),
    "kernels": ({"kernels"}, {"torch", "triton"}),
    "system": (set(), {"torch", "triton"}),  # inside guarded probes
    "doctor": ({"_startup", "configs", "devices", "env", "plugin", "select", "system"}, set()),
    "aot": (
        {"select", "shapes", "kernels", "heuristic", "devices", "backends"},
        {"triton", "torch"},
    ),
    "baselines": ({"kernels"}, {"torch", "deep_gemm", "sgl_kernel", "flashinfer"}),
    "bench": (
        {
            "baselines",
            "op",
            "records",
            "select",
            "shapes",
            "kernels",
            "host",
            "heuristic",
            "backends",
            "devices",
        },
        {"torch", "triton"},
    ),
    "tune": (
        {
            "ahead",
            "aot",
            "backends",
            "bench",
            "configs",
            "devices",
            "env",
            "heuristic",
            "host",
            "limits",
            "op",
            "select",
            "system",
        },
        {"torch", "triton"},
    ),
    "graphs": ({"linear", "op", "shapes"}, {"torch"}),
    "variants": ({"heuristic", "limits", "select"}, set()),
    "ahead": ({"select", "shapes", "variants", "backends"}, {"torch", "triton"}),
    "warm": (
        {"system", "op", "select", "devices", "env", "variants", "backends", "configs"},
        {"torch", "triton"},
    ),
    "cli": ({"__init__", "*"}, {"typer", "rich", "torch", "triton", "matplotlib"}),
}
#: Libraries that only these rooms may touch, whatever the table above says.
ONLY_IN = {
    "sglang": {"host", "method", "request"},
    "typer": {"cli"},
    "rich": {"cli"},
    "flashinfer": {"baselines"},
}


def room(file: Path) -> str:
    relative = file.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(file: Path, package: Path = PACKAGE) -> set[tuple[str, ...]]:
    """Every import in the file, at any depth, as dotted parts; relative ones made absolute."""
    here = (ROOT, *file.relative_to(package).with_suffix("").parts)
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = here[: -node.level] if node.level else ()
            base = (*base, *(node.module or "").split(".")) if node.module else base
            found |= {(*base, alias.name) for alias in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_stay_in_their_layer(file: Path):
    ours, libraries = ALLOWED[room(file)]
    for parts in imports(file):
        if parts[0] == ROOT:
            target = parts[1] if len(parts) > 1 else "__init__"
            target = "__init__" if target == "__version__" else target
            assert target in ours or "*" in ours or target == room(file), f"{file} imports {parts}"
        elif parts[0] not in sys.stdlib_module_names:
            assert parts[0] in libraries, f"{file} imports {parts[0]}"
            assert room(file) in ONLY_IN.get(parts[0], {room(file)}), f"{file} imports {parts[0]}"


def test_the_rule_sees_lazy_and_relative_imports(tmp_path):
    file = tmp_path / "kernels" / "bad.py"
    file.parent.mkdir()
    file.write_text("from . import parts\ndef f():\n    from sglang_kt_sm120 import host\n")
    assert imports(file, tmp_path) == {(ROOT, "kernels", "parts"), (ROOT, "host")}


@pytest.mark.parametrize("module", ["", "._startup", ".plugin", ".env", ".shapes", ".system"])
def test_importing_costs_no_torch(module: str):
    code = (
        f"import sys, {ROOT}{module}; "
        "heavy = {'torch', 'sglang', 'triton', 'typer', 'rich', 'flashinfer', 'deep_gemm'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_stay_one_screenful_of_purpose():
    long = {str(f): n for f in FILES if (n := len(f.read_text().splitlines())) > 400}
    assert not long
