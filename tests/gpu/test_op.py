"""The ops and the layer object on the GPU, with inputs as real models hand them over."""

from __future__ import annotations

import time

import pytest
import torch

from sglang_kt_sm120 import devices, graphs, op, shapes
from sglang_kt_sm120.backends import reference
from sglang_kt_sm120.backends import triton as backend
from sglang_kt_sm120.linear import BLOCK_SIZE
from tests.helpers import activation, assert_right

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SECONDS = 8
MS = [1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 65, 83, 127, 128, 129, 300]


def make(n: int, k: int) -> graphs.Layer:
    return graphs.Layer(shapes.Linear("x", n, k), torch.device("cuda"))


def expected(layer, x):
    return reference.multiply(*reference.quantise(x), layer.weight, layer.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(8, 128), (16, 256), (576, 1024), (2112, 896), (4096, 512)])
@torch.inference_mode()
def test_every_m(n, k, dtype):
    layer = make(n, k)
    for m in MS:
        x = activation(m, k, dtype, "cuda")
        assert_right(layer(x), expected(layer, x))
    assert not layer.linear.counters.any()


@torch.inference_mode()
def test_views_give_the_same_bits():
    layer, k = make(576, 512), 512
    for m in MS:
        wide = activation(m, 3 * k, device="cuda")
        for start in (0, k, 7):  # aligned, and not
            view = wide[:, start : start + k]
            assert torch.equal(layer(view), layer(view.contiguous()))
        turned = wide[:, :k].t().contiguous().t()
        assert torch.equal(layer(turned), layer(turned.contiguous()))
        deep = wide[:, :k].reshape(1, m, k).expand(2, m, k)  # stride 0
        assert torch.equal(layer(deep).flatten(0, 1), layer(deep.flatten(0, 1).contiguous()))


@torch.inference_mode()
def test_quantised_input_of_any_layout():
    layer = make(2112, 512)
    for m in MS:
        q, scale = reference.quantise(activation(m, 512, device="cuda"))
        want = reference.multiply(q, scale, layer.weight, layer.scale)
        for given in (scale, scale.t().contiguous().t()):
            got = op.fp8_gemm_nt_groupwise(
                q, layer.weight, given, layer.scale, torch.bfloat16, layer.linear.counters
            )
            assert_right(got, want)


@torch.inference_mode()
def test_without_counters_the_bits_are_the_same():
    layer = make(2112, 1024)
    for m in MS:
        x = activation(m, 1024, device="cuda")
        assert torch.equal(op.block_fp8_linear(x, layer.weight, layer.scale), layer(x))


@torch.inference_mode()
def test_rows_do_not_touch_each_other():
    layer = make(2112, 1024)
    for m in (5, 16, 40, 130):
        x = activation(m, 1024, device="cuda")
        clean = layer(x)
        x[1], x[2, 5], x[3, 700] = 0, torch.nan, torch.inf
        x[4] = 1e30
        got = layer(x)
        assert (got[1] == 0).all()
        assert got[2].isnan().all()
        assert got[3].isnan().all()
        assert not got[4].isnan().any()
        same = [0, *range(5, m)]
        assert torch.equal(got[same], clean[same])


@torch.inference_mode()
def test_deterministic_inference_gives_a_row_the_same_bits_at_every_m():
    layer = make(2112, 1024)
    x = activation(257, 1024, device="cuda")
    op.set_deterministic(True)
    try:
        alone = layer(x[:1])
        for m in range(1, 258):
            assert torch.equal(layer(x[:m])[0], alone[0]), m
        assert_right(layer(x), expected(layer, x))
    finally:
        op.set_deterministic(False)


@torch.inference_mode()
def test_a_weight_written_just_before_is_read():
    """Dependent launch may request weights early, but never before their writer has finished."""
    layer = make(2112, 1024)
    x = activation(4, 1024, device="cuda")
    first, second = layer.weight.clone(), layer.weight.flip(0).contiguous()
    wanted = []
    for weight in (first, second):
        layer.weight.copy_(weight)
        torch.cuda.synchronize()
        wanted.append(layer(x))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(5_000):
        for weight, want in zip((first, second), wanted, strict=True):
            layer.weight.copy_(weight)
            wrong += (layer(x) != want).any()
    assert int(wrong) == 0


@torch.inference_mode()
def test_a_chain_of_layers_that_share_freed_memory():
    """Ten thousand rounds of layers back to back: scratch is reused while kernels still run."""
    layers = [make(1024, 2048), make(2048, 1024), make(1024, 2048)]
    x = activation(3, 2048, device="cuda")

    def chain():
        y = x
        for layer in layers:
            y = layer(y)
            y = y / y.abs().amax().clamp_min(1e-3)
        return y

    want = chain()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        wrong += (chain() != want).any()
    assert int(wrong) == 0


@pytest.mark.parametrize("m", [1, 64])  # one kernel, and two
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_way_to_the_launcher_costs_under_ten_microseconds(mode, m, monkeypatch):
    """Callable and op together, against calling what they end in with the same arguments.

    The way through the dispatcher, which compiled code takes, is printed beside them.
    """
    layer = make(2112, 1024)
    x = activation(m, 1024, device="cuda")
    seen = {}
    original = backend.plan

    def plan(*arguments, **options):
        planned = original(*arguments, **options)

        def run(*arguments):
            seen.update(run=planned, arguments=arguments)
            return planned(*arguments)

        return run

    monkeypatch.setattr(backend, "plan", plan)
    op.forget_choices()
    layer(x)
    monkeypatch.undo()
    op.forget_choices()
    run, arguments = seen["run"], seen["arguments"]

    def cost(call, calls=100):
        """Host time of one call in microseconds; so few calls that the GPU's queue never fills."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls * 1e6

    operands = (x, layer.weight, layer.scale, layer.linear.counters)
    dispatched = torch.ops.sglang_kt_sm120.block_fp8_linear
    weight, scale, linear = layer.weight, layer.scale, layer.linear

    def called():  # as sglang's method calls it
        linear(input=x, weight=weight, block_size=BLOCK_SIZE, weight_scale=scale)

    ways = (lambda: run(*arguments), called, lambda: dispatched(*operands))
    with mode():
        [cost(way) for way in ways]  # decides anew
        # In turn, for seconds, and the least of each: neighbours on the machine only ever add.
        end, rounds = time.monotonic() + SECONDS, []
        while time.monotonic() < end:
            rounds.append([cost(way) for way in ways])
    direct, whole, through = (min(times) for times in zip(*rounds, strict=True))
    print(f"M={m}: launcher {direct:.1f} us, layer {whole:.1f} us, torch.ops {through:.1f} us")
    assert whole - direct <= 10


def test_this_device_is_known():
    device = devices.device(0)
    assert device.sm_count > 0
    assert device.shared_bytes >= 101376
