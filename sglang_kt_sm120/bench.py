"""Timing of block-FP8 linears: what is timed, how, and against what. No printing here.

Every figure is the median over replays of a CUDA graph that runs one candidate over and over on
rotating weights, more of them than three times the L2 holds, so that each read is cold. All
candidates of a case are replayed in turn within each round, so that clocks and neighbours hit
them alike. Quantisation is inside every timing. A candidate is first compared with float64, and
once more on the output of its last timed replay, which was filled with NaN before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

import torch

from sglang_kt_sm120 import baselines, heuristic, kernels, op
from sglang_kt_sm120.backends import reference as oracle
from sglang_kt_sm120.backends import triton as backend
from sglang_kt_sm120.records import Record

TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 3e-4}
GRAPH_US = 2000.0  # work captured per graph
ROUNDS = 7


@dataclass
class Case:
    """One product to time: activations [m, k], `copies` weights [n, k] and their scales.

    Attributes:
        every: Each `every`-th row is compared with float64 (an odd number meets every place in a
            tile); of the others only NaN and Inf are noticed. 1: every row.
        known: Weight's index -> float64 product of the compared rows, once it was asked for.
    """

    name: str
    m: int
    n: int
    k: int
    x: torch.Tensor
    weights: list[torch.Tensor]
    scales: list[torch.Tensor]
    counters: torch.Tensor
    every: int = 1
    known: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def error(self, out: torch.Tensor, index: int) -> float:
        """Relative error of `out` [m, n] with weight `index`; NaN where any value is not finite."""
        if index not in self.known:
            self.known[index] = reference(self, index)
        if not out.isfinite().all():
            return float("nan")
        return relative_error(out[:: self.every], self.known[index])

    @property
    def bytes(self) -> int:
        """Bytes that must move: weight and scales once, activation in, output out."""
        scales = -(-self.n // 128) * (self.k // 128) * 4
        return self.n * self.k + scales + 2 * self.m * self.k + 2 * self.m * self.n


@dataclass(frozen=True)
class Candidate:
    """Something to time: `prepare(case)` returns a function of the weight's index."""

    name: str
    prepare: Callable[[Case], Callable[[int], torch.Tensor]]
    scales: str = "fp32"  # activation scales: exact "fp32" or "ue8m0"
    tolerance: float | None = None


def environment(device: torch.device | None = None) -> dict:
    """Facts that a result needs beside it: GPU, versions. JSON-able."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def make_weights(n: int, k: int, device, l2_bytes: int) -> tuple[list, list]:
    """Random weights [n, k] e4m3 with scales, as many as exceed three times the L2 (at least 2)."""
    copies = max(2, -(-3 * l2_bytes // (n * k)))
    weights, scales = [], []
    for _ in range(copies):
        weights.append(
            (torch.randn(n, k, dtype=torch.float32, device=device) * 60).to(torch.float8_e4m3fn)
        )
        scales.append(
            torch.rand(-(-n // 128), k // 128, dtype=torch.float32, device=device) * 0.02 + 1e-3
        )
    return weights, scales


def make_cases(
    shapes: Iterable, rows: Iterable[int], device: torch.device, dtype=torch.bfloat16
) -> Iterable[Case]:
    """Yield a case per shape (name, n, k) and M; weights are shared by the cases of a shape."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    for shape in shapes:
        weights, scales = make_weights(shape.n, shape.k, device, l2_bytes)
        counters = op.counters_for(shape.n, shape.k, device)[0]  # as many as a served layer has
        for m in rows:
            x = torch.randn(m, shape.k, dtype=torch.float32, device=device).to(dtype)
            yield Case(shape.name, m, shape.n, shape.k, x, weights, scales, counters)
        del weights, scales


def reference(case: Case, index: int) -> torch.Tensor:
    """float64 product on operands quantised by the stated rule, [m, n]."""
    codes, scale = oracle.quantise(case.x[:: case.every])
    weight, weight_scale = case.weights[index], case.scales[index]
    return torch.cat(
        [  # slices, so that the double copy stays small
            oracle.multiply(
                codes, scale, weight[first : first + 4096], weight_scale[first // 128 :]
            )
            for first in range(0, case.n, 4096)
        ],
        dim=1,
    )


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||; NaN in `out` gives NaN, which passes no tolerance."""
    return float((out.double() - expected).norm() / expected.norm())


def ours(
    device,
    *,
    config: heuristic.Config | None = None,
    name: str = "ours",
    arch: str | None = None,
    pdl: bool = True,
) -> Candidate:
    """Our kernels as `heuristic` configures them for `device`, or with a given config."""

    def prepare(case: Case):
        problem = heuristic.Case(case.m, case.n, case.k)
        chosen = config or heuristic.config_for(problem, device)

        run = backend.plan(chosen, case.n, case.k, arch=arch, pdl=pdl)

        def call(index: int) -> torch.Tensor:
            weight, scale = case.weights[index], case.scales[index]
            return run(case.x, weight, scale, None, case.x.dtype, chosen, case.counters)

        call.config = asdict(chosen)
        return call

    return Candidate(name, prepare)


def streaming_read(programs: int, *, pdl: bool = True) -> Candidate:
    """Reading the weight and nothing else: the measured floor. Its output is not checked."""

    def prepare(case: Case):
        sink = torch.zeros(1, dtype=torch.int32, device=case.x.device)
        options = {"launch_pdl": True} if pdl else {}

        def call(index: int) -> torch.Tensor:
            kernels.read(case.weights[index], sink, programs, options)
            return sink

        return call

    return Candidate("read", prepare, tolerance=float("inf"))


def stock(fp8_kernel, name: str = "stock") -> Candidate:
    """sglang's Triton linear as shipped, from its module `fp8_kernel` (see host.py)."""

    def prepare(case: Case):
        def call(index: int) -> torch.Tensor:
            codes, scale = fp8_kernel.per_token_group_quant_fp8(case.x, 128)
            return fp8_kernel.w8a8_block_fp8_matmul_triton(
                codes,
                case.weights[index],
                scale,
                case.scales[index],
                [128, 128],
                output_dtype=case.x.dtype,
            )

        return call

    # Its quantiser divides approximately, which moves codes that lie on a tie.
    return Candidate(name, prepare, tolerance=1e-2)


def host_linear(name: str, function: Callable, scales: str = "fp32") -> Candidate:
    """One of sglang's own block-FP8 linear functions, called as its layers call it."""

    def prepare(case: Case):
        def call(index: int) -> torch.Tensor:
            return function(
                input=case.x, weight=case.weights[index], block_size=[128, 128],
                weight_scale=case.scales[index], input_scale=None, bias=None,
            )  # fmt: skip

        return call

    # Their quantisers divide approximately or round scales to powers of two (UE8M0).
    return Candidate(name, prepare, scales, tolerance=1e-2 if scales == "fp32" else 5e-2)


def libraries(without: set[str] | None = None) -> list[Candidate]:
    """The libraries of baselines.py that import here, but for those called as in `without`."""
    found = baselines.importable(without).items()
    return [Candidate(name, prepare, *rest) for name, (prepare, *rest) in found]


def candidates(device, arch: str | None, pdl: bool, functions: dict) -> list[Candidate]:
    """What `sglang-kt-sm120 bench` compares: ours, the host's, other libraries, and a bare read.

    Args:
        device: The `select.Device` that our configurations are for. arch, pdl: How to launch.
        functions: `host.linear_functions()`: name -> (function, "fp32" or "ue8m0").
    """
    listed = [ours(device, arch=arch, pdl=pdl)]
    listed += [host_linear(name, *function) for name, function in functions.items()]
    listed += libraries(without=set(functions))
    return [*listed, streaming_read(16 * device.sm_count, pdl=pdl)]


class _Timed:
    """A candidate's graph on a case, and the times of its replays."""

    def __init__(self, candidate: Candidate, case: Case, call, graph_us: float):
        self.candidate, self.call = candidate, call
        copies = len(case.weights)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for index in range(copies):
            call(index)
        end.record()
        end.synchronize()
        once = max(start.elapsed_time(end) * 1000 / copies, 1.0)
        # Eager time bounds the time of one op from above, so the graph may hold less work than
        # asked for where launches dominate: size it by bytes as well.
        self.repeats = copies * max(1, round(graph_us / min(once, case.bytes / 2e6 + 10) / copies))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for index in range(self.repeats):
                self.out = call(index % copies)
        self.last_index = (self.repeats - 1) % copies
        self.times: list[float] = []
        self.start, self.end = start, end

    def replay(self) -> None:
        self.start.record()
        self.graph.replay()
        self.end.record()

    def collect(self) -> None:
        self.end.synchronize()
        self.times.append(self.start.elapsed_time(self.end) * 1000 / self.repeats)


def time_case(
    case: Case,
    candidates: Sequence[Candidate],
    *,
    rounds: int = ROUNDS,
    graph_us: float = GRAPH_US,
) -> list[Record]:
    """Time every candidate on one case. A wrong or failing one is reported and not timed."""
    records, timed = [], []
    for candidate in candidates:
        record = Record(case.name, case.n, case.k, case.m, candidate.name, bytes=case.bytes)
        record.scales = candidate.scales
        records.append(record)
        tolerance = candidate.tolerance or TOLERANCE[case.x.dtype]
        try:
            call = candidate.prepare(case)
            record.config = getattr(call, "config", {})
            out = call(0)
            if tolerance != float("inf"):
                record.error = case.error(out, 0)
                if not record.error <= tolerance:
                    record.note = "wrong result, not timed"
                    continue
            timed.append((record, _Timed(candidate, case, call, graph_us), tolerance))
        except Exception as failure:  # one candidate's failure must not end the run
            record.note = f"{type(failure).__name__}: {failure}"[:200]
    for _ in range(2):
        for _, entry, _ in timed:
            entry.graph.replay()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for _, entry, _ in timed:
            entry.out.fill_(float("nan") if entry.out.is_floating_point() else 0)
            entry.replay()
            entry.collect()
    for record, entry, tolerance in timed:
        if tolerance != float("inf"):
            again = case.error(entry.out, entry.last_index)
            if not again <= tolerance:
                record.note = f"wrong after timed replays: {again:.2e}"
                continue
        record.us = statistics.median(entry.times)
        record.spread = (max(entry.times) - min(entry.times)) / record.us
    return records


def run(
    shapes: Iterable,
    rows: Iterable[int],
    candidates: Sequence[Candidate],
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = ROUNDS,
    progress: Callable[[list[Record]], None] | None = None,
) -> list[Record]:
    """Time candidates on every shape and M.

    Args:
        shapes: objects with name, n and k. rows: the Ms.
        candidates: what to time, see `ours`, `stock` and `streaming_read`.
        device: default the current one. dtype: of activations and output.
        rounds: timed replays per candidate.
        progress: called with the records of each finished case.

    Returns:
        One record per shape, M and candidate.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("benchmarks need a CUDA device")
    device = device or torch.device("cuda", torch.cuda.current_device())
    records: list[Record] = []
    for case in make_cases(shapes, list(rows), device, dtype):
        latest = time_case(case, candidates, rounds=rounds)
        records.extend(latest)
        if progress:
            progress(latest)
    return records


def geometric_mean(ratios: Iterable[float]) -> float:
    """Geometric mean of positive numbers."""
    return statistics.geometric_mean(ratios)
