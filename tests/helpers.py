"""What several tests share: random block-FP8 layers and how wrong a result is."""

from __future__ import annotations

import torch

#: Relative Frobenius norm; output rounding alone gives 1.65e-3 (bf16) and 2.1e-4 (fp16).
TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 3e-4}
#: Half a unit in the last place: what one rounding of the output may change in an element.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
#: Of the largest output: what fp32 accumulation in another order may change in an element.
ACCUMULATION = 2e-5


def block_fp8(n: int, k: int, *, seed: int | None = None, device: str = "cpu"):
    """Return a fresh random e4m3 weight `[n, k]` and fp32 scales `[ceil(n/128), ceil(k/128)]`."""
    generator = torch.Generator(device)
    generator.manual_seed(torch.seed() % 2**31 if seed is None else seed)
    weight = torch.randn(n, k, generator=generator, device=device).to(torch.float8_e4m3fn)
    shape = -(-n // 128), -(-k // 128)
    scale = torch.rand(shape, generator=generator, device=device, dtype=torch.float32)
    return weight, scale + 0.01


def activation(m: int, k: int, dtype=torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    """Return a fresh random `[m, k]` activation whose rows and columns differ in size."""
    x = torch.randn(m, k, device=device) * torch.rand(m, 1, device=device).exp2()
    return (x * (1 + torch.rand(1, k, device=device))).to(dtype)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||got - expected|| / ||expected|| in float64; NaN where anything is NaN."""
    got, expected = got.double(), expected.double()
    return ((got - expected).norm() / expected.norm()).item()


def assert_right(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless `got` is the float64 product `expected`, rounded once to got's dtype.

    Element by element, and as a whole where there are enough elements for the norm to mean
    something (over fewer, the rounding errors of a few large ones decide it).
    """
    assert got.shape == expected.shape
    difference = (got.double() - expected).abs()
    bound = ROUNDING[got.dtype] * expected.abs() + ACCUMULATION * expected.abs().max()
    worst = (difference / bound).argmax().item()
    assert (difference <= bound).all(), (
        f"element {divmod(worst, got.shape[1])}: {got.flatten()[worst].item()} against "
        f"{expected.flatten()[worst].item()}"
    )
    if got.numel() >= 4096:
        assert relative_error(got, expected) < TOLERANCE[got.dtype]
