"""The kernels on a GPU against float64: every M class, tails, odd layouts, NaN, reproducibility.

On SM12x they run natively; elsewhere with Triton's `arch="sm120"`, the lowering that SM12x gets.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from sglang_kt_sm120 import bench, heuristic, kernels
from sglang_kt_sm120.backends import triton as backend

PROPERTIES = torch.cuda.get_device_properties(0)
CAPABILITY = (PROPERTIES.major, PROPERTIES.minor)
ARCH = None if CAPABILITY == (12, 0) else "sm120"
DEVICE = SimpleNamespace(
    capability=CAPABILITY,
    sm_count=PROPERTIES.multi_processor_count,
    shared_bytes=getattr(PROPERTIES, "shared_memory_per_block_optin", 101376),
)
TARGET = SimpleNamespace(capability=(12, 0), sm_count=188, shared_bytes=101376)
ERROR = {torch.bfloat16: 2e-3, torch.float16: 3e-4}
ROWS = (1, 2, 3, 5, 7, 8, 9, 16, 17, 33, 64, 65, 83, 127, 128, 129, 777, 4097)
SHAPES = ((8, 256), (1536, 18432), *((n, k) for n in (16, 576, 2112, 7168)
          for k in (128, 256, 7168, 18432)))  # fmt: skip


def operands(m, n, k, dtype=torch.bfloat16):
    x = torch.randn(m, k, device="cuda").to(dtype)
    weight = (torch.randn(n, k, device="cuda") * 60).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-n // 128), k // 128, device="cuda") * 0.02 + 1e-3
    return x, weight, scale


def expected(x, weight, scale):
    case = bench.Case("", *x.shape[:1], *weight.shape, x, [weight], [scale], scale)
    return bench.reference(case, 0)


def poison():
    """Leave NaN in the memory that the next allocations get."""
    torch.full((64 << 20,), float("nan"), device="cuda")


def run(x, weight, scale, config, x_scale=None, dtype=None, pdl=True, counters=None):
    if counters is None:
        counters = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    poison()
    out = backend.run(
        x, weight, scale, x_scale, dtype or x.dtype, config, counters, arch=ARCH, pdl=pdl
    )
    assert not counters.any(), "a launch must leave the counters zero"
    return out


def choose(m, n, k, device=DEVICE, prequantised=False, deterministic=False):
    problem = SimpleNamespace(m=m, n=n, k=k, prequantised=prequantised, deterministic=deterministic)
    return heuristic.config_for(problem, device)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_against_float64(n, k, dtype):
    for m in ROWS:
        x, weight, scale = operands(m, n, k, dtype)
        truth = expected(x, weight, scale)
        codes, x_scale = kernels.quantise(x)
        # The rounding of a handful of outputs alone can exceed its mean.
        limit = ERROR[dtype] * (1 if m * n >= 1000 else 1.5)
        for device in (DEVICE, TARGET):
            out = run(x, weight, scale, choose(m, n, k, device))
            error = bench.relative_error(out, truth)
            assert error <= limit, (m, n, k, error)
            # Elementwise: output rounding, plus fp32 accumulation over the row's magnitude.
            step = 2**-8 if dtype == torch.bfloat16 else 2**-11
            size = truth.abs().mean() + truth.abs()
            assert ((out.double() - truth).abs() <= step * truth.abs() + 1e-4 * size).all()
        config = choose(m, n, k, prequantised=True)
        out = run(codes, weight, scale, config, x_scale, dtype)
        assert bench.relative_error(out, truth) <= limit, (m, n, k, "quantised")
        config = choose(m, n, k, deterministic=True)
        out = run(x, weight, scale, config, pdl=False)
        assert bench.relative_error(out, truth) <= limit, (m, n, k, "deterministic")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantisation_is_bit_identical_to_the_rule(dtype):
    x = torch.randn(83, 7168, device="cuda") * torch.logspace(-6, 3, 83, device="cuda")[:, None]
    x[3] = 0
    x = x.to(dtype)
    codes, scales = kernels.quantise(x, column_major=True, options={"launch_pdl": True})
    groups = x.float().view(83, -1, 128)
    absmax = groups.abs().amax(-1).clamp(min=1e-10)
    expected_scales = absmax / torch.full_like(absmax, 448.0)
    scaled = groups * (1.0 / expected_scales)[..., None]
    expected_codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(83, -1)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))


@pytest.mark.parametrize("m", [1, 8, 16, 64, 129])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_row_is_nan_and_alone(m, bad):
    x, weight, scale = operands(m, 2112, 1024)
    config = choose(m, 2112, 1024)
    clean = run(x, weight, scale, config)
    x[m - 1, 700] = bad
    out = run(x, weight, scale, config)
    assert out[m - 1].isnan().all()
    assert torch.equal(out[: m - 1], clean[: m - 1])


@pytest.mark.parametrize("m", [1, 8, 16, 33, 129])
@pytest.mark.parametrize(("n", "k"), [(2112, 1024), (4096, 7168), (7168, 7168)])
def test_integers_are_exact_where_the_kernel_quantises(n, k, m):
    """Each group's maximum is 448 times a power of two, so that its scale and codes are exact."""
    codes = torch.randint(-4, 5, (m, k), device="cuda").float()
    codes[:, ::128] = 448
    x_scale = 2.0 ** torch.randint(-3, 4, (m, k // 128), device="cuda")
    x = codes * x_scale.repeat_interleave(128, 1)
    weight = torch.randint(-4, 5, (n, k), device="cuda").to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-3, 4, (-(-n // 128), k // 128), device="cuda")
    rows = scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    truth = x.double() @ (weight.double() * rows).T
    assert torch.equal(x.bfloat16().float(), x)
    out = run(x.bfloat16(), weight, scale, choose(m, n, k))
    assert torch.equal(out, truth.to(torch.bfloat16))


@pytest.mark.parametrize("m", [2, 8, 16, 64, 130])
@pytest.mark.parametrize(("n", "k"), [(576, 512), (7168, 7168)])
def test_a_zero_row_is_zero(n, k, m):
    x, weight, scale = operands(m, n, k)
    x[m - 1] = 0
    out = run(x, weight, scale, choose(m, n, k))
    assert not out[m - 1].any()
    assert bench.relative_error(out, expected(x, weight, scale)) <= 2e-3


@pytest.mark.parametrize("m", [1, 16, 33, 129])
def test_integers_with_power_of_two_scales_are_exact(m):
    codes = torch.randint(-4, 5, (m, 1024), device="cuda").to(torch.float8_e4m3fn)
    weight = torch.randint(-4, 5, (2112, 1024), device="cuda").to(torch.float8_e4m3fn)
    x_scale = 2.0 ** torch.randint(-3, 4, (m, 8), device="cuda")
    scale = 2.0 ** torch.randint(-3, 4, (17, 8), device="cuda")
    x = codes.double() * x_scale.double().repeat_interleave(128, 1)
    rows = scale.double().repeat_interleave(128, 0)[:2112]
    truth = x @ (weight.double() * rows.repeat_interleave(128, 1)).T
    config = choose(m, 2112, 1024, prequantised=True)
    out = run(codes, weight, scale, config, x_scale, torch.bfloat16)
    assert torch.equal(out, truth.to(torch.bfloat16))


@pytest.mark.parametrize("m", [3, 16, 65])
def test_extreme_scales(m):
    for x_size, scale_size in ((1e30, 1e-30), (1e-8, 1e30), (1e8, 1e-20)):
        x, weight, scale = operands(m, 576, 512)
        x, scale = (x.float() * x_size).bfloat16(), scale * scale_size
        out = run(x, weight, scale, choose(m, 576, 512))
        assert bench.relative_error(out, expected(x, weight, scale)) <= 2e-3


@pytest.mark.parametrize("m", [1, 5, 16, 40, 130])
def test_slices_and_misaligned_rows(m):
    wide, weight, scale = operands(m, 576, 2048)
    weight, scale = weight[:, :512].contiguous(), scale[:, :4].contiguous()
    config = choose(m, 576, 512)
    odd = torch.randn(m * 2051 + 1, device="cuda").bfloat16()[1:].view(m, 2051)[:, 3:515]
    for x in (wide[:, 512:1024], odd):
        assert (
            bench.relative_error(
                run(x, weight, scale, config), expected(x.contiguous(), weight, scale)
            )
            <= 2e-3
        )


@pytest.mark.parametrize(
    ("n", "k"), [(2112, 7168), (7168, 2048), (576, 7168), (4096, 7168), (7168, 7168)]
)
def test_repeated_runs_are_bit_identical(n, k):
    for m in (1, 8, 16, 32, 64, 100):
        x, weight, scale = operands(m, n, k)
        config = choose(m, n, k)
        counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
        outs = [
            backend.run(x, weight, scale, None, x.dtype, config, counters, arch=ARCH, pdl=True)
            for _ in range(50)
        ]
        without = backend.run(x, weight, scale, None, x.dtype, config, None, arch=ARCH, pdl=False)
        assert all(torch.equal(outs[0], out) for out in outs)
        assert torch.equal(outs[0], without)
        assert not counters.any()


@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (576, 2048)])
def test_deterministic_rows_do_not_depend_on_m(n, k):
    x, weight, scale = operands(257, n, k)
    first = None
    for m in (*range(1, 70), 127, 128, 129, 200, 255, 256, 257):
        config = choose(m, n, k, deterministic=True)
        row = run(x[:m], weight, scale, config)[0].clone()
        first = row if first is None else first
        assert torch.equal(row, first), m


def test_outputs_beyond_two_billion_elements():
    m, n, k = 60000, 36864, 128
    x, weight, scale = operands(m, n, k)
    out = run(x, weight, scale, choose(m, n, k))
    for rows in (slice(0, 64), slice(58000, 58300), slice(m - 64, m)):
        assert bench.relative_error(out[rows], expected(x[rows], weight, scale)) <= 2e-3
