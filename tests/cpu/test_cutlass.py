"""The probe of the host's CUTLASS: what is right passes, and everything else is found out."""

from __future__ import annotations

import logging

import pytest
import torch

from sglang_kt_sm120.backends import cutlass, reference
from tests.helpers import block_fp8

seen: list[int] = []


def right(input, weight, block_size, weight_scale, input_scale, bias):
    seen.append(input.shape[0])
    assert block_size == [128, 128]
    return reference.run(input, weight, weight_scale, None, input.dtype, None, None)


def wrong(change):
    def linear(**arguments):
        return change(right(**arguments))

    return linear


def raises(**_):
    raise RuntimeError("Error Internal\nmore of it")


def last_columns_zero(out):
    out[:, -64:] = 0
    return out


def unwritten(out):
    out[3] = torch.nan
    return out


@pytest.fixture
def layer():
    seen.clear()
    yield block_fp8(256, 384)
    cutlass._linear = None


def test_what_is_right_passes_with_rows_padded_to_four(layer):
    cutlass.offer(right)
    assert cutlass.judge(*layer) is None
    assert seen == [132]  # 129 rows, as sglang-kt's kernel wants them
    for m in (65, 66, 68):
        x = torch.randn(m, 384).bfloat16()
        got = cutlass.run(x, *layer, None, x.dtype, None, None)
        assert got.shape == (m, 256)
        assert torch.equal(got, reference.run(x, *layer, None, x.dtype, None, None))
        assert seen[-1] % 4 == 0


@pytest.mark.parametrize(
    ("linear", "reason"),
    [
        (wrong(lambda out: out * 1.02), "relative error 2"),
        (wrong(lambda out: out * 2), "relative error 1"),
        (wrong(last_columns_zero), "relative error"),
        (wrong(unwritten), "relative error nan"),
        (raises, "RuntimeError: Error Internal"),
        (lambda **_: torch.zeros(3, 3), "RuntimeError"),
    ],
    ids=["2 %", "doubled", "columns", "unwritten", "raises", "shape"],
)
def test_everything_else_is_found_out(linear, reason, layer):
    cutlass.offer(linear)
    assert cutlass.judge(*layer).startswith(reason)


def test_scales_rounded_to_powers_of_two_are_found_out(layer):
    weight, scale = layer
    rounded = torch.exp2(torch.log2(scale).round())

    def linear(**arguments):
        return right(**(arguments | {"weight_scale": rounded}))

    cutlass.offer(linear)
    assert cutlass.judge(weight, scale).startswith("relative error")


def test_one_warning_for_a_shape_and_our_kernels_instead(layer, monkeypatch, caplog):
    weight, scale = layer
    monkeypatch.setattr(cutlass, "_verdicts", {})
    cutlass.offer(raises)
    on_cuda = torch.nn.Parameter(weight, requires_grad=False)
    monkeypatch.setattr(type(on_cuda), "is_cuda", True, raising=False)
    with caplog.at_level(logging.WARNING, "sglang_kt_sm120"):
        assert cutlass.probe(on_cuda, scale)
        assert not cutlass.probe(on_cuda, scale)
    (record,) = caplog.records
    for word in ("raises", "N=256 K=384", "Error Internal"):
        assert word in record.getMessage()
    assert "Error Internal" in cutlass.why_not(None, 256, 384)
    assert "no probe" in cutlass.why_not(None, 128, 128)
