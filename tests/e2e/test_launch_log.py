"""The launch log that judgements rest on, without a GPU or a server: it counts what runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
INSIDE = Path(__file__).resolve().parent / "inside"
CALLS = """
import e2e_inside, torch
from sglang_kt_sm120 import heuristic, kernels, op
from sglang_kt_sm120.backends import reference, triton
from tests.helpers import activation, block_fp8

weight, scale = block_fp8(300, 256)
for m in (3, 3, 70):
    op.block_fp8_linear(activation(m, 256), weight, scale)
kernels.pipelined = kernels.tiled = lambda *args, **options: lambda *operands: None
kernels.quantise = lambda x, **options: (x, x)
for m in (2, 65):
    problem = heuristic.Case(m, 300, 1024, deterministic=True)
    config = heuristic.config_for(problem, None)
    call = triton.plan(config, 300, 1024, arch="sm120")
    call(torch.empty(m, 1024), None, torch.empty(3, 8), None, torch.bfloat16, config, None)
print(heuristic.fixed_splits(300, 1024))
"""


def test_calls_are_counted_with_their_sizes_and_ranges(tmp_path):
    checkout = INSIDE.parents[2]
    environ = os.environ | {
        "E2E_LAUNCH_LOG": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(map(str, (INSIDE, checkout))),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", CALLS]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ranges = int(done.stdout)
    assert ranges > 1
    (file,) = tmp_path.glob("*.json")
    shared = {"by": "plugin", "capturing": False}
    counted = [
        {"name": "reference", "arch": "", "m": 3, "n": 300, "k": 256, "ranges": 0, "count": 2},
        {"name": "reference", "arch": "", "m": 70, "n": 300, "k": 256, "ranges": 0, "count": 1},
        {"name": "triton", "arch": "sm120", "m": 2, "n": 300, "k": 1024, "ranges": ranges},
        {"name": "triton", "arch": "sm120", "m": 65, "n": 300, "k": 1024, "ranges": ranges},
    ]
    wanted = [{"count": 1} | shared | row for row in counted]
    assert json.loads(file.read_text())["calls"] == wanted
