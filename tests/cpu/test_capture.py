"""What a CUDA-graph capture may not do, in a process that takes the CPU for a GPU that captures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_kt_sm120 import graphs, op, warm

#: A 5090 of straw, and what is watched on it.
BEGIN = """
import contextlib, json, sys, types
import torch
from sglang_kt_sm120 import linear, op, warm
card = types.SimpleNamespace(name="NVIDIA GeForce RTX 5090", multi_processor_count=170,
                             shared_memory_per_block_optin=101376, L2_cache_size=96 << 20)
torch.cuda.get_device_properties = lambda index: card
torch.cuda.get_device_capability = lambda index=0: (12, 0)
torch.cuda.device = lambda index: contextlib.nullcontext()
capturing = True
torch.cuda.is_current_stream_capturing = lambda: capturing
import triton.compiler.compiler as compiler
make_ir, seen, watching = compiler.ASTSource.make_ir, [], False
def counted(self, *arguments, **options):
    seen.append("compiled " + self.name)
    return make_ir(self, *arguments, **options)
compiler.ASTSource.make_ir = counted
WATCHED = ("open", "os.listdir", "os.scandir", "import", "ctypes.dlopen", "subprocess.Popen")
def hook(event, arguments):
    if watching and event in WATCHED:
        seen.append(f"{event} {arguments[0]}")
sys.addaudithook(hook)
def tensor(*shape, dtype):
    return types.SimpleNamespace(device=torch.device("cuda", 0), shape=torch.Size(shape),
                                 dtype=dtype, is_cuda=True)
x = tensor(5, 1024, dtype=torch.bfloat16)
weight = tensor(576, 1024, dtype=torch.float8_e4m3fn)
scale = tensor(5, 8, dtype=torch.float32)
from tests.helpers import activation, block_fp8
op.block_fp8_linear(activation(2, 256), *block_fp8(128, 256))  # on the CPU, which launches nothing
def decide():
    try:
        return op._decide(x, None, weight, scale, torch.bfloat16)
    except RuntimeError as error:
        return str(error)
"""
FIRST = (
    BEGIN
    + """
watching = True
said = decide()
warm.layer(None, weight, scale, torch.bfloat16)
watching = False
captured = seen.copy()
capturing, watching = False, True
choice, key = decide()[1:]
watching = False
control = seen[len(captured):]
seen.clear()
op._launched.add(key)
capturing, watching = True, True
known = decide()[1] == choice
x.dtype = torch.float16
other = decide()
watching = False
print(json.dumps([said, captured, len(control), known, other, seen]))
"""
)


def test_a_first_call_in_capture_raises_before_anything_else_happens():
    """It looks up no table, asks no compiler, imports nothing: the error comes first."""
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert result.returncode == 0, result.stderr
    said, captured, outside, known, other, later = json.loads(result.stdout.splitlines()[-1])
    assert "no kernel for M=5 N=576 K=1024 is compiled yet" in said
    assert "Call the layer once with such an input before capture" in said
    assert captured == []
    assert outside > 0  # deciding does such things, where it may: the hook sees them
    assert known is True  # what was launched is decided in capture
    assert "no kernel for M=5 N=576 K=1024" in other  # and what was not is refused,
    assert later == []  # for which nothing is read either


def test_nothing_is_warmed_in_capture(monkeypatch):
    class OnAGpu:
        is_cuda, device, shape = True, torch.device("cuda", 0), torch.Size((256, 256))

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(op, "problem_of", lambda *_: pytest.fail("decided in capture"))
    warm.layer(None, OnAGpu(), None, torch.bfloat16)


def test_sglangs_list_of_batch_sizes():
    sizes = graphs.sglang_batch_sizes(256)
    assert graphs.sglang_batch_sizes(32) == [1, 2, 4, 8, 12, 16, 24, 32]  # as the report's log says
    assert sizes[:5] == [1, 2, 4, 8, 12]
    assert sizes[5:] == list(range(16, 257, 8))
    assert len(sizes) == 36
    assert graphs.sglang_batch_sizes(512)[36:] == list(
        range(272, 513, 16)
    )  # large cards, --tp 4 and more
