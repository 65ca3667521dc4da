"""sglang loads a model under `torch.set_default_dtype(bfloat16)`: nothing of ours may follow it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import sglang_kt_sm120
from sglang_kt_sm120.backends import reference
from tests.helpers import block_fp8

FACTORIES = {"empty", "zeros", "ones", "full", "rand", "randn", "arange", "linspace", "tensor"}
FILES = sorted(Path(sglang_kt_sm120.__file__).parent.rglob("*.py"))


def follows_the_default(tree: ast.AST) -> list[int]:
    """The lines on which torch makes a tensor and nobody says of what dtype."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FACTORIES
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and "dtype" not in {keyword.arg for keyword in node.keywords}
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_tensor_says_its_dtype(file):
    assert not follows_the_default(ast.parse(file.read_text())), file


def test_the_check_sees_one_that_does_not():
    assert follows_the_default(ast.parse("import torch\nx = torch.zeros(3, device='meta')")) == [2]


@pytest.fixture
def bfloat16():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_numbers_do_not_follow_it(bfloat16):
    x = torch.randn(3, 256, dtype=torch.float32).bfloat16()
    _, scale = reference.quantise(x)
    assert scale.dtype is torch.float32
    weight, weight_scale = block_fp8(128, 256)
    assert weight_scale.dtype is torch.float32
    expected = reference.multiply(*reference.quantise(x), weight, weight_scale)
    assert expected.dtype is torch.float64
