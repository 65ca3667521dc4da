"""The host's own CUTLASS linear, taken as it is where it is proven on the real layer.

sglang-kt from 0.7.0 and sglang from 0.5.16 serve SM120 with a JIT-built CUTLASS kernel by default.
For prefill that default stands until a tuned table for the GPU says otherwise, so that installing
this package never slows a server down. `offer` takes the host's function, `probe` compares it with
ours on the layer's own weight at load, and only then may `run` be chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger("sglang_kt_sm120")
NAME = "cutlass"
PROBE_M = 129  # odd: the host's kernel sends M % 4 != 0 elsewhere, so rows are padded here
#: bf16 rounding alone is 1.65e-3; the host quantises by another rounding of the same rule.
PROBE_TOLERANCE = 5e-3

_linear: Callable | None = None
_verdicts: dict[tuple[int | None, int, int], str | None] = {}  # (device, n, k) -> why not


def offer(linear: Callable) -> None:
    """Take the host's linear function, which quantises, pads and multiplies by itself."""
    global _linear
    _linear = linear


def why_not(index: int | None, n: int, k: int) -> str | None:
    """Return None where the host's function was proven on this layer shape, else the reason."""
    return _verdicts.get((index, n, k), "not proven on this layer: no probe has run here")


def probe(weight: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Run the host's function once on this weight and compare; the verdict holds for its shape.

    Called at load, never during capture. One warning where the host's function fails or is wrong.
    Returns True where a verdict was reached just now.
    """
    n, k = weight.shape
    key = (weight.device.index, n, k)
    if _linear is None or key in _verdicts or not weight.is_cuda or n % 128 or k % 128:
        return False
    _verdicts[key] = judge(weight, weight_scale)
    if _verdicts[key]:
        logger.warning(
            "%s is not used for N=%d K=%d: %s; our Triton kernels serve prefill too.",
            getattr(_linear, "__name__", _linear), n, k, _verdicts[key],
        )  # fmt: skip
    return True


def judge(weight: torch.Tensor, weight_scale: torch.Tensor) -> str | None:
    """Return None where the host's function multiplies by this weight rightly, else why not."""
    try:
        return _compare(weight, weight_scale)
    except Exception as error:  # a failing JIT, a missing symbol, "Error Internal": all the same
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _compare(weight: torch.Tensor, weight_scale: torch.Tensor) -> str | None:
    from sglang_kt_sm120.backends import reference

    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(
        PROBE_M, weight.shape[1], device=weight.device, dtype=torch.bfloat16, generator=generator
    )
    q, scale = reference.quantise(x)
    expected = reference.multiply(q, scale, weight, weight_scale, torch.float32)
    # Memory that a kernel leaves unwritten holds NaN now: the allocator hands it on.
    del_me = torch.full((PROBE_M + 3, weight.shape[0]), torch.nan, dtype=x.dtype, device=x.device)
    del del_me
    got = run(x, weight, weight_scale, None, x.dtype, None, None).float()
    error = ((got - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    if error <= PROBE_TOLERANCE:  # NaN, as unwritten output may be, is not
        return None
    return f"relative error {error:.1e} on M={PROBE_M} (allowed {PROBE_TOLERANCE:.0e})"


def run(x, weight, weight_scale, x_scale, out_dtype, config, counters, *, arch=None, pdl=False):
    """Call the host's function (see backends/__init__.py); x_scale must be None.

    Rows are padded to a multiple of 4: sglang-kt 0.7's kernel runs any other M on its decode tile,
    which reads the weight several times as often.
    """
    m = x.shape[0]
    x = torch.nn.functional.pad(x, (0, 0, 0, -m % 4)) if m % 4 else x.contiguous()
    out = _linear(
        input=x, weight=weight, block_size=[128, 128], weight_scale=weight_scale,
        input_scale=None, bias=None,
    )  # fmt: skip
    return out[:m]
