"""Whether one of the host's kernels is right on a layer's shape, found out on a random layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from sglang_kt_sm120 import limits
from sglang_kt_sm120.backends import reference
from sglang_kt_sm120.backends.cutlass import libraries

#: Odd, so that padding takes part: a decode M, and one for each tile that a kernel may change to.
PROBE_MS = (1, 129, 257)
#: Per 128 columns, against float64 on the same operands. Rounding to bf16 alone is 1.65e-3; one
#: wrong column in a block of 128 is 8e-2 and more.
TOLERANCE = 3e-3
CHUNK = 512  # weight rows in float64 at a time: 75 MB at K = 18432


def describe(error: Exception) -> str:
    """Return an error as one line: its type and the first two lines that it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


def judge(
    product: libraries.Product,
    name: str,
    device: torch.device,
    n: int,
    k: int,
    dtype: torch.dtype,
    arch: str | None = None,
) -> str | None:
    """Return None where `product` is right on a random `[n, k]` layer, else why not.

    The layer is random and seeded, not the one being loaded: a host may load placeholders first,
    and every rank should come to the same verdict.

    Args:
        product: The kernel, as libraries.py describes it.
        name: Its name in limits.py, which says what layout and rows it wants.
        device, n, k, dtype: Where, the weight's shape, the dtype of activation and output.
        arch: Triton's launch option for our quantisation kernel, or None.
    """
    try:
        here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with here, torch.inference_mode():
            layer = _layer(n, k, device, limits.NAMES.index(name))
            for m in PROBE_MS:
                why = _compare(product, limits.BY_NAME[name], layer, m, dtype, arch)
                if why:
                    return why
            return None
    except Exception as error:  # a failing JIT, a missing symbol, "Error Internal": all the same
        return describe(error)


def _layer(n: int, k: int, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight of all e4m3 values but NaN, and scales; built in parts, to spare memory.

    Each kernel has a layer of its own: what one left in memory is not another's answer.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.empty((n, k), dtype=torch.uint8, device=device)
    for part in weight.split(CHUNK):
        part.random_(0, 256, generator=generator)
        part.masked_fill_((part & 0x7F) == 0x7F, 0)
    scale = (
        torch.rand(n // 128, k // 128, dtype=torch.float32, device=device, generator=generator)
        + 0.1
    )
    return weight.view(torch.float8_e4m3fn), scale / (448 * k**0.5)


def _compare(product, kernel: limits.Kernel, layer, m: int, dtype, arch) -> str | None:
    from sglang_kt_sm120 import kernels  # wants triton, which a machine without a GPU may lack

    weight, scale = layer
    (n, k), device = weight.shape, weight.device
    generator = torch.Generator(device).manual_seed(m)
    x = torch.randn(m, k, dtype=torch.float32, device=device, generator=generator).to(dtype)
    rows = kernel.padded(m)
    codes, scales = kernels.quantise(
        x, column_major=kernel.column_major, rows=rows, options={"arch": arch} if arch else {}
    )
    _poison(rows, n, dtype, device)
    out = product(codes, weight, scales, scale, dtype)
    if out.shape != (rows, n) or out.dtype is not dtype:
        return f"its output is {out.dtype} {list(out.shape)}, expected {dtype} {[rows, n]}"
    worst = 0.0
    for error in _errors(out[:m], codes[:m], scales[:m], weight, scale):
        worst = error if not error <= worst else worst  # NaN is worst
    if worst <= TOLERANCE:
        return None
    return f"relative error {worst:.1e} on M={m} (allowed {TOLERANCE:.0e})"


def _poison(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """Leave NaN in the memory that the allocator hands on next for an output of this size.

    A kernel that writes nothing then gives NaN, not the right answer of an earlier call. Three
    times, because sgl-kernel allocates two outputs of this size and uses the second.
    """
    poisoned = [torch.full((rows, n), torch.nan, dtype=dtype, device=device) for _ in range(3)]
    del poisoned


def _errors(out, codes, scales, weight, weight_scale) -> Iterator[float]:
    """Yield the relative error of each 128 columns; NaN anywhere among them makes it NaN."""
    for first in range(0, weight.shape[0], CHUNK):
        chunk = slice(first, first + CHUNK)
        blocks = slice(first // 128, (first + CHUNK) // 128)
        expected = reference.multiply(codes, scales, weight[chunk], weight_scale[blocks])
        wrong = (out[:, chunk].double() - expected).unflatten(1, (-1, 128))
        size = expected.unflatten(1, (-1, 128)).norm(dim=(0, 2))
        yield from (wrong.norm(dim=(0, 2)) / size).tolist()
