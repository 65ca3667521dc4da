"""CUDA graphs: equal to eager, nothing but launches in capture, one kernel where one suffices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from sglang_kt_sm120 import cli, devices, graphs, heuristic, op, select, shapes, system, warm
from sglang_kt_sm120.backends import reference
from sglang_kt_sm120.backends import triton as backend
from tests.helpers import activation, assert_right

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
#: A variant that no table names, so that compiling it is always news.
CONTROL = replace(heuristic.MEDIUM, num_stages=2, group_m=7)
TINY = [shapes.Linear("narrow", 576, 1024), shapes.Linear("odd", 2112, 2048)]


def make(linear: shapes.Linear) -> graphs.Layer:
    return graphs.Layer(linear, DEVICE)


def capture(layer, x, stream=None, warm=True):
    if warm:
        layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = layer(x)
    return graph, out


def test_the_command_passes_on_this_gpu():
    arguments = ["graphs", "--shape", "2112,2048", "--shape", "576,1024", "--bs", "1,3,16,65"]
    result = CliRunner().invoke(cli.app, [*arguments, "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 0, answer
    assert [row["bs"] for row in answer["rows"]] == [65, 16, 3, 1]
    assert all(row["equal"] and row["kernels"] for row in answer["rows"])
    pool = [row["pool_mib"] for row in answer["rows"]]
    assert pool[0] > 0  # the largest makes the room
    assert all(0 <= mib <= pool[0] for mib in pool)  # in which the smaller ones mostly fit


def test_a_difference_is_found_and_fails(monkeypatch):
    """A layer that is wrong only in capture: the check must say where."""
    original = graphs.Layer.__call__

    def wrong(self, x):
        out = original(self, x)
        if torch.cuda.is_current_stream_capturing():
            out[1, 2] += 1
        return out

    monkeypatch.setattr(graphs.Layer, "__call__", wrong)
    (row,) = graphs.check(TINY[:1], [4], DEVICE)
    assert not row.equal
    assert "narrow [576, 1024] at batch size 4: element [1, 2]" in row.failures[0]


def test_a_graph_that_does_not_read_its_input_fails(monkeypatch):
    """What captured, it computes for ever: the check must replay with new inputs."""
    original = graphs.Layer.__call__

    def deaf(self, x):
        out = original(self, x)
        if torch.cuda.is_current_stream_capturing():
            out.copy_(self.before)
        else:
            self.before = out
        return out

    monkeypatch.setattr(graphs.Layer, "__call__", deaf)
    (row,) = graphs.check(TINY[:1], [4], DEVICE)
    assert any(
        text.startswith("alone: narrow [576, 1024] at batch size 4:") for text in row.failures
    )


@torch.inference_mode()
def test_largest_first_then_replayed_in_any_order():
    layer = make(TINY[1])
    captured = {}
    for bs in (8, 4, 1):
        x = activation(bs, 2048, device="cuda")
        captured[bs] = (x, *capture(layer, x))
    for bs in (1, 8, 4, 8, 1):
        x, graph, out = captured[bs]
        x.copy_(activation(bs, 2048, device="cuda"))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, layer(x))
        assert_right(out, reference.multiply(*reference.quantise(x), layer.weight, layer.scale))


@pytest.fixture
def compiled():
    """The kernels that Triton compiles, or fetches from its cache, from here on."""
    from triton.compiler import compiler

    names, original = [], compiler.CompiledKernel.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        names.append(self.metadata.name)

    compiler.CompiledKernel.__init__ = init
    yield names
    compiler.CompiledKernel.__init__ = original


@torch.inference_mode()
def test_load_time_warm_up_is_enough_for_every_batch_size(compiled):
    """After `warm.layer` alone, every batch size is captured: no compilation, no synchronising."""
    layer = make(shapes.Linear("fresh", 2112, 1152))
    x = torch.empty(5, 1152, dtype=torch.bfloat16, device="cuda")
    backend.run(x, layer.weight, layer.scale, None, x.dtype, CONTROL, None, arch=devices.arch(0))
    assert compiled, "the counter must count"
    torch.set_default_dtype(torch.bfloat16)  # as sglang does while it loads
    try:
        warm.layer(layer.linear, layer.weight, layer.scale, torch.bfloat16)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.cuda.synchronize()
    compiled.clear()
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for bs in graphs.sglang_batch_sizes(256):
            x = torch.empty(bs, 1152, dtype=torch.bfloat16, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="global"):
                layer(x)
        for bs in (1, 8, 16, 64, 256):  # views that no kernel is compiled for
            wide = torch.empty(bs, 3 * 1152 + 1, dtype=torch.bfloat16, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="global"):
                layer(wide[:, 1:1153])
                layer(wide[:, :1152])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not compiled


@torch.inference_mode()
def test_a_first_call_in_capture_is_a_clear_error(monkeypatch):
    layer = make(TINY[0])
    op.forget_choices()
    monkeypatch.setattr(op, "_launched", set())
    x = activation(5, 1024, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"M=5 N=576 K=1024 is compiled yet.*before capture"),
        torch.cuda.graph(graph),
    ):
        layer(x)
    torch.cuda.synchronize()
    layer(x)  # and afterwards life goes on


@torch.inference_mode()
def test_deterministic_decode_captures_and_replays(compiled):
    """Warmed at load as `--enable-deterministic-inference` is, whatever M comes first."""
    op.set_deterministic(True)
    try:
        layer = make(shapes.Linear("fixed", 576, 1280))
        warm.layer(layer.linear, layer.weight, layer.scale, torch.bfloat16)
        compiled.clear()
        row = activation(1, 1280, device="cuda")
        first = None
        for bs in (65, 8, 1, 33):
            x = row.repeat(bs, 1)
            graph, out = capture(layer, x, warm=False)
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, layer(x))
            first = out[0].clone() if first is None else first
            assert torch.equal(out, first.expand_as(out))  # whatever M
        assert not compiled
    finally:
        op.set_deterministic(False)


@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (7168, 2048), (24576, 1536), (4096, 7168)])
@torch.inference_mode()
def test_one_kernel_for_fused_decode_two_otherwise(n, k, monkeypatch):
    """DeepSeek-R1's layers: nothing beside the product, and quantisation where it is not fused."""
    monkeypatch.setattr(op, "_slots", {})  # streams of other tests, which may have taken every row
    layer = make(shapes.Linear("x", n, k))
    found, expected = {}, {}
    for bs in (1, 8, 16, 64, 256):
        x = activation(bs, k, device="cuda")
        graph, _ = capture(layer, x)
        found[bs] = graphs.kernel_count(graph.replay)
        choice = select.choose(op.problem_of(bs, n, k, torch.bfloat16), devices.device(0))
        assert choice.backend == "triton"
        expected[bs] = 1 if choice.config.fused else 2
    assert found == expected
    assert set(expected.values()) == {1, 2}


@torch.inference_mode()
def test_two_streams_two_layers_ten_thousand_rounds():
    layers = [make(linear) for linear in TINY]
    xs = [activation(4, linear.k, device="cuda") for linear in TINY]
    expected = [layer(x) for layer, x in zip(layers, xs, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in layers]
    for _ in range(10_000):
        for layer, x, stream, want, count in zip(layers, xs, streams, expected, wrong, strict=True):
            with torch.cuda.stream(stream):
                count += (layer(x) != want).any()
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0, 0]


@torch.inference_mode()
def test_one_layer_on_two_streams():
    """Each stream has counters of its own, so even one layer may run on two at once."""
    layer = make(TINY[1])
    x = activation(2, 2048, device="cuda")
    expected = layer(x)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(op.COUNTER_SLOTS + 2)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    for _ in range(500):
        for stream, count in zip(streams, wrong, strict=True):
            with torch.cuda.stream(stream):
                count += (layer(x) != expected).any()
    torch.cuda.synchronize()
    assert not any(int(count) for count in wrong)
    assert not layer.linear.counters.any()


FILL = """
import torch
from sglang_kt_sm120 import ahead, devices, env, shapes
layers = [shapes.Linear("a", 576, 1024), shapes.Linear("b", 4096, 512)]
device = devices.device(0)
target = torch.cuda.get_device_capability(0)  # what is here, whatever a test presents it as
compiled = ahead.compile_all(layers, device, devices.arch(0), env.PDL.get(), target, jobs=8)
print(sum(1 for _ in compiled))
"""
SERVE = """
import torch
compiled = []
import triton.compiler.compiler as c
ast = c.ASTSource.make_ir
def make_ir(self, *args, **kwargs):
    compiled.append(self.name)
    return ast(self, *args, **kwargs)
c.ASTSource.make_ir = make_ir
from sglang_kt_sm120 import graphs, shapes, warm
for linear in (shapes.Linear("a", 576, 1024), shapes.Linear("b", 4096, 512)):
    layer = graphs.Layer(linear, torch.device("cuda", 0))
    warm.layer(layer.linear, layer.weight, layer.scale, torch.bfloat16)
print(len(compiled))
"""


def run_with_cache(code: str, cache) -> str:
    environ = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


def test_what_was_compiled_ahead_is_what_serving_looks_up(tmp_path):
    assert int(run_with_cache(SERVE, tmp_path / "empty")) > 0  # the counter counts
    assert int(run_with_cache(FILL, tmp_path / "filled")) > 0
    assert int(run_with_cache(SERVE, tmp_path / "filled")) == 0


READ = """
import json, os, sys, torch
from sglang_kt_sm120 import graphs, shapes, warm
watching, seen = False, []
WATCHED = ("open", "os.listdir", "os.scandir", "import", "ctypes.dlopen", "subprocess.Popen")
def hook(event, arguments):  # it stays for good, hence `watching`, and a process of its own
    if watching and event in WATCHED:
        seen.append(f"{event} {arguments[0]}")
sys.addaudithook(hook)
layer = graphs.Layer(shapes.Linear("x", 2112, 1152), torch.device("cuda", 0))
warm.layer(layer.linear, layer.weight, layer.scale, torch.bfloat16)
torch.cuda.synchronize()
for rows in (1, 5, 8, 13, 16, 31, 64, 70, 300):
    x = torch.ones(rows, 1152, dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        watching = True
        layer(x)
        watching = False
captured = seen.copy()
watching = True
open(os.devnull).close()
watching = False
print(json.dumps([captured, seen[len(captured):]]))
"""


def test_no_file_is_read_in_capture():
    """Not even where capture is the first to meet a number of rows, and decides it there."""
    captured, control = json.loads(run_with_cache(READ, system.triton_cache()))
    assert control == [f"open {os.devnull}"]  # the hook sees what it should
    assert captured == []


START = """
import time, torch
from sglang_kt_sm120 import graphs, shapes, warm
layers = [graphs.Layer(s, torch.device("cuda", 0)) for s in shapes.SHAPE_SETS["deepseek-r1"]]
torch.cuda.synchronize()
before = time.perf_counter()
for layer in layers:
    warm.layer(layer.linear, layer.weight, layer.scale, torch.bfloat16)
print(time.perf_counter() - before)
"""


def test_what_a_start_costs(tmp_path):
    """DeepSeek-R1's layers on at most eight cores: a minute at most cold, two seconds warm."""
    code = f"import os; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:8])\n{START}"
    cold, again = (float(run_with_cache(code, tmp_path)) for _ in range(2))
    print(f"cold start {cold:.1f} s, warm start {again:.2f} s")
    assert cold <= 60
    assert again <= 2
