"""Plain torch: the oracle of the tests, and what serves where there is no CUDA device."""

from __future__ import annotations

import torch

NAME = "reference"
E4M3_MAX = 448.0
GROUP = 128


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise per row and 128 columns, by the rule of sglang's row-major Triton kernel.

    a = max(absmax, 1e-10); s = a / 448; r = 1 / s; q = e4m3(clamp(x * r, -448, 448)), all in fp32,
    divisions correctly rounded, q to nearest even.

    Args:
        x: `[M, K]`, K a multiple of 128, any float dtype.

    Returns:
        e4m3 `[M, K]` and fp32 scales `[M, K/128]`. A group that holds NaN or Inf has scale NaN, so
        that its whole output row is NaN and no other row changes.
    """
    m, k = x.shape
    groups = x.float().reshape(m, k // GROUP, GROUP)
    absmax = groups.abs().amax(-1)
    # By a tensor: CUDA divides by a Python number through its rounded reciprocal.
    scale = absmax.clamp_min(1e-10) / torch.full_like(absmax, E4M3_MAX)
    codes = (groups * (1.0 / scale)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    scale = torch.where(absmax.isfinite(), scale, torch.nan)
    return codes.nan_to_num().to(torch.float8_e4m3fn).reshape(m, k), scale


def dequantise_weight(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the `[N, K]` weight times its 128 x 128 block scales, in `dtype`."""
    n, k = weight.shape
    full = scale.to(dtype).repeat_interleave(GROUP, 0)[:n].repeat_interleave(GROUP, 1)[:, :k]
    return weight.to(dtype) * full


def multiply(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    accumulate: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Multiply quantised operands in `accumulate` precision; the result is `[M, N]`, unrounded."""
    x = q.to(accumulate) * q_scale.to(accumulate).repeat_interleave(GROUP, 1)
    return x @ dequantise_weight(weight, weight_scale, accumulate).t()


def run(x, weight, weight_scale, x_scale, out_dtype, config, counters, *, arch=None, pdl=False):
    """Serve one product (see backends/__init__.py); fp32 accumulation, one rounding at the end."""
    q, q_scale = (x, x_scale) if x_scale is not None else quantise(x)
    return multiply(q, q_scale, weight, weight_scale, torch.float32).to(out_dtype)
