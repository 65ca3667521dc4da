"""What `tune --export-sglang` writes, read by the released hosts' own code."""

from __future__ import annotations

import ast
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_kt_sm120.tune import sglang_files
from tests.cpu.hosts.conftest import ERAS

CARD = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def source_of(folder: Path, name: str) -> tuple[Path, str]:
    """Return the host file that defines a function, and its text without decorators."""
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text()
        if f"def {name}(" in text:
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return file, ast.get_source_segment(text, node)
    raise AssertionError(f"no {name} in {folder}")


@pytest.mark.parametrize("era", ERAS)
def test_the_host_finds_the_file_and_takes_the_nearest_m(era, build, tmp_path):
    own = build(era).own / "sglang"
    _, lookup = source_of(own, sglang_files.LOOKUP)
    _, launcher = source_of(own, sglang_files.LAUNCHER)
    assert f"{sglang_files.LOOKUP}(" in launcher  # by a global name, which we replace
    _, linear = source_of(own, "triton_w8a8_block_fp8_linear")
    assert f"{sglang_files.LAUNCHER}(" in linear

    wide = sglang_files.Stock((64, 64, 128, 1, 8, 4)).as_dict()
    cases = [
        {"n": 2112, "k": 7168, "m": m, "config": config}
        for m, config in ((1, sglang_files.DEFAULT), (64, wide))
    ]
    sglang_files.write(tmp_path / "configs", cases, CARD)
    torch = SimpleNamespace(_dynamo=SimpleNamespace(is_compiling=lambda: False))
    names = {
        "__file__": str(tmp_path / "fp8_kernel.py"), "os": os, "json": __import__("json"),
        "torch": torch, "logger": logging.getLogger("host"), "get_device_name": lambda: CARD,
        "log_info_on_rank0": lambda *a: None, "Optional": list, "Dict": dict, "Any": object,
    }  # fmt: skip
    exec("from __future__ import annotations\n" + lookup, names)
    found = names[sglang_files.LOOKUP](2112, 7168, 128, 128)
    assert found == {1: sglang_files.DEFAULT, 64: wide}
    assert names[sglang_files.LOOKUP](4096, 7168, 128, 128) is None
