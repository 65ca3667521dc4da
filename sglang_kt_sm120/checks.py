"""What the ops and the layers accept, refused otherwise with the shapes and what was expected."""

from __future__ import annotations

import torch

from sglang_kt_sm120 import select

E4M3 = torch.float8_e4m3fn
OURS = "sglang_kt_sm120"
SERVED = (torch.bfloat16, torch.float16)


def require(condition: bool, error: type[Exception], message: str) -> None:
    if not condition:
        raise error(f"{OURS}: {message}")


def check_weight(weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Raise TypeError or ValueError, with the shapes, unless this is a block-FP8 weight."""
    require(weight.dim() == 2, ValueError, f"weight must be [N, K], got {list(weight.shape)}")
    n, k = weight.shape
    require(
        weight.dtype is E4M3,
        TypeError,
        f"weight [{n}, {k}] is {weight.dtype}; block FP8 needs torch.float8_e4m3fn",
    )
    require(
        k > 0 and k % select.BLOCK == 0,
        ValueError,
        f"weight [{n}, {k}]: K = {k} is not a multiple of 128 (one activation scale per 128)",
    )
    expected = [-(-n // select.BLOCK), k // select.BLOCK]
    require(
        list(scale.shape) == expected,
        ValueError,
        f"weight [{n}, {k}] needs scales {expected}, one per 128 x 128 block; "
        f"got {list(scale.shape)}",
    )
    require(
        scale.dtype is torch.float32,
        TypeError,
        f"weight [{n}, {k}]: scales are {scale.dtype}, expected torch.float32",
    )


def check(x, x_scale, weight, weight_scale, out_dtype) -> None:
    """Raise unless these operands make one product; what both ops and their fakes ask.

    Args:
        x: bf16 or fp16 `[M, K]`, or e4m3 where `x_scale` is given.
        x_scale: None, or fp32 `[M, K/128]`.
        weight: e4m3 `[N, K]`, K a multiple of 128.
        weight_scale: fp32 `[ceil(N/128), K/128]`.
        out_dtype: bf16 or fp16; x's own where `x_scale` is None.

    Raises:
        TypeError: A dtype that is not served.
        ValueError: Devices, dimensions or sizes that do not fit; the message holds the shapes.
    """
    check_weight(weight, weight_scale)
    n, k = weight.shape
    require(
        x.device == weight.device == weight_scale.device,
        ValueError,
        f"activation, weight [{n}, {k}] and scales are on {x.device}, {weight.device} and "
        f"{weight_scale.device}; expected one device",
    )
    require(
        x.dim() == 2 and x.shape[1] == k,
        ValueError,
        f"activation {list(x.shape)} does not fit weight [{n}, {k}]; expected [M, {k}]",
    )
    require(
        out_dtype in SERVED,
        TypeError,
        f"activation or output is {out_dtype} (weight [{n}, {k}]); bfloat16 and float16 are served",
    )
    if x_scale is None:
        require(x.dtype in SERVED, TypeError, f"activation is {x.dtype}; expected bf16 or fp16")
        return
    require(x.dtype is E4M3, TypeError, f"quantised activation is {x.dtype}; expected {E4M3}")
    blocks = k // select.BLOCK
    require(
        x_scale.dim() == 2 and x_scale.shape[1] == blocks and x_scale.dtype is torch.float32,
        ValueError,
        f"activation scales must be float32 [M, {blocks}], got {x_scale.dtype} "
        f"{list(x_scale.shape)}",
    )
    torch._check(  # a symbolic M may be unknown while compiling: then it is checked when run
        x_scale.shape[0] == x.shape[0],
        lambda: f"{OURS}: {x.shape[0]} rows of activation, {x_scale.shape[0]} of scales",
    )
