"""Our own Triton kernels as a backend: a config in, launches out."""

from __future__ import annotations

import torch

from sglang_kt_sm120 import kernels

NAME = "triton"


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    config,
    counters: torch.Tensor | None,
    *,
    arch: str | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out = x @ weight.T with block scales, by the kernels that `config` names.

    Args:
        x: [M, K] bf16 or fp16 with x_scale None, or e4m3; M >= 1, inner stride 1.
        weight: [N, K] e4m3, contiguous.
        weight_scale: [ceil(N / 128), K / 128] fp32, contiguous.
        x_scale: [M, K / 128] fp32, any strides, or None: quantise here.
        out_dtype: torch.bfloat16 or torch.float16.
        config: a `heuristic.Config`.
        counters: int32 zeros on x's device, at least one per output tile, which are zero again
            when the launch has finished; None (or too few): allocated in the call.
        arch: Triton's `arch` launch option ("sm120"), or None for the device's own.
        pdl: launch with programmatic stream serialisation.

    Returns:
        A new [M, N] tensor.
    """
    m = x.shape[0]
    n = weight.shape[0]
    options: dict[str, object] = {}
    if arch is not None:
        options["arch"] = arch
    if pdl:
        options["launch_pdl"] = True
    if x_scale is None and not config.fused:
        x, x_scale = kernels.quantise(x, column_major=config.kernel != "direct", options=options)
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if config.kernel == "tiled":
        kernels.tiled(
            x,
            x_scale,
            weight,
            weight_scale,
            out,
            block_m=config.block_m,
            block_n=config.block_n,
            group_m=config.group_m,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            unit_scaled=config.unit_scaled,
            split_order=config.split_order,
            options=options,
        )
        return out

    splits = config.splits
    scratch = weight_scale  # never touched when splits is 1
    if splits > 1:
        tiles = -(-n // config.block_n) * -(-m // config.block_m)
        size = tiles * splits * config.block_m * config.block_n
        scratch = torch.empty(size, dtype=torch.float32, device=x.device)
        if counters is None or counters.numel() < tiles:
            counters = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    elif counters is None:
        counters = weight_scale.view(torch.int32)
    if config.kernel == "direct":
        if config.registers:
            options["maxnreg"] = config.registers
        kernels.direct(
            x,
            weight,
            weight_scale,
            out,
            scratch,
            counters,
            block_m=config.block_m,
            block_n=config.block_n,
            unroll=config.unroll,
            splits=splits,
            num_warps=config.num_warps,
            chunk=config.chunk,
            options=options,
        )
    else:
        kernels.pipelined(
            x,
            x_scale,
            weight,
            weight_scale,
            out,
            scratch,
            counters,
            block_m=config.block_m,
            block_n=config.block_n,
            splits=splits,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            swap=config.swap,
            prefetch=config.prefetch,
            chunk=config.chunk,
            options=options,
        )
    return out
