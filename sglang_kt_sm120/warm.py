"""Everything that a first launch costs, paid when the weights load.

A kernel that is compiled, or a module that is loaded, during CUDA-graph capture kills the capture.
So `layer` runs each kernel variant that a layer can meet once, on the layer's own weight.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

from sglang_kt_sm120 import devices, env, op, select, system, variants
from sglang_kt_sm120.variants import representatives

logger = logging.getLogger("sglang_kt_sm120")
LOCK_SECONDS = 120.0
BLOCK_SIZE = [select.BLOCK, select.BLOCK]

_waited_in_vain = False
_warmed: set[tuple] = set()  # what layers, and `_compile`, need not do again


def layer(linear, weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype) -> None:
    """Launch once every kernel that this layer can meet.

    Does nothing where its shape was warmed before, nor while a CUDA graph is captured. The first
    layer of a process compiles, in parallel, what DeepSeek-R1's and smaller shapes need
    (`variants.SHAPES`), so that later layers find their kernels; one line says how many and how
    long. Input that arrives quantised is not met here: no released host gives any to a function
    that is not its own, and every start would pay for it.

    Args:
        linear: The layer's `Sm120BlockFp8Linear`, prepared.
        weight: e4m3 `[N, K]`; on the CPU there is nothing to launch.
        weight_scale: fp32 `[ceil(N/128), ceil(K/128)]`.
        dtype: The dtype of the activations that the layer will get.

    Raises:
        select.NoBackend: A backend is forced that cannot serve this layer.
    """
    n, k = weight.shape
    key = (weight.device, n, k, dtype, op.is_deterministic())
    if key in _warmed or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    problem = op.problem_of(1, n, k, dtype)
    cutlass = op.known_cutlass(weight.device, n, k, dtype)
    device = devices.device(weight.device.index if weight.is_cuda else None)
    ms = representatives(problem, device, cutlass)
    if not device.cuda:
        return
    every = (weight.device, dtype, problem.deterministic)  # what `_compile` makes for all layers
    failure, launching = None, False
    try:
        # Ranks share the kernel cache: one compiles, the others read.
        with one_process_at_a_time(_job(problem, device, cutlass, weight, ms)):
            if every not in _warmed:
                start = time.perf_counter()
                count = _compile(weight, weight_scale, dtype, device, problem.deterministic)
                seconds = time.perf_counter() - start
                logger.info("sglang-kt-sm120: %d kernel variants ready in %.1f s", count, seconds)
                _warmed.add(every)
            launching = True
            _launch(linear, weight, weight_scale, dtype, ms)
    except Exception as error:  # whatever a tuned configuration fails with
        if not launching or not select.tuned_rows(problem, device):
            raise
        failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if select.tuned_rows(problem, device) and _drop_tables_if_a_rank_failed(
        problem, device, weight, failure
    ):
        ms = representatives(problem, device, cutlass)
        with one_process_at_a_time(_job(problem, device, cutlass, weight, ms)):
            _launch(linear, weight, weight_scale, dtype, ms)
    _warmed.add(key)


def _drop_tables_if_a_rank_failed(
    problem, device: select.Device, weight: torch.Tensor, failure
) -> bool:
    """Leave the shape to the heuristic on every rank if a tuned configuration failed on one.

    Returns whether one did. Outside of the lock: ranks wait for each other here.
    """
    n, k = weight.shape
    agreed = import_module("sglang_kt_sm120.backends.cutlass").agreed
    reason = agreed(f"table/{n}x{k}/{problem.dtype}", weight.device, failure)
    if reason is None:
        return False
    select.drop_tables(problem, device, reason)
    op.forget_choices()
    return True


def _launch(linear, weight, weight_scale, dtype, ms: list[int]) -> None:
    for m in ms:
        x = torch.zeros(m, weight.shape[1], dtype=dtype, device=weight.device)
        linear(input=x, weight=weight, block_size=BLOCK_SIZE, weight_scale=weight_scale)
    if weight.is_cuda:
        torch.cuda.synchronize(weight.device)


def _compile(weight, weight_scale, dtype, device: select.Device, deterministic: bool) -> int:
    """Launch each variant of `variants.SHAPES`, compiling in parallel; return how many.

    A variant does not depend on N, K or the split, so any weight does.
    """
    from sglang_kt_sm120.backends import triton as backend

    index = weight.device.index if weight.is_cuda else None
    met = variants.shared(device, deterministic=(deterministic,), prequantised=(False,))
    configs = [variant.config for variant in met]
    tuned = [] if deterministic else select.tuned_configs(device)
    options = {"arch": devices.arch(index), "pdl": env.PDL.get()}

    def launch(config) -> None:
        here = contextlib.nullcontext() if index is None else torch.cuda.device(index)
        with torch.inference_mode(), here:  # both are per thread
            x = torch.zeros(config.block_m, weight.shape[1], dtype=dtype, device=weight.device)
            single = replace(config, splits=1)
            backend.run(x, weight, weight_scale, None, dtype, single, None, **options)

    def attempt(config) -> None:
        with contextlib.suppress(Exception):  # `layer` meets it again, and says so
            launch(config)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        later = pool.map(attempt, tuned)
        list(pool.map(launch, configs))
        list(later)
    return len({config.variant() for config in (*configs, *tuned)})


def _job(problem, device: select.Device, cutlass, weight: torch.Tensor, ms: list[int]) -> str:
    """Return a name for what warming a layer compiles, the same for every rank that does it."""
    import triton

    from sglang_kt_sm120.configs import table

    choices = [select.choose(replace(problem, m=m), device, cutlass) for m in ms]
    met = [(choice.backend, choice.config) for choice in choices]
    arch = devices.arch(weight.device.index if weight.is_cuda else None)
    # Triton's variables name its assembler and change what it makes; the folder is where we are.
    told = {k: v for k, v in os.environ.items() if k.startswith("TRITON_") and "_DIR" not in k}
    facts = (
        triton.__version__, table.revisions(), device, arch, env.PDL.get(), problem, met,
        select.tuned_configs(device), sorted(told.items()),
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def one_process_at_a_time(job: str, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock of Triton's cache folder, waiting at most `seconds`, unless `job` is done.

    Processes that share the cache then compile one after another, so that all but the first only
    read. Once one has done the job, a file in the cache says so, and nobody waits for it again; a
    job that raises is not done. Where no lock is to be had, or the cache is cold though that file
    is there (kernels were deleted, say), each compiles for itself: slower, never wrong.
    """
    folder = system.triton_cache()
    done = folder / f"sglang-kt-sm120-{job}.done"
    with contextlib.ExitStack() as stack:
        if not _exists(done):
            stack.enter_context(_locked(folder, seconds))
            if _exists(done):  # by the process that was waited for
                stack.close()
        yield
        with contextlib.suppress(OSError):
            done.touch()


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:
        return False


@contextlib.contextmanager
def _locked(folder: Path, seconds: float) -> Iterator[None]:
    """Hold the folder's lock file where it can be had within `seconds`.

    Who has waited that long in vain does not wait again.
    """
    global _waited_in_vain
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "sglang-kt-sm120.lock").open("a")
    except OSError:
        yield
        return
    with file:
        deadline = time.monotonic() + (0 if _waited_in_vain else seconds)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    if not _waited_in_vain:
                        logger.warning(
                            "sglang-kt-sm120: another process has held %s for %.0f s; going on",
                            file.name, seconds,
                        )  # fmt: skip
                    _waited_in_vain = True
                    break
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
