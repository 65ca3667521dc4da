"""The callable that sglang gets, called as sglang's layers call it."""

from __future__ import annotations

import contextlib
import copy
import pickle
import types

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_kt_sm120 import eager, op
from sglang_kt_sm120.backends import reference
from sglang_kt_sm120.linear import Sm120BlockFp8Linear
from tests.helpers import activation, assert_right, block_fp8

N, K = 200, 256


def stock(**arguments):
    return "stock", arguments


@pytest.fixture
def layer():
    weight, scale = block_fp8(N, K)
    linear = Sm120BlockFp8Linear(stock)
    linear.prepare(weight, scale)
    return linear, weight, scale


def call(layer, x, **changes):
    linear, weight, scale = layer
    arguments = {
        "input": x,
        "weight": weight,
        "block_size": [128, 128],
        "weight_scale": scale,
        "input_scale": None,
        "bias": None,
    }
    return linear(**(arguments | changes))


def exact(layer, x):
    return reference.multiply(*reference.quantise(x.reshape(-1, K)), layer[1], layer[2])


@pytest.mark.parametrize("shape", [(3, K), (2, 5, K), (1, 1, K), (0, K), (2, 0, K)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_leading_dimensions(layer, shape, dtype):
    x = torch.randn(shape).to(dtype)
    got = call(layer, x)
    assert got.shape == (*shape[:-1], N)
    assert got.dtype is dtype
    if x.numel():
        assert_right(got.reshape(-1, N), exact(layer, x))


def test_views_that_cannot_be_viewed_flat(layer):
    x = activation(6 * 2, K).reshape(6, 2, K).transpose(0, 1)
    assert_right(call(layer, x).reshape(-1, N), exact(layer, x))
    columns = activation(4, 3 * K)[:, K : 2 * K]
    assert_right(call(layer, columns), exact(layer, columns))


def test_bias_is_added_and_the_hosts_own_addition_is_safe(layer):
    x, bias = activation(3, K), torch.randn(N).bfloat16()
    plain, biased = call(layer, x), call(layer, x, bias=bias)
    assert torch.equal(biased, plain + bias)
    plain += 1  # as hosts do
    assert torch.equal(call(layer, x) + 1, plain)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("column_major", [False, True])
def test_quantised_input(layer, rows, padding, column_major):
    q, scale = reference.quantise(activation(5, K)[:rows])
    kept = torch.nn.functional.pad(scale, (0, 0, 0, padding), value=torch.nan)
    kept = kept.t().contiguous().t() if column_major else kept
    got = call(layer, q, input_scale=kept)
    assert got.shape == (rows, N)
    assert got.dtype is torch.bfloat16
    if rows:
        assert_right(got, reference.multiply(q, scale, *layer[1:]))


def test_other_blocks_and_unknown_arguments_go_to_stock(layer):
    x = activation(2, K)
    assert call(layer, x, block_size=[32, 32])[0] == "stock"
    name, arguments = call(layer, x, from_the_future=7)
    assert name == "stock"
    assert arguments["from_the_future"] == 7
    assert arguments["input"] is x


def test_arguments_of_newer_hosts(layer):
    x = activation(2, K)
    got = call(layer, x, act_scale_ue8m0=True, weight_bf16=None)
    assert torch.equal(got, call(layer, x))


def test_fp32_and_gradients_are_refused(layer):
    with pytest.raises(TypeError, match=rf"float32.*\[{N}, {K}\]"):
        call(layer, torch.randn(2, K))
    x = activation(2, K).requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        call(layer, x)
    with torch.no_grad():
        call(layer, x)


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (torch.empty(N, K), torch.rand(2, 2), r"\[200, 256\] is torch.float32"),
        (block_fp8(N, K)[0], torch.rand(2, 3), r"\[200, 256\] needs .* \[2, 2\]"),
        (torch.zeros(N, 200).to(torch.float8_e4m3fn), torch.rand(2, 2), r"K = 200"),
    ],
    ids=["bf16 weight", "scale shape", "K"],
)
def test_prepare_refuses_with_the_layers_shape(weight, scale, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Sm120BlockFp8Linear(stock).prepare(weight, scale)


def test_prepare_converts_ue8m0_in_place_once():
    weight, _ = block_fp8(N, K)
    exponents = torch.randint(110, 135, (2, 2)).to(torch.uint8)
    scale = torch.nn.Parameter(exponents.view(torch.float8_e8m0fnu), requires_grad=False)
    scale.format_ue8m0 = True
    linear = Sm120BlockFp8Linear(stock)
    linear.prepare(weight, scale)
    converted = scale.data_ptr()
    linear.prepare(weight, scale)  # a reload
    assert scale.data_ptr() == converted
    assert scale.dtype is torch.float32
    assert scale.format_ue8m0 is False
    assert torch.equal(scale.data.double(), 2.0 ** (exponents.double() - 127))


def test_prepare_makes_scales_contiguous_and_refuses_a_strided_weight(layer):
    linear, weight, scale = layer
    strided = torch.nn.Parameter(scale.t().contiguous().t(), requires_grad=False)
    assert not strided.is_contiguous()
    linear.prepare(weight, strided)
    assert strided.is_contiguous()
    x = activation(3, K)
    for _ in range(2):
        assert_right(call((linear, weight, strided), x), exact(layer, x))
    with pytest.raises(ValueError, match=r"strides \[1, 200\]"):
        linear.prepare(weight.t().contiguous().t(), scale)


def test_one_decision_for_many_calls(layer, monkeypatch):
    decided = []
    original = op._decide
    monkeypatch.setattr(op, "_decide", lambda *a: decided.append(a) or original(*a))
    op.forget_choices()
    for x in (activation(3, K), activation(K, 3).t(), activation(3, 2 * K)[:, 7 : 7 + K]):
        for _ in range(3):
            assert_right(call(layer, x), exact(layer, x))
    assert len(decided) == 1


def test_one_callable_may_serve_layers_of_several_shapes(layer, monkeypatch):
    """As sglang 0.5.23 does with replicated projections; each is decided by its own shape."""
    linear, weight, scale = layer
    other, other_scale = block_fp8(3 * N, K)
    decided = []
    original = op._decide
    monkeypatch.setattr(op, "_decide", lambda *a: decided.append(a[2].shape) or original(*a))
    op.forget_choices()
    x = activation(3, K)
    linear.prepare(other, other_scale)
    for _ in range(2):
        for w, s in ((weight, scale), (other, other_scale)):
            got = linear(input=x, weight=w, block_size=[128, 128], weight_scale=s)
            assert_right(got, reference.multiply(*reference.quantise(x), w, s))
    assert decided == [weight.shape, other.shape]
    with pytest.raises(ValueError, match="expected"):
        linear(input=activation(3, 2 * K), weight=weight, block_size=[128, 128], weight_scale=scale)


def test_scales_of_padded_rows_in_three_dimensions_are_refused(layer):
    q, scale = reference.quantise(activation(10, K))
    padded = torch.nn.functional.pad(scale.reshape(2, 5, -1), (0, 0, 0, 3))
    with pytest.raises(ValueError, match="do not lie beside"):
        call(layer, q.reshape(2, 5, K), input_scale=padded)
    got = call(layer, q.reshape(2, 5, K), input_scale=scale.reshape(2, 5, -1))
    assert_right(got.reshape(-1, N), reference.multiply(q, scale, *layer[1:]))


def test_copies_and_pickles(layer):
    x = activation(2, K)
    expected = call(layer, x)
    assert layer[0].prepared.decided
    for copied in (copy.deepcopy(layer[0]), pickle.loads(pickle.dumps(layer[0]))):
        assert not copied.prepared.decided  # functions, which another process has not
        assert torch.equal(call((copied, *layer[1:]), x), expected)


def test_a_layer_decides_anew_when_decisions_are_forgotten(layer, monkeypatch):
    """As when deterministic inference is asked for after the first layers were made."""
    x, decisions, original = activation(2, K), [], op.run
    monkeypatch.setattr(op, "run", lambda *a: decisions.append(a) or original(*a))
    op.forget_choices()
    for expected in (1, 1):
        call(layer, x)
        assert len(decisions) == expected
    op.set_deterministic(True)
    try:
        call(layer, x)
        assert len(decisions) == 2
    finally:
        op.set_deterministic(False)


class Model(torch.nn.Module):
    """A layer as a host's model holds it, between operations that a compiler could fuse."""

    def __init__(self):
        super().__init__()
        weight, scale = block_fp8(N, K)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.scale = torch.nn.Parameter(scale, requires_grad=False)
        self.linear = Sm120BlockFp8Linear(stock)
        self.linear.prepare(self.weight, self.scale)

    def forward(self, x):
        out = self.linear(
            input=x + x,
            weight=self.weight,
            block_size=[128, 128],
            weight_scale=self.scale,
            input_scale=None,
            bias=None,
        )
        return out * 2


@pytest.fixture
def ran(monkeypatch):
    """The rows of every product that ran; nothing compiled is left over."""
    rows, original = [], reference.run
    monkeypatch.setattr(
        reference, "run", lambda x, *a, **o: rows.append(x.shape[0]) or original(x, *a, **o)
    )
    op.forget_choices()
    torch.compiler.reset()
    yield rows
    torch.compiler.reset()
    op.forget_choices()


@torch.no_grad()
def test_one_compilation_serves_every_number_of_rows(ran):
    model, counter = Model(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for m in (2, 3, 17, 64, 1000):
        x = activation(m, K)
        ran.clear()
        assert torch.equal(compiled(x), model(x))
        assert ran == [m, m]  # compiled, then eager
    assert counter.frame_count == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        for m in (5, 63, 257):
            x = activation(m, K)
            assert torch.equal(compiled(x), model(x))
    for m in (1, 0):  # torch makes one of its own for each
        x = activation(m, K)
        ran.clear()
        assert torch.equal(compiled(x), model(x))
        assert ran == [1, 1][: 2 * m]  # without rows there is nothing to run
    assert counter.frame_count <= 3


@torch.no_grad()
def test_a_number_of_rows_that_is_unknown_compiles_once(ran):
    """Marked unbacked, one compilation serves even 0 and 1, of which torch else makes its own."""
    model, counter = Model(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for m in (2, 1, 0, 3, 17, 1000):
        x = activation(m, K)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        ran.clear()
        assert torch.equal(compiled(x), model(x))
        assert ran == [m, m][: 2 * m]
    assert counter.frame_count == 1


def _warmed_model() -> Model:
    """A model that has run eagerly, so that its eager path is open."""
    model = Model()
    for rows in (5, 5, 3):
        model(activation(rows, K))
    return model


@torch.no_grad()
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_graph_holds_the_op(strict):
    model, x = _warmed_model(), activation(5, K)
    rows = {"x": {0: torch.export.Dim("rows", min=2, max=4096)}}
    program = torch.export.export(model, (x,), strict=strict, dynamic_shapes=rows)
    assert "sglang_kt_sm120.block_fp8_linear" in str(program.graph)
    other = activation(9, K)
    assert torch.equal(program.module()(other), model(other))


@torch.no_grad()
@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_graph_holds_the_op(mode, pre_dispatch):
    """Else it would hold the output's allocation, and nothing that writes there."""
    model, x = _warmed_model(), activation(5, K)
    graph = make_fx(
        model, tracing_mode=mode, pre_dispatch=pre_dispatch, _allow_non_fake_inputs=True
    )(x)
    assert "sglang_kt_sm120.block_fp8_linear" in str(graph.graph)
    other = activation(5, K)
    assert torch.equal(graph(other), model(other))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_torchscript_trace_holds_the_op():
    model, x = _warmed_model(), activation(5, K)
    traced = torch.jit.trace(model, (x,), check_trace=False)
    assert "sglang_kt_sm120::block_fp8_linear" in str(traced.inlined_graph)
    other = activation(5, K)
    assert torch.equal(traced(other), model(other))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_modes_and_fake_tensors_go_through_the_op(ran):
    model, x = _warmed_model(), activation(5, K)
    stacked = torch.stack([activation(5, K) for _ in range(3)])
    expected = torch.stack([model(one) for one in stacked])
    assert torch.equal(torch.func.vmap(model)(stacked), expected)
    assert torch.equal(torch.func.functionalize(model)(x), model(x))
    with Watch() as watch:
        model(x)
    assert "sglang_kt_sm120.block_fp8_linear.default" in watch.seen
    ran.clear()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    outside = model(mode.from_tensor(x))
    assert isinstance(outside, FakeTensor)
    assert outside.shape == (5, N)
    with mode:
        assert isinstance(model(torch.empty(5, K, dtype=torch.bfloat16)), FakeTensor)
    assert ran == []  # nothing was multiplied


class Watch(TorchDispatchMode):
    """Remembers the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_every_stream_has_its_own_counters_and_keeps_them(monkeypatch):
    """Calls on ten streams in turn, on a device that is made up: whose counters does each get?"""
    layer = Sm120BlockFp8Linear(stock)
    weight, scale = block_fp8(N, K)
    layer.prepare(weight, scale)
    prepared, now, given = layer.prepared, types.SimpleNamespace(device=0, stream=0, x=0), []
    prepared.index, prepared.rows = 0, [f"row {i}" for i in range(op.COUNTER_SLOTS)]
    monkeypatch.setattr(op, "_slots", {})
    monkeypatch.setattr(eager, "_current_stream", lambda index: 100 * index + now.stream)
    monkeypatch.setattr(eager, "_current_device", lambda: now.device)
    raw = lambda index: 100 * index + now.stream  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: now.x)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())

    def launch(x, weight, scale, x_scale, dtype, config, row):
        given.append(row)
        return x

    def call(stream: int, x: int = 0):
        now.stream, now.x = stream, x
        key = (2, weight.shape, torch.bfloat16, x)
        prepared.decided[key] = (launch, None)
        layer(input=activation(2, K), weight=weight, block_size=[128, 128], weight_scale=scale)
        return given[-1]

    first = [call(stream) for stream in range(10)]
    assert first == [*prepared.rows, None, None]
    assert [call(stream) for stream in (9, 0, 0, 3, 9, 3)] == [
        None, "row 0", "row 0", "row 3", None, "row 3",
    ]  # fmt: skip
    assert call(3, x=1) is None  # a tensor on another device than the layer's
    assert call(3) == "row 3"
    prepared.latest = (3, "stale")
    op.forget_choices()
    monkeypatch.setattr(op, "run", lambda *a: a[-1].append((launch, None)) or a[0])
    layer(input=activation(2, K), weight=weight, block_size=[128, 128], weight_scale=scale)
    assert call(3) == "row 3"  # decided anew, and nothing of before is kept
