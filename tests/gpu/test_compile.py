"""torch.compile on the GPU: one compilation for every M, the same bits as eager, graphs too."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
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
    """The (M, configuration) of every launch."""
    launches, original = [], triton.plan

    def plan(config, n, k, **options):
        call = original(config, n, k, **options)

        def run(x, *arguments):
            launches.append((x.shape[0], config))
            return call(x, *arguments)

        return run

    monkeypatch.setattr(triton, "plan", plan)
    op.forget_choices()
    yield launches
    op.forget_choices()


@torch.no_grad()
def test_one_compilation_and_the_eager_kernel(ran):
    model, counter = Model(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for m in (2, 3, 17, 64, 1000):
        x = activation(m, K, device="cuda")
        ran.clear()
        assert torch.equal(compiled(x), model(x))
        assert ran[0] == ran[1]
    assert counter.frame_count == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        for m in (5, 63, 4097):
            compiled(activation(m, K, device="cuda"))
    for m in (1, 0):
        x = activation(m, K, device="cuda")
        assert torch.equal(compiled(x), model(x))
    assert counter.frame_count <= 3


@torch.no_grad()
def test_an_unbacked_dimension_compiles_once_for_all():
    model, counter = Model(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for m in (2, 1, 0, 3, 17, 1000):
        x = activation(m, K, device="cuda")
        torch._dynamo.decorators.mark_unbacked(x, 0)
        assert torch.equal(compiled(x), model(x))
    assert counter.frame_count == 1


@torch.no_grad()
def test_reduce_overhead_replays():
    model = Model()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):  # warm up, record, replay, replay
        x = activation(4, K, device="cuda")
        assert torch.equal(compiled(x).clone(), model(x))


@pytest.mark.parametrize("test", OPCHECKS)
@pytest.mark.parametrize("m", [0, 1, 3, 64, 200])
def test_opcheck(m, test):
    model, x = Model(), activation(m, K, device="cuda")
    with bytes_compare():
        for counters in (None, model.linear.counters):
            arguments = (x, model.weight.data, model.scale.data, counters)
            opcheck(torch.ops.sglang_kt_sm120.block_fp8_linear, arguments, test_utils=test)
        q, scale = reference.quantise(x)
        arguments = (q, model.weight.data, scale, model.scale.data, torch.float16)
        opcheck(torch.ops.sglang_kt_sm120.fp8_gemm_nt_groupwise, arguments, test_utils=test)
