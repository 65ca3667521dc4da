"""The parts of the benchmark that need no GPU: bytes, reference, errors, refusal."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="bench times Triton kernels")

from sglang_kt_sm120 import bench


def case(m=3, n=200, k=256):
    x = torch.randn(m, k).bfloat16()
    weights, scales = bench.make_weights(n, k, torch.device("cpu"), l2_bytes=100_000)
    return bench.Case("layer", m, n, k, x, weights, scales, torch.zeros(1, dtype=torch.int32))


def test_weights_exceed_three_times_the_cache():
    weights, scales = bench.make_weights(200, 256, torch.device("cpu"), l2_bytes=100_000)
    assert sum(weight.numel() for weight in weights) > 3 * 100_000
    assert len(weights) == len(scales)
    assert scales[0].shape == (2, 2)
    assert len(bench.make_weights(200, 256, torch.device("cpu"), l2_bytes=1)[0]) == 2


def test_bytes_count_each_operand_once():
    assert case().bytes == 200 * 256 + 2 * 2 * 4 + 2 * 3 * 256 + 2 * 3 * 200


def test_reference_is_the_product_of_the_quantised_operands():
    this = case()
    expected = torch.zeros(3, 200, dtype=torch.float64)
    for group in range(2):
        columns = slice(128 * group, 128 * group + 128)
        x = this.x[:, columns].float()
        scale = x.abs().amax(1, keepdim=True) / torch.tensor(448.0)
        codes = (x * (1 / scale)).to(torch.float8_e4m3fn)
        rows = this.scales[0][:, group].double().repeat_interleave(128)[:200]
        part = codes.double() @ this.weights[0][:, columns].double().T
        expected += part * scale.double() * rows
    # Terms cancel in float64 too: an element near zero carries the rounding of the largest.
    atol = 1e-12 * expected.abs().max().item()
    torch.testing.assert_close(bench.reference(this, 0), expected, rtol=1e-12, atol=atol)


def test_an_unwritten_output_passes_no_tolerance():
    out = torch.full((2, 2), float("nan"))
    error = bench.relative_error(out, torch.ones(2, 2, dtype=torch.float64))
    assert not error <= 1e9


def test_records_are_json():
    record = bench.Record("layer", 200, 256, 3, "ours", us=1.5, config={"splits": 2})
    assert json.loads(json.dumps(record.as_dict()))["us"] == 1.5


def test_it_refuses_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="CUDA"):
        bench.run([], [1], [])
