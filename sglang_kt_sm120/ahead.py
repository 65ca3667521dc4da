"""Fill Triton's cache before a server starts, also on a machine without a GPU (a Docker build).

Launches go the very way that serving goes, argument specialisation included, and stop where the
kernel would be loaded: so the cache keys are those that the server will look up. It patches Triton
for its duration, hence a process of its own: the command `sglang-kt-sm120 warm`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from sglang_kt_sm120 import select, shapes, variants
from sglang_kt_sm120.backends import triton as backend


@dataclass(frozen=True)
class Compiled:
    """One kernel variant that is in the cache now."""

    n: int
    k: int
    m: int
    config: object


@contextlib.contextmanager
def compile_only(capability: tuple[int, int]) -> Iterator[None]:
    """Let every Triton launch of this process compile for `capability` and not run."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        """Answers what compiling asks of a driver."""

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    # Until Triton 3.5 the active driver is a plain attribute.
    run, active = (
        JITFunction.run,
        getattr(driver, "_active" if hasattr(driver, "_active") else "active"),
    )
    driver.set_active(Driver())
    JITFunction.run = lambda self, *args, grid, warmup, **options: run(
        self, *args, grid=grid, warmup=True, **options
    )
    try:
        yield
    finally:
        JITFunction.run = run
        driver.set_active(active)


def compile_all(
    linears: list[shapes.Linear], device: select.Device, arch: str | None, pdl: bool,
    target: tuple[int, int] | None = None, dtype: torch.dtype = torch.bfloat16, jobs: int = 1,
    deterministic: tuple[bool, ...] = (False, True),
) -> Iterator[tuple[int, int, Compiled]]:  # fmt: skip
    """Compile every kernel variant that a server with these layers compiles on `device`.

    Args:
        linears: The layers, sharded as they will be served.
        device: The GPU, which need not be here.
        arch: Triton's launch option for it (`devices.arch_of`).
        pdl: Whether serving launches with dependent launch.
        target: Compute capability to assemble for, where it is not the device's (tests).
        dtype: Of the activations.
        jobs: Compilations at a time.
        deterministic: For serving without, and with, one K order for every M.

    Yields:
        (how many are done, how many there are, the latest) as each finishes.
    """
    todo = [
        Compiled(met.problem.n, met.problem.k, met.problem.m, met.config)
        for met in variants.met(
            ((linear.n, linear.k) for linear in linears),
            device,
            dtype=str(dtype).removeprefix("torch."),
            deterministic=deterministic,
            prequantised=(False,),  # as warm.py
        )
    ]
    with compile_only(target or device.capability), ThreadPoolExecutor(jobs) as pool:
        tasks = {pool.submit(_launch, item, arch, pdl, dtype): item for item in todo}
        for done, task in enumerate(as_completed(tasks), 1):
            task.result()
            yield done, len(todo), tasks[task]


def _launch(item: Compiled, arch: str | None, pdl: bool, dtype: torch.dtype) -> None:
    """Go through the backend with tensors that are never read; their pages are never touched."""
    weight = torch.empty(item.n, item.k, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-item.n // 128), item.k // 128, dtype=torch.float32)
    x = torch.empty(item.m, item.k, dtype=dtype)
    counters = torch.empty(4096, dtype=torch.int32)
    backend.run(x, weight, scale, None, dtype, item.config, counters, arch=arch, pdl=pdl)
