"""Every kernel under Triton's interpreter, against float64. test_kernels.py runs this file.

It is a pytest file of its own process: the interpreter must be on before triton is imported.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import interpreter

interpreter.enable(repair=os.environ.get("CASTS", "repaired") == "repaired")

import torch  # noqa: E402

from sglang_kt_sm120 import heuristic, kernels  # noqa: E402
from sglang_kt_sm120.backends import triton as backend  # noqa: E402

DEVICE = SimpleNamespace(capability=(12, 0), sm_count=188, shared_bytes=101376)
SMALL = SimpleNamespace(capability=(12, 0), sm_count=2, shared_bytes=101376)
BF16_ERROR = 2e-3
FP16_ERROR = 3e-4

VARIANTS = {
    name: value for name, value in vars(heuristic).items() if isinstance(value, heuristic.Config)
}


def quantised(x):
    """The stated rule in torch: (codes, scales)."""
    groups = x.float().view(x.shape[0], -1, 128)
    scales = groups.abs().amax(-1).clamp(min=1e-10) / 448.0
    codes = (groups * (1.0 / scales)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(x.shape), scales


def product(codes, scales, weight, weight_scale):
    """float64 product of quantised operands."""
    n = weight.shape[0]
    x = codes.double() * scales.double().repeat_interleave(128, 1)
    rows = weight_scale.double().repeat_interleave(128, 0)[:n]
    return x @ (weight.double() * rows.repeat_interleave(128, 1)).T


def operands(m, n, k, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed + 1000 * m + n + k)
    x = torch.randn(m, k, generator=generator).to(dtype)
    weight = (torch.randn(n, k, generator=generator) * 60).to(torch.float8_e4m3fn)
    scale = torch.rand((n + 127) // 128, k // 128, generator=generator) * 0.02 + 1e-3
    return x, weight, scale


def error(out, expected):
    assert not out.isnan().any()
    return float((out.double() - expected).norm() / expected.norm())


def run(x, weight, weight_scale, config, x_scale=None, dtype=torch.bfloat16):
    """Run a config with counters that must be zero again afterwards."""
    counters = torch.zeros(4096, dtype=torch.int32)
    out = backend.run(x, weight, weight_scale, x_scale, dtype, config, counters)
    assert out.shape == (x.shape[0], weight.shape[0])
    assert out.dtype == dtype
    assert not counters.any(), "a launch must leave the counters zero"
    return out


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """torch.empty returns NaN, so a read of unwritten memory shows."""
    empty = torch.empty

    def poison(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(7)

    monkeypatch.setattr(torch, "empty", poison)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("column_major", [False, True])
def test_quantisation_is_bit_identical_to_the_rule(dtype, column_major):
    x = torch.randn(5, 2304) * torch.logspace(-6, 3, 5)[:, None]
    x[2, 128:256] = 0
    x[3, 0] = 448.0
    x = x.to(dtype)
    codes, scales = kernels.quantise(x, column_major=column_major)
    expected_codes, expected_scales = quantised(x)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    assert scales.stride() == ((1, 5) if column_major else (18, 1))


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize(("n", "k"), [(16, 128), (136, 640)])
def test_every_variant(name, n, k):
    variant = VARIANTS[name]
    steps = -(-k // (128 * variant.unroll))
    for m in {3, min(variant.block_m, 33)}:
        x, weight, scale = operands(m, n, k)
        codes, x_scale = quantised(x)
        expected = product(codes, x_scale, weight, scale)
        for splits in {1, min(3, steps)}:
            if variant.kernel == "tiled":
                config = replace(variant, split_order=splits if variant.split_order else 0)
            else:
                config = replace(variant, splits=splits)
            assert error(run(x, weight, scale, config), expected) < BF16_ERROR
            if config.kernel == "direct":
                continue
            quantised_config = replace(config, fused=False)
            out = run(codes, weight, scale, quantised_config, x_scale=x_scale)
            assert error(out, expected) < BF16_ERROR
            if splits == 1:
                column_major = x_scale.t().contiguous().t()
                again = run(codes, weight, scale, quantised_config, x_scale=column_major)
                assert torch.equal(out, again)


@pytest.mark.parametrize("m", [1, 2, 7, 16, 33, 64, 65, 129])
@pytest.mark.parametrize("device", [DEVICE, SMALL], ids=["188", "2"])
def test_chosen_configs(m, device):
    x, weight, scale = operands(m, 144, 384)
    codes, x_scale = quantised(x)
    expected = product(codes, x_scale, weight, scale)
    for deterministic in (False, True):
        for prequantised in (False, True):
            problem = SimpleNamespace(
                m=m, n=144, k=384, prequantised=prequantised, deterministic=deterministic
            )
            config = heuristic.config_for(problem, device)
            given = (codes, weight, scale, config, x_scale) if prequantised else None
            out = run(*given) if given else run(x, weight, scale, config)
            assert error(out, expected) < BF16_ERROR


def test_fp16_output():
    x, weight, scale = operands(4, 256, 512, torch.float16)
    codes, x_scale = quantised(x)
    config = replace(heuristic.WIDE8, splits=2)
    out = run(x, weight, scale, config, dtype=torch.float16)
    assert error(out, product(codes, x_scale, weight, scale)) < FP16_ERROR


def test_deterministic_rows_do_not_depend_on_m():
    x, weight, scale = operands(70, 144, 640)
    first = None
    for m in (1, 16, 17, 64, 70):
        problem = SimpleNamespace(m=m, n=144, k=640, prequantised=False, deterministic=True)
        config = heuristic.config_for(problem, DEVICE)
        row = run(x[:m], weight, scale, config)[0]
        first = row if first is None else first
        assert torch.equal(row, first), m


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["WIDE8", "NARROW16", "ROWS16", "ROWS32", "MEDIUM", "FIXED16"])
def test_a_bad_row_is_nan_and_alone(name, bad):
    x, weight, scale = operands(5, 144, 512)
    clean = run(x, weight, scale, VARIANTS[name])
    x[3, 200] = bad
    out = run(x, weight, scale, VARIANTS[name])
    assert out[3].isnan().all()
    others = [0, 1, 2, 4]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("name", ["FUSED16", "ROWS32", "MEDIUM"])
def test_integers_with_power_of_two_scales_are_exact(name):
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(-4, 5, (3, 512), generator=generator).to(torch.float8_e4m3fn)
    weight = torch.randint(-4, 5, (144, 512), generator=generator).to(torch.float8_e4m3fn)
    x_scale = 2.0 ** torch.randint(-3, 4, (3, 4), generator=generator)
    scale = 2.0 ** torch.randint(-3, 4, (2, 4), generator=generator)
    config = replace(VARIANTS[name], fused=False)
    out = run(codes, weight, scale, config, x_scale=x_scale)
    expected = product(codes, x_scale, weight, scale)
    assert torch.equal(out, expected.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["WIDE8", "NARROW8", "SHORT8", "NARROW16", "FUSED16", "FIXED16"])
def test_integers_are_exact_where_the_kernel_quantises(name):
    """Each group's maximum is 448 times a power of two, so that its scale and codes are exact."""
    generator = torch.Generator().manual_seed(6)
    codes = torch.randint(-4, 5, (3, 512), generator=generator).float()
    codes[:, ::128] = 448
    x_scale = 2.0 ** torch.randint(-3, 4, (3, 4), generator=generator)
    weight = torch.randint(-4, 5, (144, 512), generator=generator).to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-3, 4, (2, 4), generator=generator)
    x = codes * x_scale.repeat_interleave(128, 1)
    out = run(x.bfloat16(), weight, scale, VARIANTS[name])
    expected = product(codes.to(torch.float8_e4m3fn), x_scale, weight, scale)
    assert torch.equal(out, expected.to(torch.bfloat16))


@pytest.mark.parametrize(("x_size", "scale_size"), [(1e30, 1e-30), (1e-8, 1e30), (1e8, 1e-20)])
def test_extreme_scales(x_size, scale_size):
    x, weight, scale = operands(3, 144, 256)
    x, scale = x * x_size, scale * scale_size
    codes, x_scale = quantised(x)
    expected = product(codes, x_scale, weight, scale)
    for name in ("WIDE8", "ROWS16", "MEDIUM"):
        assert error(run(x, weight, scale, VARIANTS[name]), expected) < BF16_ERROR


def test_column_slices_and_zero_rows():
    wide, weight, scale = operands(6, 144, 1024)
    x = wide[:, 256:768]
    x[2] = 0
    weight = weight[:, :512].contiguous()
    scale = scale[:, :4].contiguous()
    codes, x_scale = quantised(x.contiguous())
    expected = product(codes, x_scale, weight, scale)
    for name in ("WIDE8", "NARROW16", "ROWS16", "LARGE"):
        out = run(x, weight, scale, VARIANTS[name])
        assert error(out, expected) < BF16_ERROR
        assert not out[2].any()
