"""The host's own CUTLASS linear, taken as it is where it is proven on the real layer.

sglang-kt from 0.7.0 and sglang from 0.5.16 serve SM120 with a JIT-built CUTLASS kernel by default.
For prefill that default stands until a tuned table for the GPU says otherwise, so that installing
this package never slows a server down. `offer` takes the host's function, `probe` compares it at
load with float arithmetic on a random layer of the same shape, and only then may `run` be chosen.
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
_verdicts: dict[tuple, str | None] = {}  # (device, n, k, dtype) -> why not


def offer(linear: Callable) -> None:
    """Take the host's linear function, which quantises, pads and multiplies by itself."""
    global _linear
    _linear = linear


def why_not(index: int | None, n: int, k: int, dtype: torch.dtype) -> str | None:
    """Return None where the host's function was proven on this layer shape, else the reason."""
    return _verdicts.get((index, n, k, dtype), "not proven on this shape: no probe has run here")


def probe(device: torch.device, n: int, k: int, dtype: torch.dtype) -> bool:
    """Run the host's function once on a random layer of this shape; its verdict holds from then on.

    Called at load, never during capture. One warning where the function fails or is wrong. The
    layer is random and seeded, not the one being loaded: a host may load placeholders first, and
    ranks should come to the same verdict. Returns True where a verdict was reached just now.
    """
    key = (device.index, n, k, dtype)
    if _linear is None or key in _verdicts or device.type != "cuda" or n % 128 or k % 128:
        return False
    _verdicts[key] = judge(device, n, k, dtype)
    if _verdicts[key]:
        logger.warning(
            "%s is not used for N=%d K=%d: %s; our Triton kernels serve prefill too.",
            getattr(_linear, "__name__", _linear), n, k, _verdicts[key],
        )  # fmt: skip
    return True


def judge(device: torch.device, n: int, k: int, dtype: torch.dtype) -> str | None:
    """Return None where the host's function is right on a random `[n, k]` layer, else why not."""
    try:
        return _compare(device, n, k, dtype)
    except Exception as error:  # a failing JIT, a missing symbol, "Error Internal": all the same
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _compare(device: torch.device, n: int, k: int, dtype: torch.dtype) -> str | None:
    from sglang_kt_sm120.backends import reference

    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(PROBE_M, k, device=device, generator=generator).to(dtype)
    weight = torch.randint(0, 256, (n, k), device=device, generator=generator, dtype=torch.uint8)
    weight[(weight & 0x7F) == 0x7F] = 0  # the two NaNs of e4m3
    weight = weight.view(torch.float8_e4m3fn)
    scale = torch.rand(n // 128, k // 128, device=device, generator=generator) + 0.1
    scale /= 448 * k**0.5
    # Memory that a kernel leaves unwritten holds NaN: the allocator hands this on.
    poison = torch.full((PROBE_M + 3, n), torch.nan, dtype=dtype, device=device)
    del poison
    got = run(x, weight, scale, None, dtype, None, None).float()
    if got.shape != (PROBE_M, n):
        return f"its output is {list(got.shape)}, expected {[PROBE_M, n]}"
    q, q_scale = reference.quantise(x)
    worst = 0.0
    for first in sorted({0, n // 2 // 128 * 128, n - 128, *range(0, n, -(-n // 4 // 128) * 128)}):
        rows = slice(first, first + 128)  # one block of scales; NaN anywhere makes the error NaN
        part = scale[first // 128 : first // 128 + 1]
        expected = reference.multiply(q, q_scale, weight[rows], part, torch.float32)
        error = ((got[:, rows] - expected).norm() / expected.norm()).item()
        worst = error if not error <= worst else worst
    if worst <= PROBE_TOLERANCE and bool(got.isfinite().all()):
        return None
    return f"relative error {worst:.1e} on M={PROBE_M} (allowed {PROBE_TOLERANCE:.0e})"


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
