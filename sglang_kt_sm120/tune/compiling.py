"""Compiles variants in other processes while the tuner times, and judges them by the AOT gates.

The processes go the way that a launch goes (see ahead.py), so what they leave in Triton's cache is
what the launch looks up. Separate processes, because compiling in threads would hold up the one
that times.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from sglang_kt_sm120 import heuristic, select

MAX_JOBS = 8


def default_jobs() -> int:
    """Half of the cores, at most `MAX_JOBS`: the others are for timing."""
    return max(1, min(MAX_JOBS, (os.cpu_count() or 1) // 2))


def _be_quiet() -> None:
    """Leave Ctrl-C to the tuner, which ends the pool, and stdout to its result.

    Triton prints a whole kernel there where its assembler refuses one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)


def compile_one(
    config: heuristic.Config, n: int, capability: tuple[int, int], arch: str | None, pdl: bool,
    dtype: str,
) -> dict:  # fmt: skip
    """Compile one variant for a GPU that need not be here.

    Args:
        config: With one split. n: Rows of the weight (its divisibility by 16 matters).
        capability: Of the GPU that will launch it. arch: Triton's launch option.

    Returns:
        `aot.quick_look` of its kernel (of the last one, where a quantisation comes first), or
        {"error": text}.
    """
    import torch
    from triton.runtime.jit import JITFunction

    from sglang_kt_sm120 import ahead, aot
    from sglang_kt_sm120.backends import triton as backend

    compiled = []
    with ahead.compile_only(capability):
        launch = JITFunction.run

        def run(self, *args, **options):
            compiled.append(launch(self, *args, **options))
            return compiled[-1]

        JITFunction.run = run  # compile_only puts the first one back
        try:
            k = heuristic.GROUP * max(4, config.unroll)
            weight = torch.empty(n, k, dtype=torch.float8_e4m3fn)
            scale = torch.empty(-(-n // heuristic.GROUP), k // heuristic.GROUP, dtype=torch.float32)
            x = torch.empty(config.block_m, k, dtype=getattr(torch, dtype))
            counters = torch.empty(4096, dtype=torch.int32)
            out = x.dtype
            backend.run(x, weight, scale, None, out, config, counters, arch=arch, pdl=pdl)
            return aot.quick_look(compiled[-1])
        except Exception as error:  # a compiler's refusal is a finding: this variant is out
            return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def judge(look: dict, device: select.Device) -> heuristic.Resources | str:
    """Return what a variant takes, or the first gate that it fails: why it is never timed."""
    if "error" in look:
        return "does not compile"
    if look["spills"]:
        return "spills registers"
    if look["shared_bytes"] > device.shared_bytes:
        return "too much shared memory"
    if device.capability in select.SM120 and (look["mma"].get("HMMA") or not look["mma"]):
        return "no native FP8 mma"
    # Where cuobjdump cannot say, the most that a thread may have: fewest programs an SM.
    return heuristic.Resources(look["registers"] or 255, look["shared_bytes"])


class Compilers:
    """`engine.Builds` over a pool of processes.

    Args:
        device: The `select.Device` whose limits are the gates.
        capability: The real one, to assemble for.
        arch: M class of a variant -> Triton's `arch` option (`Config` -> str or None).
        pdl, dtype: As served. jobs: Processes; default `default_jobs()`.
    """

    def __init__(self, device, capability, arch, pdl: bool, dtype: str, jobs: int | None = None):
        self.device, self.capability, self.arch = device, capability, arch
        self.pdl, self.dtype = pdl, dtype
        self.waited = 0.0
        self.jobs = jobs or default_jobs()
        self._pool = self._processes()
        self._asked: dict[tuple[heuristic.Config, bool], Future] = {}
        self._known: dict[tuple[heuristic.Config, bool], heuristic.Resources | str] = {}

    def _processes(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.jobs, multiprocessing.get_context("spawn"), _be_quiet)

    def ask(self, variants: Iterable[heuristic.Config], n: int) -> None:
        """Start compiling what was not asked for before."""
        for variant in variants:
            key = (variant, n % 16 == 0)
            if key not in self._asked:
                self._asked[key] = self._pool.submit(
                    compile_one, variant, n, self.capability, self.arch(variant), self.pdl,
                    self.dtype,
                )  # fmt: skip

    def need(self, variant: heuristic.Config, n: int) -> heuristic.Resources | str:
        """Wait for a variant; return what it takes, or why it is out.

        Raises:
            RuntimeError: A compiling process died (memory?). Others take its place, so that only
                the case at hand fails.
        """
        key = (variant, n % 16 == 0)
        if key not in self._known:
            start = time.monotonic()
            try:
                self.ask([variant], n)
                look = self._asked[key].result()
            except BrokenProcessPool:
                self.close()
                self._pool, self._asked = self._processes(), {}
                raise RuntimeError(
                    "a compiling process died, most likely for lack of memory: use fewer --jobs"
                ) from None
            finally:
                self.waited += time.monotonic() - start
            self._known[key] = judge(look, self.device)
        return self._known[key]

    def progress(self) -> tuple[int, int]:
        """Return (variants compiled, variants asked for)."""
        return sum(task.done() for task in self._asked.values()), len(self._asked)

    def close(self) -> None:
        """Drop what has not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)
