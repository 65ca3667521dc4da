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


SHAPE = (torch.device("cpu"), 1280, 384, torch.bfloat16)


@pytest.fixture(autouse=True)
def no_host(monkeypatch):
    seen.clear()
    monkeypatch.setattr(cutlass, "_linear", None)
    monkeypatch.setattr(cutlass, "_verdicts", {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [128, 256, 1280, 2176])
def test_what_is_right_passes_with_rows_padded_to_four(n, dtype):
    cutlass.offer(right)
    assert cutlass.judge(torch.device("cpu"), n, 384, dtype) is None
    assert seen == [132]  # 129 rows, as sglang-kt's kernel wants them


def test_rows_are_padded_and_taken_off_again():
    cutlass.offer(right)
    layer = block_fp8(256, 384)
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
        (lambda **_: torch.zeros(3, 3), "its output is [3, 3]"),
        (wrong(lambda out: out.flip(1)), "relative error"),
    ],
    ids=["2 %", "doubled", "columns", "unwritten", "raises", "shape", "rows of the weight"],
)
def test_everything_else_is_found_out(linear, reason):
    cutlass.offer(linear)
    assert cutlass.judge(*SHAPE).startswith(reason)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: torch.exp2(torch.log2(s).round()),
        lambda s: s[:1].expand_as(s),
        lambda s: s.flip(1),
    ],
    ids=["rounded to powers of two", "one row for all", "K backwards"],
)
def test_wrong_scales_are_found_out(change):
    def linear(**arguments):
        return right(**(arguments | {"weight_scale": change(arguments["weight_scale"])}))

    cutlass.offer(linear)
    assert cutlass.judge(*SHAPE).startswith("relative error")


def test_one_warning_for_a_shape_and_our_kernels_instead(monkeypatch, caplog):
    """With a device that says it is CUDA; what it runs is the judge's, tested above."""
    cutlass.offer(raises)
    monkeypatch.setattr(cutlass, "judge", lambda *shape: "RuntimeError: Error Internal")
    device = torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING, "sglang_kt_sm120"):
        assert cutlass.probe(device, 256, 384, torch.bfloat16)
        assert not cutlass.probe(device, 256, 384, torch.bfloat16)
    (record,) = caplog.records
    for word in ("raises", "N=256 K=384", "Error Internal"):
        assert word in record.getMessage()
    assert "Error Internal" in cutlass.why_not(0, 256, 384, torch.bfloat16)
    for other in ((1, 256, 384, torch.bfloat16), (0, 256, 384, torch.float16)):
        assert "no probe" in cutlass.why_not(*other)
