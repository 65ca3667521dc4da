"""Everything that a first launch costs, paid when the weights load.

A kernel that is compiled, or a module that is loaded, during CUDA-graph capture kills the capture.
So `layer` runs each kernel variant that a layer can meet once, on the layer's own weight.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from sglang_kt_sm120 import devices, op, select

logger = logging.getLogger("sglang_kt_sm120")
#: Rows beyond decode at which a prefill configuration could change.
PREFILL_MS = (65, 128, 256, 512, 1024, 2048, 4096, 8192)

_warmed: set[tuple] = set()


def representatives(
    problem: select.Problem, device: select.Device, cutlass: str | None
) -> list[int]:
    """Return one M for each compiled kernel variant that the shape of `problem` can take."""
    found: dict[tuple, int] = {}
    for m in (*range(1, select.DECODE_M + 1), *PREFILL_MS):
        choice = select.choose(replace(problem, m=m), device, cutlass)
        variant = choice.config.variant() if hasattr(choice.config, "variant") else None
        found.setdefault((choice.backend, variant), m)
    return list(found.values())


def layer(linear, weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype) -> None:
    """Launch once every kernel that this layer can meet; nothing where its shape was warmed before.

    Args:
        linear: The layer's `Sm120BlockFp8Linear`, prepared.
        weight: e4m3 `[N, K]`; on the CPU there is nothing to launch.
        weight_scale: fp32 `[ceil(N/128), K/128]`.
        dtype: The dtype of the activations that the layer will get.

    Raises:
        select.NoBackend: A backend is forced that cannot serve this layer.
    """
    n, k = weight.shape
    key = (weight.device, n, k, dtype)
    if key in _warmed:
        return
    problem = op.problem_of(1, n, k, dtype)
    cutlass = op.cutlass_verdict(weight.device, n, k)
    ms = representatives(
        problem, devices.device(weight.device.index if weight.is_cuda else None), cutlass
    )
    _warmed.add(key)
    if not weight.is_cuda or torch.cuda.is_current_stream_capturing():
        return
    start = time.perf_counter()
    with one_process_at_a_time():  # ranks share the kernel cache: one compiles, the others read
        for m in ms:
            x = torch.zeros(m, k, dtype=dtype, device=weight.device)
            linear(input=x, weight=weight, block_size=[128, 128], weight_scale=weight_scale)
        torch.cuda.synchronize(weight.device)
    seconds = time.perf_counter() - start
    level = logging.INFO if seconds > 1 else logging.DEBUG
    logger.log(
        level, "sglang-kt-sm120: %d kernel variants ready for N=%d K=%d in %.1f s",
        len(ms), n, k, seconds,
    )  # fmt: skip


@contextlib.contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Hold a lock that the processes of this user share; without a lock file, go on without."""
    path = Path(tempfile.gettempdir()) / f"sglang-kt-sm120-{os.getuid()}.lock"
    try:
        file = path.open("w")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
