"""torch.compile on the GPU: one compilation for every M, the same bits as eager, graphs too."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.library import opcheck

from sglang_kt_sm120 import graphs, op, shapes
from sglang_kt_sm120.backends import reference, triton
from tests.helpers import activation
from tests.opchecks import OPCHECKS, bytes_compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
N, K = 2112, 1024


class Model(torch.nn.Module):
    """A layer between two operations that Inductor could fuse into something."""

    def __init__(self):
        super().__init__()
        layer = graphs.Layer(shapes.Linear("x", N, K), torch.device("cuda"))
        self.linear = layer.linear
        self.weight = torch.nn.Parameter(layer.weight, requires_grad=False)
        self.scale = torch.nn.Parameter(layer.scale, requires_grad=False)

    def forward(self, x):
        out = self.linear(
            input=x + x, weight=self.weight, block_size=[128, 128], weight_scale=self.scale
        )
        return out * 2


@pytest.fixture
def ran(monkeypatch):
    """The (M, configuration, whether captured) of every launch; nothing compiled is left over."""
    launches, original = [], triton.plan

    def plan(config, n, k, **options):
        call = original(config, n, k, **options)

        def run(x, *arguments):
            launches.append((x.shape[0], config, torch.cuda.is_current_stream_capturing()))
            return call(x, *arguments)

        return run

    monkeypatch.setattr(triton, "plan", plan)
    op.forget_choices()
    torch.compiler.reset()
    yield launches
    torch.compiler.reset()
    op.forget_choices()


@torch.no_grad()
def test_one_compilation_and_the_eager_kernel(ran):
    model, counter = Model(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for m in (2, 3, 17, 64, 1000):
        x = activation(m, K, device="cuda")
        ran.clear()
        assert torch.equal(compiled(x), model(x))
        assert ran == [ran[0]] * 2  # compiled, then eager
    assert counter.frame_count == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        for m in (5, 63, 4097):
            compiled(activation(m, K, device="cuda"))
    for m in (1, 0):
        x = activation(m, K, device="cuda")
        ran.clear()
        assert torch.equal(compiled(x), model(x))
        assert ran == ran[:1] * 2 * m  # without rows nothing runs
    assert counter.frame_count <= 3


@torch.no_grad()
def test_an_unbacked_dimension_compiles_once_for_all(ran):
    model, counter = Model(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for m in (2, 1, 0, 3, 17, 1000):
        x = activation(m, K, device="cuda")
        torch._dynamo.decorators.mark_unbacked(x, 0)
        ran.clear()
        assert torch.equal(compiled(x), model(x))
        assert ran == ran[:1] * 2 * min(m, 1)
    assert counter.frame_count == 1


@pytest.mark.parametrize("m", [1, 4, 64])
@torch.no_grad()
def test_reduce_overhead_replays(m, ran):
    """Inductor captures the op into a graph of its own, and from then on only replays it."""
    model = Model()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    counters["inductor"]["cudagraph_skips"] = 0
    for _ in range(2):  # a run to warm up, a run that is captured
        compiled(activation(m, K, device="cuda"))
    (warmed, *captured) = ran
    assert not warmed[2]
    assert captured
    assert all(launch == (*warmed[:2], True) for launch in captured)
    assert warmed[1].fused == (m < 64), "one kernel and two kernels are both to be seen"
    for _ in range(3):
        x = activation(m, K, device="cuda")
        ran.clear()
        got = compiled(x).clone()
        assert not ran, "Inductor called the op again: that was no replay"
        assert torch.equal(got, model(x))
        assert ran == [warmed]
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("test", OPCHECKS)
@pytest.mark.parametrize("m", [0, 1, 3, 64, 200])
def test_opcheck(m, test):
    model, x = Model(), activation(m, K, device="cuda")
    with bytes_compare():
        for own in (None, model.linear.counters):
            arguments = (x, model.weight.data, model.scale.data, own)
            opcheck(torch.ops.sglang_kt_sm120.block_fp8_linear, arguments, test_utils=test)
        q, scale = reference.quantise(x)
        arguments = (q, model.weight.data, scale, model.scale.data, torch.float16)
        opcheck(torch.ops.sglang_kt_sm120.fp8_gemm_nt_groupwise, arguments, test_utils=test)
