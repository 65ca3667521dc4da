"""Weight scales in formats other than fp32, turned into fp32 exactly once, at load.

DeepGEMM's UE8M0 is a bare exponent byte, 2 ** (e - 127): every value is an fp32 power of two, so
the conversion loses nothing. fp32 scales are never rounded to it.
"""

from __future__ import annotations

import torch

BLOCK = 128


def to_fp32(scale: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Return the scales of an `[n, k]` block-FP8 weight as fp32 `[ceil(n/128), ceil(k/128)]`.

    Args:
        scale: fp32 (returned as it is); float8_e8m0fnu of the same shape; or DeepGEMM's packed
            int32 `[n, ceil(k/512)]`, any strides, four exponents of consecutive K blocks in each,
            lowest byte first, the 128 rows of a block alike.

    Raises:
        ValueError: Another dtype or shape, an exponent byte of 255 (NaN), or rows of one block
            that differ (then no 128 x 128 scale can stand for them).
    """
    expected = [-(-n // BLOCK), -(-k // BLOCK)]
    e8m0 = getattr(torch, "float8_e8m0fnu", None)
    if scale.dtype is torch.int32 and list(scale.shape) == [n, -(-k // (4 * BLOCK))]:
        rows = scale.contiguous().view(torch.uint8)[:, : expected[1]]
        exponents = rows[::BLOCK]
        if not torch.equal(exponents.repeat_interleave(BLOCK, 0)[:n], rows):
            raise ValueError(
                f"packed UE8M0 weight scales of [{n}, {k}] differ inside a block of 128 rows"
            )
    elif e8m0 is not None and scale.dtype is e8m0 and list(scale.shape) == expected:
        exponents = scale.view(torch.uint8)
    elif scale.dtype is torch.float32 and list(scale.shape) == expected:
        return scale
    else:
        raise ValueError(
            f"weight [{n}, {k}] needs fp32 (or UE8M0) scales {expected}, one per 128 x 128 block; "
            f"got {scale.dtype} {list(scale.shape)}"
        )
    if bool((exponents == 255).any()):
        raise ValueError(f"UE8M0 weight scales of [{n}, {k}] hold NaN (exponent byte 255)")
    # 2 ** (e - 127): bit pattern e << 23 for e >= 1, and the subnormal 2 ** -127 for e = 0.
    bits = exponents.to(torch.int32) << 23
    return torch.where(exponents == 0, 1 << 22, bits).contiguous().view(torch.float32)
