"""Which backend serves a block-FP8 product, and why.

`choose` is the one decision of this package: the op routes by it, `explain` prints it, tests walk
it. It depends on the problem, the device, the tuned tables on disk (read once per process, at
load), `SGLANG_KT_SM120_BACKEND`, `SGLANG_KT_SM120_DISABLED_BACKENDS` and what the probe of the
host's CUTLASS said at load, and on nothing that is timed; so restarts, CUDA graphs and ranks get
the same answer (backends/cutlass settles a probe that failed on one rank only). No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sglang_kt_sm120 import env, heuristic, limits
from sglang_kt_sm120.configs import store

BLOCK = 128  # weight blocks are 128 x 128, activation groups 1 x 128
DECODE_M = 64  # up to here a product is bound by reading the weight
SM120 = ((12, 0), (12, 1))

#: Everything that could be asked for this product on SM12x, in the order `explain` lists it.
BACKENDS = ("flashinfer_trtllm", "deep_gemm", "cutlass", "triton", "reference")


@dataclass(frozen=True)
class Device:
    """The facts about a GPU that a choice depends on.

    Attributes:
        name: What `torch.cuda.get_device_name` says, or "cpu".
        capability: Compute capability as the plugin sees it.
        sm_count: Streaming multiprocessors.
        shared_bytes: Shared memory one thread block may opt into.
        l2_bytes: L2 size.
        bandwidth_gbs: Memory bandwidth in GB/s from the data sheet; 0 where unknown.
        gpu_class: "geforce", "rtx_pro", "gb10" or "other".
        cuda: False on a machine without a CUDA device, where only `reference` runs.
        mma: Prefill tensor-core instruction, "plain" or "block_scale".
        tokens: The fewest tokens of a product's tile that this Triton compiles: 8, or 16.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    shared_bytes: int = 101376
    l2_bytes: int = 0
    bandwidth_gbs: float = 0.0
    gpu_class: str = "other"
    cuda: bool = True
    mma: str = "plain"
    tokens: int = 8


@dataclass(frozen=True)
class Problem:
    """One product: `[m, k]` activations times `[n, k]` weights.

    Attributes:
        m: Rows of the activation; above 64 the largest M of its bucket (see `bucket`).
        n: Output features, any.
        k: Input features, a multiple of 128.
        dtype: Output dtype, "bfloat16" or "float16".
        prequantised: The activation arrives as e4m3 with its scales.
        deterministic: One K order for every M (batch-invariant serving).
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    prequantised: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class Choice:
    """The answer: who serves, how, on what evidence, and why nobody else.

    Attributes:
        backend: One of `BACKENDS`.
        config: The backend's own launch configuration, or None.
        evidence: What decided: "user table", "device table", "class table", "heuristic",
            "host default", "forced" or "only choice".
        reason: One sentence for a person.
        rejected: Reason by backend, for every other backend.
        table: The table behind `config`: its file, GPU and who shared it; "" where none is.
    """

    backend: str
    config: Any
    evidence: str
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)
    table: str = ""


NOTHING_KNOWN = limits.Known()


class NoBackend(RuntimeError):
    """No backend can serve this product; the message lists every reason."""


def bucket(m: int) -> int:
    """Return the M by which a product of `m` rows is decided: the largest of its bucket.

    Every M up to 64 decides for itself. Above, neighbours share a decision, 32 of them up to 128
    and then 64, so the number of decisions stays small. Rounded up, because a tile for more rows
    serves fewer, and so that as many row tiles of 64 and 128 are counted as are launched.
    """
    if m <= DECODE_M:
        return m
    step = 32 if m <= 2 * DECODE_M else 64
    return -(-m // step) * step


def buckets(largest: int) -> list[int]:
    """Return every M by which a product of up to `largest` rows can be decided, rising."""
    ends = [*range(1, DECODE_M + 1), 96, *range(128, largest + 64, 64)]
    return [m for m in ends if m <= bucket(largest)]


def choose(
    problem: Problem,
    device: Device,
    cutlass: limits.Known = NOTHING_KNOWN,
    *,
    tables: bool = True,
) -> Choice:
    """Choose the backend and its configuration.

    Args:
        problem: The product; its `m` is taken through `bucket`.
        device: The GPU (or "cpu").
        cutlass: What the probe of the host's CUTLASS kernels said about this (n, k, dtype) and
            device, before capture.
        tables: Ask the tuned tables (`tune` compares with what serves without).

    Raises:
        NoBackend: K is no multiple of 128, `SGLANG_KT_SM120_BACKEND` forces a backend that cannot
            serve this product, or `SGLANG_KT_SM120_DISABLED_BACKENDS` leaves none that can.
    """
    if problem.k % BLOCK:
        raise NoBackend(
            f"K = {problem.k} (N = {problem.n}) is no multiple of 128: no backend serves it, and "
            "sglang's own activation quantisation refuses it too"
        )
    forced = env.BACKEND.get()
    cutlass = replace(cutlass, proven=tuple(n for n in cutlass.proven if n not in _disabled()))
    reasons = _why_not(problem, device, cutlass)
    answer = _tabled(problem, device) if tables else None
    row = answer.row if answer else None
    kernel = _cutlass_kernel(row, cutlass)
    tabled = row is not None and row.backend is not None and reasons[row.backend] is None
    if forced != "auto":
        if reasons.get(forced):
            raise _refusal(f"{env.BACKEND.name}={forced}", problem, device, reasons)
        winner, evidence, reason = forced, "forced", f"{env.BACKEND.name}={forced}"
    elif not device.cuda and reasons["reference"] is None:
        winner, evidence, reason = "reference", "only choice", "no CUDA device: plain torch"
    elif tabled and (row.backend != "cutlass" or kernel):
        winner, evidence = row.backend, answer.found.kind
        reason = f"tuned at M={row.m} on {answer.found.table.gpu['name']}"
    elif (
        reasons["cutlass"] is None
        and cutlass.host_default in cutlass.proven
        and problem.m > DECODE_M
    ):
        winner, evidence = "cutlass", "host default"
        reason = "M > 64, N and K multiples of 128: the host's own default, once proven there"
    elif reasons["triton"] is None:
        winner, evidence = "triton", "heuristic"
        reason = _triton_reason(problem)
    elif reasons["cutlass"] is None:
        winner, evidence, reason = "cutlass", "only choice", reasons["triton"]
    else:  # plain torch serves a GPU only where it is asked for by name
        raise _refusal(
            f"{env.DISABLED_BACKENDS.name}={','.join(sorted(_disabled()))}",
            problem,
            device,
            reasons,
        )

    table = answer.found.title() if row is not None and row.backend == winner else ""
    if winner == "cutlass":
        default = cutlass.host_default if evidence == "host default" else cutlass.proven[0]
        config = limits.Cutlass(kernel if table and kernel else default)
    elif winner == "triton":
        config = row.config if table else heuristic.config_for(problem, device)
    else:
        config = None
    rejected = {
        name: reasons[name] or _ranked_lower(name, winner, problem)
        for name in BACKENDS
        if name != winner
    }
    return Choice(winner, config, evidence, reason, rejected, table)


def _tabled(problem: Problem, device: Device) -> store.Answer | None:
    """Return what a tuned table says, where one may speak.

    Not under deterministic inference, which wants one order of K for every M, and not for an
    activation that arrives quantised: what is tuned is quantisation and product together.
    """
    if problem.deterministic or problem.prequantised or not device.cuda:
        return None
    return store.lookup(problem, device)


def tuned_rows(problem: Problem, device: Device) -> list[int]:
    """Return the Ms of the tables for this shape: a warm-up walks them beside its own."""
    if problem.deterministic or problem.prequantised or not device.cuda:
        return []
    return store.rows(problem, device)


def tuned_configs(device: Device) -> list[heuristic.Config]:
    """Return one configuration of ours for each kernel variant that the tables can ask for."""
    return store.triton_configs(device) if device.cuda else []


def drop_tables(problem: Problem, device: Device, reason: str) -> bool:
    """Leave a shape to the heuristic from now on, because a tuned configuration failed at load.

    Returns False where no table speaks for the shape (any more): something else has failed.
    """
    if not tuned_rows(problem, device):
        return False
    return store.distrust(problem.n, problem.k, problem.dtype, reason)


def tables_digest(device: Device) -> str:
    """Return a digest of what the tables say on this device; "" where they say nothing."""
    return store.said(device) if device.cuda else ""


def leave_tables(device: Device, reason: str) -> bool:
    """Ask no table for this device from now on; False where that was so before."""
    return store.leave(device, reason)


def wanted_kernels(
    problem: Problem, device: Device, host_default: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which of the host's CUTLASS kernels have to be probed for the shape of `problem`.

    Two tuples of names: those that a tuned table names, or the host's own default is, each wanted
    for itself, and those of which the first that proves right will do. A kernel that no choice
    could take is not asked for, since its first call may compile for minutes.
    """
    if not device.cuda or problem.deterministic:
        return (), ()
    usable = usable_kernels(problem, device)
    key = (problem.n, problem.k, problem.dtype)
    rows = [row for found in store.tables(device) for row in found.table.shapes.get(key, ())]
    tuned = [(row.config or {}).get("kernel") for row in rows if row.backend == "cutlass"]
    forced = env.BACKEND.get()
    anyone = forced == "cutlass" or (
        forced == "auto" and (None in tuned or "triton" in _disabled())
    )
    named = tuple(n for n in usable if forced == "auto" and n in (*tuned, host_default))
    return named, usable if anyone else ()


def usable_kernels(problem: Problem, device: Device) -> tuple[str, ...]:
    """Return the host's CUTLASS kernels that nothing rules out before a probe, in their order."""
    return tuple(k.name for k in limits.KERNELS if not _kernel_why_not(k, problem, device))


def _cutlass_kernel(row: store.Row | None, cutlass: limits.Known) -> str | None:
    """Return the proven kernel that a table's row means; None where it is none or not proven."""
    if row is None or row.backend != "cutlass" or not cutlass.proven:
        return None
    name = (row.config or {}).get("kernel", cutlass.proven[0])
    return name if name in cutlass.proven else None


def _disabled() -> frozenset[str]:
    return env.DISABLED_BACKENDS.get()


def _refusal(what: str, problem: Problem, device: Device, reasons: dict) -> NoBackend:
    every = "; ".join(f"{name}: {why}" for name, why in reasons.items() if why)
    return NoBackend(
        f"{what} cannot serve m={problem.m} n={problem.n} k={problem.k} on {device.name}: {every}"
    )


def _triton_reason(problem: Problem) -> str:
    if problem.m <= DECODE_M:
        return "decode: bound by reading the weight; our kernels split K over every SM"
    if problem.n % BLOCK:
        return f"N = {problem.n} is no multiple of 128: native tails, where CUTLASS cannot serve"
    return "prefill: our tiled kernel"


def _why_not(problem: Problem, device: Device, cutlass: limits.Known) -> dict[str, str | None]:
    """Return the reason why each backend cannot serve, or None where it can."""
    sm = "".join(map(str, device.capability))
    no_gpu = None if device.cuda else "needs a CUDA device"
    reasons = {
        "flashinfer_trtllm": f"no kernel for compute capability {sm}: FlashInfer builds trtllm for "
        "100 and 103 only",
        "deep_gemm": "needs UE8M0 scales (fp32 scales would be rounded), and its builds for sglang "
        "before 0.5.20 have no SM120 kernel",
        "cutlass": no_gpu or _cutlass_why_not(problem, device, cutlass),
        "triton": no_gpu,
        "reference": None,
    }
    off = f"{env.DISABLED_BACKENDS.name} names it"
    return reasons | {name: off for name in BACKENDS if name in _disabled()}


def _cutlass_why_not(problem: Problem, device: Device, cutlass: limits.Known) -> str | None:
    """Return why none of the host's CUTLASS kernels may serve, each with its reason, or None."""
    if problem.n % limits.WHOLE_BLOCKS or problem.k % limits.WHOLE_BLOCKS:
        return (
            f"{problem.n} x {problem.k} is not in whole 128 x 128 blocks, which its kernels need "
            "(FlashInfer's would leave the output unwritten)"
        )
    if problem.deterministic:
        return "its tiles, and with Stream-K its order of K, depend on M"
    if cutlass.proven:
        return None
    struck = dict(cutlass.struck)
    each = (
        struck.get(k.name) or _kernel_why_not(k, problem, device) or "not probed"
        for k in limits.KERNELS
    )
    named = "; ".join(
        f"{kernel.name}: {why}" for kernel, why in zip(limits.KERNELS, each, strict=True)
    )
    return f"no kernel is proven on this layer: {named}"


def _kernel_why_not(kernel: limits.Kernel, problem: Problem, device: Device) -> str | None:
    if {kernel.name, "cutlass"} & _disabled():
        return f"{env.DISABLED_BACKENDS.name} names it"
    return kernel.refuses(problem.n, problem.k, device.capability)


def _ranked_lower(name: str, winner: str, problem: Problem) -> str:
    if name == "reference":
        return "plain torch: right, and slow"
    if name == "cutlass":
        return "M <= 64: bound by reading the weight" if problem.m <= DECODE_M else "not preferred"
    return f"{winner} is preferred here"
