"""The oracle itself, against arithmetic that is written differently."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_kt_sm120.backends import reference
from tests.helpers import activation, block_fp8, relative_error


def to_e4m3(value: float) -> float:
    """Round a float to e4m3 (bias 7, 3 mantissa bits, largest 448), ties to even, by hand."""
    size = abs(value)
    if size == 0:
        return 0.0
    exponent = max(math.floor(math.log2(size)), -6)
    step = 2.0 ** (exponent - 3)
    return math.copysign(min(round(size / step) * step, 448.0), value)


def test_quantise_follows_the_rule_element_by_element():
    x = activation(3, 256, torch.bfloat16)
    q, scale = reference.quantise(x)
    for row in range(3):
        for group in range(2):
            values = x[row, group * 128 : group * 128 + 128].float()
            s = torch.tensor(max(values.abs().max().item(), 1e-10)) / torch.tensor(448.0)
            assert scale[row, group] == s
            r = torch.tensor(1.0) / s
            for column, value in enumerate(values):
                code = q[row, group * 128 + column].float().item()
                assert code == to_e4m3((value * r).item())


def test_zero_rows_stay_zero_and_nan_stays_in_its_row():
    x = activation(5, 256)
    x[1] = 0
    x[2, 7] = torch.nan
    x[3, 200] = torch.inf
    weight, weight_scale = block_fp8(192, 256)
    out = reference.run(x, weight, weight_scale, None, torch.bfloat16, None, None)
    assert (out[1] == 0).all()
    assert out[2].isnan().all()
    assert out[3].isnan().all()
    assert out[[0, 4]].isfinite().all()


@pytest.mark.parametrize("n", [8, 16, 576, 300])
def test_multiply_applies_the_scale_of_each_block(n):
    m, k = 5, 384
    weight, scale = block_fp8(n, k)
    q, q_scale = reference.quantise(activation(m, k))
    expected = torch.zeros(m, n, dtype=torch.float64)
    for j in range(n):
        for block in range(k // 128):
            columns = slice(block * 128, block * 128 + 128)
            dot = q[:, columns].double() @ weight[j, columns].double()
            expected[:, j] += dot * q_scale[:, block].double() * scale[j // 128, block].double()
    assert relative_error(reference.multiply(q, q_scale, weight, scale), expected) < 1e-12


def test_quantising_costs_what_e4m3_costs():
    """The dequantised activation is within half a step of the input: 2**-4 of the value."""
    x = activation(64, 1024, torch.float16)
    q, scale = reference.quantise(x)
    back = q.double() * scale.double().repeat_interleave(128, 1)
    group_max = x.double().reshape(64, 8, 128).abs().amax(-1).repeat_interleave(128, 1)
    bound = torch.maximum(x.double().abs() * 2**-4, group_max / 448 * 2**-9) * 1.001
    assert ((back - x.double()).abs() <= bound).all()
