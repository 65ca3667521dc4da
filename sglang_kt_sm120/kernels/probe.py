"""Two small products that tell what this Triton's compiler can do. Never launched."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _probe_kernel(
    a,  # [M, 128] e4m3
    b,  # [N, 128] e4m3
    out,  # [M, N] fp32
    M: tl.constexpr,
    N: tl.constexpr,
    UNIT_SCALED: tl.constexpr,
):
    k = tl.arange(0, 128)[None, :]
    first = tl.load(a + tl.arange(0, M)[:, None] * 128 + k)
    second = tl.trans(tl.load(b + tl.arange(0, N)[:, None] * 128 + k))
    if UNIT_SCALED:
        a_ones = tl.full([M, 4], 127, dtype=tl.uint8)
        b_ones = tl.full([N, 4], 127, dtype=tl.uint8)
        product = tl.dot_scaled(first, a_ones, "e4m3", second, b_ones, "e4m3")
    else:
        product = tl.dot(first, second)
    tl.store(out + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], product)


def probe(m: int, n: int, unit_scaled: bool = False, options: dict | None = None, *, through):
    """Launch an [m, 128] x [n, 128]^T product of e4m3 through what `through` makes of the kernel.

    Raises:
        Whatever Triton raises where it has no such product.
    """
    import torch

    a, b = (torch.empty(size, 128, dtype=torch.float8_e4m3fn, device="meta") for size in (m, n))
    out = torch.empty(m, n, dtype=torch.float32, device="meta")
    through(_probe_kernel)[(1,)](
        a, b, out, M=m, N=n, UNIT_SCALED=unit_scaled, num_warps=4, **(options or {})
    )
