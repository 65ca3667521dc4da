"""Our own Triton kernels as a backend: a config in, launches out."""

from __future__ import annotations

from collections.abc import Callable

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
    """out = x @ weight.T with block scales, by the kernels that `config` names, once.

    Who calls again and again asks `plan` for what this does. Arguments and result as there.
    """
    call = plan(config, *weight.shape, arch=arch, pdl=pdl)
    return call(x, weight, weight_scale, x_scale, out_dtype, config, counters)


def plan(
    config,
    n: int,
    k: int,
    *,
    arch: str | None = None,
    pdl: bool = False,
    through: Callable = kernels.as_it_is,
) -> Callable[..., torch.Tensor]:
    """Work out all that does not change between the calls of a layer; return what serves them.

    Args:
        config: a `heuristic.Config`.
        n, k: size of the weight.
        arch: Triton's `arch` launch option ("sm120"), or None for the device's own.
        pdl: launch with programmatic stream serialisation.
        through: makes of a jitted kernel what is launched (see `kernels.as_it_is`).

    Returns:
        call(x, weight, weight_scale, x_scale, out_dtype, config, counters) -> a new [M, N], with
            x: [M, K] bf16 or fp16 with x_scale None, or e4m3; M >= 1, inner stride 1.
            weight: [N, K] e4m3, contiguous.
            weight_scale: [ceil(N / 128), K / 128] fp32, contiguous.
            x_scale: [M, K / 128] fp32, any strides, or None: quantise here.
            out_dtype: torch.bfloat16 or torch.float16.
            config: not read; every backend takes it.
            counters: int32 zeros on x's device, at least one per output tile, which are zero again
                when the launch has finished; None (or too few): allocated in the call.
    """
    options: dict[str, object] = {}
    if arch is not None:
        options["arch"] = arch
    if pdl:
        options["launch_pdl"] = True
    plans = {"tiled": _tiled, "direct": _direct, "pipelined": _pipelined}
    return plans[config.kernel](config, n, k, options, through)


def _direct(config, n: int, k: int, options: dict, through) -> Callable[..., torch.Tensor]:
    """Plan the register-direct kernel, one row of tiles, quantisation inside."""
    tiles = -(-n // config.block_n)
    splits = config.splits
    size = tiles * splits * config.block_m * config.block_n
    limit = {"maxnreg": config.registers} if config.registers else {}
    launch = kernels.direct(
        n,
        k,
        block_m=config.block_m,
        block_n=config.block_n,
        unroll=config.unroll,
        splits=splits,
        num_warps=config.num_warps,
        chunk=config.chunk,
        options=options | limit,
        through=through,
    )

    def call(x, weight, weight_scale, x_scale, out_dtype, config, counters):
        device = x.device
        out = torch.empty((x.shape[0], n), dtype=out_dtype, device=device)
        scratch, counters = _split_memory(size, tiles, splits, weight_scale, counters, device)
        launch(x, weight, weight_scale, out, scratch, counters)
        return out

    return call


def _pipelined(config, n: int, k: int, options: dict, through) -> Callable[..., torch.Tensor]:
    """Plan the shared-memory pipeline, behind a quantisation kernel unless it is fused."""
    block_m, splits, fused = config.block_m, config.splits, config.fused
    tiles_n = -(-n // config.block_n)
    size = splits * block_m * config.block_n
    launch = kernels.pipelined(
        n,
        k,
        block_m=block_m,
        block_n=config.block_n,
        splits=splits,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        swap=config.swap,
        prefetch=config.prefetch,
        chunk=config.chunk,
        options=options,
        through=through,
    )

    def call(x, weight, weight_scale, x_scale, out_dtype, config, counters):
        m, device = x.shape[0], x.device
        if x_scale is None and not fused:
            x, x_scale = kernels.quantise(x, column_major=True, options=options, through=through)
        out = torch.empty((m, n), dtype=out_dtype, device=device)
        tiles = tiles_n * -(-m // block_m)
        scratch, counters = _split_memory(
            size * tiles, tiles, splits, weight_scale, counters, device
        )
        launch(x, x_scale, weight, weight_scale, out, scratch, counters)
        return out

    return call


def _tiled(config, n: int, k: int, options: dict, through) -> Callable[..., torch.Tensor]:
    """Plan the prefill kernel behind a quantisation kernel."""
    launch = kernels.tiled(
        n,
        k,
        block_m=config.block_m,
        block_n=config.block_n,
        group_m=config.group_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        unit_scaled=config.unit_scaled,
        split_order=config.split_order,
        options=options,
        through=through,
    )

    def call(x, weight, weight_scale, x_scale, out_dtype, config, counters):
        if x_scale is None:
            x, x_scale = kernels.quantise(x, column_major=True, options=options, through=through)
        out = torch.empty((x.shape[0], n), dtype=out_dtype, device=x.device)
        launch(x, x_scale, weight, weight_scale, out)
        return out

    return call


def _split_memory(size, tiles, splits, weight_scale, counters, device):
    """Return (scratch, counters) for a launch; stand-ins that are never touched without a split."""
    if splits == 1:
        return weight_scale, weight_scale.view(torch.int32) if counters is None else counters
    if counters is None or counters.numel() < tiles:
        counters = torch.zeros(tiles, dtype=torch.int32, device=device)
    return torch.empty(size, dtype=torch.float32, device=device), counters
