"""The ops: schema, fakes, what they refuse, and that compiled runs take the same path."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.testing._internal.optests import generate_tests

from sglang_kt_sm120 import op, select
from sglang_kt_sm120.backends import reference
from sglang_kt_sm120.linear import Sm120BlockFp8Linear
from tests.helpers import activation, assert_right, block_fp8
from tests.opchecks import OPCHECKS, bytes_compare

MS = [0, 1, 2, 3, 5, 17, 64, 65, 130]


def operands(m, n, k, dtype=torch.bfloat16):
    weight, scale = block_fp8(n, k)
    return activation(m, k, dtype), weight, scale


def quantised(m, n, k):
    x, weight, scale = operands(m, n, k)
    q, q_scale = reference.quantise(x)
    return q, weight, q_scale, scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m", MS)
@pytest.mark.parametrize(("n", "k"), [(16, 128), (576, 256), (300, 384)])
def test_linear_against_float64(m, n, k, dtype):
    x, weight, scale = operands(m, n, k, dtype)
    got = op.block_fp8_linear(x, weight, scale)
    assert got.shape == (m, n)
    assert got.dtype is dtype
    if m:
        expected = reference.multiply(*reference.quantise(x), weight, scale)
        assert_right(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m", [0, 1, 6])
def test_gemm_against_float64(m, dtype):
    a, b, a_scale, b_scale = quantised(m, 200, 256)
    a_scale = a_scale.t().contiguous().t()  # column-major, as CUTLASS wants it: any strides serve
    got = op.fp8_gemm_nt_groupwise(a, b, a_scale, b_scale, dtype)
    assert got.shape == (m, 200)
    assert got.dtype is dtype
    if m:
        assert_right(got, reference.multiply(a, a_scale, b, b_scale))


def test_strided_and_transposed_inputs_give_the_same_values():
    wide, weight, scale = operands(6, 64, 512)
    weight, scale = weight[:, :256].contiguous(), scale[:, :2].contiguous()
    columns = wide[:, 128:384]
    expected = op.block_fp8_linear(columns.contiguous(), weight, scale)
    assert not columns.is_contiguous()
    assert torch.equal(op.block_fp8_linear(columns, weight, scale), expected)
    transposed = columns.t().contiguous().t()
    assert torch.equal(op.block_fp8_linear(transposed, weight, scale), expected)


def test_the_output_is_fresh():
    x, weight, scale = operands(4, 128, 128)
    first, second = (op.block_fp8_linear(x, weight, scale) for _ in range(2))
    pointers = {t.untyped_storage().data_ptr() for t in (first, second, x, weight, scale)}
    assert len(pointers) == 5


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, w, s: (x.float(), w, s), TypeError, r"float32.*\[256, 384\]"),
        (lambda x, w, s: (x, w, s[:, :2]), ValueError, r"\[256, 384\] needs scales \[2, 3\]"),
        (lambda x, w, s: (x, w, s.half()), TypeError, r"scales are torch.float16"),
        (lambda x, w, s: (x, w.to(torch.bfloat16), s), TypeError, r"needs torch.float8_e4m3fn"),
        (lambda x, w, s: (x[:, :256], w, s), ValueError, r"expected \[M, 384\]"),
        (lambda x, w, s: (x[:, :100], w[:, :100].contiguous(), s[:, :1]), ValueError, r"K = 100"),
        (lambda x, w, s: (x, w.t().contiguous().t(), s), ValueError, r"contiguous"),
    ],
    ids=["fp32", "scale shape", "scale dtype", "weight dtype", "K", "K % 128", "strides"],
)
def test_bad_input_is_refused_with_the_shape(change, error, message):
    with pytest.raises(error, match=message):
        op.block_fp8_linear(*change(*operands(3, 256, 384)))


def test_a_good_call_opens_no_door_to_a_bad_one():
    """Decisions are remembered; what was checked then is checked again where it can differ."""
    a, b, a_scale, b_scale = quantised(5, 200, 256)
    op.fp8_gemm_nt_groupwise(a, b, a_scale, b_scale)
    for bad in (a_scale[:1], a_scale[:, :1], a_scale.double()):
        with pytest.raises((ValueError, TypeError, RuntimeError), match="scales"):
            op.fp8_gemm_nt_groupwise(a, b, bad, b_scale)
    x, weight, scale = operands(5, 200, 256)
    op.block_fp8_linear(x, weight, scale)
    with pytest.raises(TypeError, match=r"scales are torch\.float64"):
        op.block_fp8_linear(x, weight, scale.double())


@pytest.mark.parametrize("m", [0, 5])
def test_the_gemms_fake_refuses_what_the_gemm_refuses(m):
    a, b, a_scale, b_scale = quantised(m, 200, 256)
    mode = torch._subclasses.FakeTensorMode()
    for bad in ((a, b.float(), a_scale, b_scale), (a, b, a_scale[:, :1], b_scale)):
        fakes = [mode.from_tensor(tensor) for tensor in bad]
        with mode, pytest.raises((TypeError, ValueError)):
            op.fp8_gemm_nt_groupwise(*fakes)


def test_no_rows_decide_nothing():
    """An idle rank's call must not pass for the first launch of a kernel (see op._launched)."""
    x, weight, scale = operands(0, 200, 256)
    op.forget_choices()
    assert op.block_fp8_linear(x, weight, scale).shape == (0, 200)
    assert not op._choices


def test_the_fakes_refuse_what_the_op_refuses():
    x, weight, scale = operands(3, 256, 384)
    mode = torch._subclasses.FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in (x.float(), weight, scale)]
    with mode, pytest.raises(TypeError, match="float32"):
        op.block_fp8_linear(*fakes)


@pytest.mark.parametrize("test", OPCHECKS)
@pytest.mark.parametrize("m", [0, 1, 3, 64])
def test_opcheck_linear(m, test):
    with bytes_compare():
        opcheck(torch.ops.sglang_kt_sm120.block_fp8_linear, operands(m, 200, 256), test_utils=test)


@pytest.mark.parametrize("test", OPCHECKS)
@pytest.mark.parametrize("m", [0, 1, 3, 64])
def test_opcheck_gemm(m, test):
    arguments = (*quantised(m, 200, 256), torch.bfloat16)
    with bytes_compare():
        opcheck(torch.ops.sglang_kt_sm120.fp8_gemm_nt_groupwise, arguments, test_utils=test)


def test_opcheck_catches_an_op_that_writes_its_weight():
    library = torch.library.Library("sm120_control", "DEF")
    library.define("mutates(Tensor x, Tensor weight) -> Tensor")

    def mutates(x, weight):
        weight.view(torch.uint8)[0, 0] += 1
        return x.clone()

    library.impl("mutates", mutates, "CPU")
    x, weight, _ = operands(3, 128, 128)
    with bytes_compare(), pytest.raises(generate_tests.OpCheckError):
        opcheck(torch.ops.sm120_control.mutates, (x, weight), test_utils="test_schema")


class Layer(torch.nn.Module):
    def __init__(self, n=256, k=384):
        super().__init__()
        weight, scale = block_fp8(n, k)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.scale = torch.nn.Parameter(scale, requires_grad=False)

    def forward(self, x):
        return op.block_fp8_linear(x * 2, self.weight, self.scale) + 1


@contextlib.contextmanager
def recorded(monkeypatch):
    """Yield the list of Ms that the backend was called with."""
    ms = []
    original = reference.run

    def run(x, *args, **kwargs):
        ms.append(x.shape[0])
        return original(x, *args, **kwargs)

    monkeypatch.setattr(reference, "run", run)
    op.forget_choices()
    yield ms
    op.forget_choices()


def test_one_compilation_serves_every_m(monkeypatch):
    layer, counter = Layer(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad(), recorded(monkeypatch) as ms:
        for m in (2, 3, 17, 64, 1000):
            x = activation(m, 384)
            ms.clear()
            assert torch.equal(compiled(x), layer(x))
            assert ms == [m, m]  # compiled, then eager: the same M reaches the same backend
        assert counter.frame_count == 1
        for m in (1, 0):  # torch makes one of its own for each
            x = activation(m, 384)
            ms.clear()
            assert torch.equal(compiled(x), layer(x))
            assert ms == [1, 1][: 2 * m]  # without rows there is nothing to run
        assert counter.frame_count <= 3


@torch._inductor.config.patch(force_disable_caches=True)  # they do not know an op's tags
def test_inductor_hands_strides_over_as_they_are(monkeypatch):
    """It would lay `product` out otherwise, and the op would have to copy it."""
    layer, seen, original = Layer(), [], op.run

    def run(x, *arguments):
        seen.append(x.stride())
        return original(x, *arguments)

    monkeypatch.setattr(op, "run", run)

    def both(x):
        columns, product = x[:, 128:512], (x[:, :384].t() * 2).t()
        return [op.block_fp8_linear(view, layer.weight, layer.scale) for view in (columns, product)]

    with torch.no_grad():
        for call in (both, torch.compile(both, fullgraph=True, dynamic=True)):
            call(activation(5, 640))
            assert seen == [(640, 1), (384, 1)]
            seen.clear()


def test_scales_off_their_alignment_are_copied(monkeypatch):
    """Triton compiles anew for a pointer that is no multiple of 16, which capture cannot bear."""
    seen, original = [], reference.run

    def run(x, weight, weight_scale, x_scale, *rest, **options):
        seen.append([t.data_ptr() % 16 for t in (weight_scale, x_scale)])
        return original(x, weight, weight_scale, x_scale, *rest, **options)

    monkeypatch.setattr(reference, "run", run)
    op.forget_choices()
    weight, scale = block_fp8(256, 384)
    q, q_scale = reference.quantise(activation(3, 384))
    off = torch.empty(1 + scale.numel(), dtype=torch.float32)[1:].view_as(scale).copy_(scale)
    q_off = torch.empty(1 + q_scale.numel(), dtype=torch.float32)[1:].view_as(q_scale)
    q_off.copy_(q_scale)
    assert off.data_ptr() % 16
    assert q_off.data_ptr() % 16
    got = op.fp8_gemm_nt_groupwise(q, weight, q_off, off)
    op.forget_choices()
    assert seen == [[0, 0]]
    assert torch.equal(got, op.fp8_gemm_nt_groupwise(q, weight, q_scale, scale))


@pytest.mark.parametrize("way", ["op", "callable"])
@pytest.mark.parametrize(
    ("start", "width", "aligned"),
    [(1, 3 * 384, False), (0, 3 * 384 + 1, False), (16, 3 * 384 + 16, True)],
)
def test_an_activation_off_its_alignment_is_copied(way, start, width, aligned, monkeypatch):
    """Of the pointer and of the rows, as for scales; what is aligned is not copied."""
    seen, original = [], reference.run

    def run(x, *rest, **options):
        seen.append((x.data_ptr(), x.data_ptr() % 16, x.stride(0) % 16, x.stride(1)))
        return original(x, *rest, **options)

    monkeypatch.setattr(reference, "run", run)
    op.forget_choices()
    weight, scale = block_fp8(256, 384)
    linear = Sm120BlockFp8Linear(None)
    linear.prepare(weight, scale)
    x = activation(5, width)[:, start : start + 384]
    with torch.no_grad():
        for rows in (x, x, x[:1]):  # the second meets what the first has decided
            seen.clear()
            if way == "op":
                got = op.block_fp8_linear(rows, weight, scale)
            else:
                got = linear(input=rows, weight=weight, block_size=[128, 128], weight_scale=scale)
            assert [place[1:] for place in seen] == [(0, 0, 1)]
            assert (seen[0][0] == rows.data_ptr()) is aligned
            assert torch.equal(got, op.block_fp8_linear(rows.clone(), weight, scale))
    op.forget_choices()


def test_buckets_have_no_divisibility_paths():
    for m in range(1, 258):
        assert m <= select.bucket(m) < m + 64
        assert select.bucket(m) == m or m > select.DECODE_M
        assert select.bucket(select.bucket(m)) == select.bucket(m)
    assert {select.bucket(m) for m in range(65, 97)} == {96}
    assert {select.bucket(m) for m in range(97, 129)} == {128}
    assert {select.bucket(m) for m in range(129, 193)} == {192}
    for largest in (1, 64, 65, 96, 97, 128, 129, 1000):
        expected = sorted({select.bucket(m) for m in range(1, largest + 1)})
        assert select.buckets(largest) == expected, largest
