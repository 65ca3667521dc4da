"""Weight scales that are not fp32 are converted exactly, or refused."""

from __future__ import annotations

import pytest
import torch

from sglang_kt_sm120 import scales


def packed(exponents: torch.Tensor, n: int) -> torch.Tensor:
    """Pack exponent bytes [blocks, kblocks] as DeepGEMM does: int32 [n, ceil(kblocks / 4)]."""
    rows = exponents.repeat_interleave(128, 0)[:n]
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4))
    words = rows.contiguous().view(torch.int32)
    return words.t().contiguous().t()  # MN-major, as DeepGEMM keeps it


def test_fp32_is_returned_as_it_is():
    scale = torch.rand(3, 2)
    assert scales.to_fp32(scale, 300, 256) is scale


@pytest.mark.parametrize(("n", "k"), [(256, 512), (300, 640), (2112, 7168)])
def test_packed_exponents_become_powers_of_two(n, k):
    exponents = torch.randint(0, 255, (-(-n // 128), k // 128)).to(torch.uint8)
    exponents[0, 0], exponents[0, 1] = 0, 254
    expected = 2.0 ** (exponents.double() - 127)
    got = scales.to_fp32(packed(exponents, n), n, k)
    assert got.dtype is torch.float32
    assert torch.equal(got.double(), expected)


def test_e8m0_becomes_powers_of_two():
    exponents = torch.randint(0, 255, (3, 2)).to(torch.uint8)
    got = scales.to_fp32(exponents.view(torch.float8_e8m0fnu), 300, 256)
    assert torch.equal(got.double(), 2.0 ** (exponents.double() - 127))


def test_rows_that_differ_inside_a_block_are_refused():
    words = packed(torch.full((2, 4), 127, dtype=torch.uint8), 256).clone()
    words[5, 0] += 1
    with pytest.raises(ValueError, match=r"differ inside a block"):
        scales.to_fp32(words, 256, 512)


@pytest.mark.parametrize(
    "scale",
    [
        torch.rand(2, 3),
        torch.rand(3, 2).half(),
        torch.ones(300, 2, dtype=torch.int32),
        torch.full((3, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    ],
    ids=["shape", "fp16", "packed shape", "NaN exponent"],
)
def test_anything_else_is_refused_with_the_layer(scale):
    with pytest.raises(ValueError, match=r"\[300, 256\]"):
        scales.to_fp32(scale, 300, 256)
