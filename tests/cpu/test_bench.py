"""The parts of the benchmark that need no GPU: bytes, reference, errors, refusal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="bench times Triton kernels")

from sglang_kt_sm120 import baselines, bench
from sglang_kt_sm120.backends import reference as oracle


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


def quantised(x, *, column_major=False, align=1, options=None):
    """What the quantisation kernel hands out, in plain torch."""
    codes, scale = oracle.quantise(x)
    if column_major:
        rows = -(-x.shape[0] // align) * align
        laid_out = torch.full((scale.shape[1], rows), float("nan")).t()[: x.shape[0]]
        scale = laid_out.copy_(scale)
    return codes, scale


def fake_libraries(monkeypatch) -> None:
    """Modules that multiply in float64 and insist on the layouts that the real ones read."""

    def fp8_gemm_nt(a, b, out):
        (codes, scale), (weight, weight_scale) = a, b
        assert scale.stride() == (1, -(-scale.shape[0] // 4) * 4), "TMA wants aligned columns"
        out.copy_(oracle.multiply(codes, scale, weight, weight_scale))

    def fp8_blockwise_scaled_mm(codes, weight, scale, weight_scale, out_dtype):
        assert scale.stride(0) == 1
        assert weight_scale.stride(0) == 1
        return oracle.multiply(codes, scale, weight.T, weight_scale.T).to(out_dtype)

    def gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, scale_major_mode, out_dtype, backend):
        assert (scale_major_mode, backend) == ("K", "cutile")
        assert a_scale.is_contiguous()
        return oracle.multiply(a, a_scale, b, b_scale).to(out_dtype)

    flashinfer = SimpleNamespace(__name__="flashinfer")
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    sgl = SimpleNamespace(fp8_blockwise_scaled_mm=fp8_blockwise_scaled_mm)
    monkeypatch.setitem(sys.modules, "sgl_kernel", sgl)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    gemm = SimpleNamespace(gemm_fp8_nt_groupwise=gemm_fp8_nt_groupwise)
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", gemm)
    monkeypatch.setattr(baselines.kernels, "quantise", quantised)


@pytest.mark.parametrize("name", ["deepgemm", "cutlass", "cutile"])
def test_libraries_get_the_layouts_that_they_read(name, monkeypatch):
    fake_libraries(monkeypatch)
    (candidate,) = [c for c in bench.libraries() if c.name == name]
    assert candidate.scales == "fp32"
    this = case(m=5, n=256)
    error = bench.relative_error(candidate.prepare(this)(1), bench.reference(this, 1))
    assert error < candidate.tolerance == 2e-3


def test_a_library_is_listed_where_it_imports_and_the_host_has_none(monkeypatch):
    names = ("deep_gemm", "sgl_kernel", "flashinfer")
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    assert bench.libraries() == []
    fake_libraries(monkeypatch)
    scales = {c.name: c.scales for c in bench.libraries(without={"cutlass"})}
    assert scales == {"deepgemm": "fp32", "cutile": "fp32", "b12x": "ue8m0"}


def test_counters_are_read_from_the_profilers_csv():
    sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
    try:
        import counters
    finally:
        del sys.path[0]
    metrics = list(counters.METRICS.values())
    units = ["ns" if "time" in m else "Mbyte" if "bytes" in m else "%" for m in metrics]

    def row(identity, kernel, nanoseconds):
        values = [nanoseconds if "time" in m else "117.5" for m in metrics]
        return ",".join(f'"{cell}"' for cell in (identity, kernel, *values))

    header = ",".join(f'"{cell}"' for cell in ("ID", "Kernel Name", *metrics))
    unit_row = ",".join(f'"{cell}"' for cell in ("", "", *units))
    lines = [
        "==PROF== Profiling", header, unit_row,
        row("0", "_direct_kernel", "9,000"), row("1", "_quantise_kernel", "1,500"),
        row("2", "_pipelined_kernel", "36,000"),
    ]  # fmt: skip
    found = counters.cases("7168x16384", "4,16", counters.parse("\n".join(lines)))
    assert [(r["kernel"], r["m"], r["us"]) for r in found] == [
        ("_direct_kernel", 4, 9.0), ("_quantise_kernel", 16, 1.5), ("_pipelined_kernel", 16, 36.0),
    ]  # fmt: skip
    assert found[0]["dram_bytes"] == 117.5e6
