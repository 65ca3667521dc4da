"""The CUDA-graph check: capture a model's linears as a server would, replay, compare with eager.

For each batch size, largest first as sglang does it: all layers in one graph, then every layer in a
graph of its own, then two layers (or one twice) on two streams inside one graph. Every graph is
replayed twice with new inputs and must equal the eager result bit for bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from sglang_kt_sm120 import op, shapes
from sglang_kt_sm120.linear import BLOCK_SIZE, Sm120BlockFp8Linear

REPLAYS = 2
TIMED_REPLAYS = 10


def sglang_batch_sizes(largest: int) -> list[int]:
    """Return the batch sizes that sglang captures by default up to `largest`, ascending."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16), *range(544, 1025, 32)]
    return [size for size in sizes if size <= largest]


@dataclass
class Row:
    """What one batch size gave.

    Attributes:
        bs: Rows of the activation.
        kernels: GPU kernels in the graph of all layers; None where they could not be counted, as
            the next three are None where there was no such graph.
        capture_ms: Capturing that graph.
        pool_mib: Memory that the graph of all layers added to the pool it shares with those of
            larger batch sizes.
        replay_us: One replay of the graph of all layers; the median of ten.
        equal: Every replay of every graph equalled eager.
        failures: What differed or failed: graph, shape, first differing element.
    """

    bs: int
    kernels: int | None = None
    capture_ms: float | None = None
    pool_mib: float | None = None
    replay_us: float | None = None
    equal: bool = True
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Where:
    """Where graphs are captured: their memory pool, the stream, and one beside it.

    `kept` are the graphs of all layers with their inputs: like a server's they live on, and share
    the pool.
    """

    pool: tuple
    stream: torch.cuda.Stream
    side: torch.cuda.Stream
    kept: list[tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = field(default_factory=list)

    def bytes(self) -> int:
        """Memory that the pool holds now."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == self.pool)


class Layer:
    """A random block-FP8 layer, called as sglang's `Fp8LinearMethod` calls it.

    As when a server loads, the host's CUTLASS kernels that a choice could take are probed, where
    `host.offer_cutlass` has been called.
    """

    def __init__(self, linear: shapes.Linear, device: torch.device):
        self.name, n, k = f"{linear.name} [{linear.n}, {linear.k}]", linear.n, linear.k
        values = torch.randn(n, k, dtype=torch.float32, device=device)
        self.weight = values.to(torch.float8_e4m3fn)
        self.scale = torch.rand(-(-n // 128), k // 128, dtype=torch.float32, device=device)
        self.scale += 0.01
        self.linear = Sm120BlockFp8Linear(_no_stock)
        self.linear.prepare(self.weight, self.scale)
        op.prove_cutlass(device, n, k, torch.bfloat16)

    def inputs(self, bs: int) -> torch.Tensor:
        return torch.randn(
            bs, self.weight.shape[1], dtype=torch.bfloat16, device=self.weight.device
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(
            input=x, weight=self.weight, block_size=BLOCK_SIZE, weight_scale=self.scale
        )


def _no_stock(**_):
    raise RuntimeError("the graph check does not use the host's function")


def check(
    linears: list[shapes.Linear], batch_sizes: list[int], device: torch.device
) -> Iterator[Row]:
    """Yield a Row for each batch size, largest first, as soon as it is known.

    Raises:
        torch.OutOfMemoryError: As soon as one does not fit; what else fails is in the rows.
    """
    layers = [Layer(linear, device) for linear in shapes.unique(linears)]
    # One stream to capture on and one beside it, as a server has: a layer's counters have a row
    # for each stream, and only so many.
    where = Where(
        torch.cuda.graph_pool_handle(), torch.cuda.Stream(device), torch.cuda.Stream(device)
    )
    with torch.inference_mode():
        for bs in sorted(set(batch_sizes), reverse=True):
            yield _check_batch(layers, bs, where)


def _check_batch(layers: list[Layer], bs: int, where: Where) -> Row:
    row = Row(bs)
    alone = torch.cuda.graph_pool_handle()  # what is captured only to be compared
    before = where.bytes()
    whole = _compare(row, "all layers", layers, where, in_order)
    if whole is not None:
        row.capture_ms, graph, inputs = whole
        where.kept.append((graph, inputs))
        row.pool_mib = (where.bytes() - before) / 2**20
    apart = replace(where, pool=alone)
    for layer in layers:
        _compare(row, "alone", [layer], apart, in_order)
    _compare(row, "two streams", (layers * 2)[:2], apart, on_two_streams)
    if whole is not None:
        try:
            row.replay_us = _median_us(graph.replay)
            with contextlib.suppress(Exception):  # a profiler that is missing says nothing of us,
                row.kernels = kernel_count(graph.replay)
            torch.cuda.synchronize()  # and what failed on the GPU fails here again
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            row.failures.append(f"all layers, replayed: {type(error).__name__}: {error}")
    row.equal = not row.failures
    return row


def in_order(layers: list[Layer], xs: list[torch.Tensor], where: Where) -> list[torch.Tensor]:
    """Run the layers one after another."""
    return [layer(x) for layer, x in zip(layers, xs, strict=True)]


def on_two_streams(layers: list[Layer], xs: list[torch.Tensor], where: Where) -> list[torch.Tensor]:
    """Run the second layer on a stream of its own beside the first."""
    main, side = torch.cuda.current_stream(), where.side
    side.wait_stream(main)
    with torch.cuda.stream(side):
        second = layers[1](xs[1])
    first = layers[0](xs[0])
    main.wait_stream(side)
    return [first, second]


def _compare(row: Row, name: str, layers: list[Layer], where: Where, run: Callable):
    """Capture `run`, replay it with new inputs, note what differs or fails.

    Returns (capture ms, graph, its inputs), as replaying needs both alive; None where it fails: a
    failure is a finding, and what follows is tried.
    """
    try:
        return _capture_and_compare(row, name, layers, where, run)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        names = ", ".join(layer.name for layer in layers)
        row.failures.append(f"{name}: {names}: {type(error).__name__}: {error}")
        return None


def _capture_and_compare(row: Row, name: str, layers: list[Layer], where: Where, run: Callable):
    static = [layer.inputs(row.bs) for layer in layers]
    stream = where.stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # sglang runs twice before it captures, on the same stream
        for _ in range(2):
            run(layers, static, where)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    start = time.perf_counter()
    with torch.cuda.graph(graph, pool=where.pool, stream=stream):
        outputs = run(layers, static, where)
    capture_ms = (time.perf_counter() - start) * 1e3
    for _ in range(REPLAYS):
        for x, layer in zip(static, layers, strict=True):
            x.copy_(layer.inputs(row.bs))
        for output in outputs:
            output.fill_(torch.nan)
        graph.replay()
        expected = in_order(layers, static, where)
        for layer, got, eager in zip(layers, outputs, expected, strict=True):
            difference = first_difference(got, eager)
            if difference:
                row.failures.append(f"{name}: {layer.name} at batch size {row.bs}: {difference}")
    return capture_ms, graph, static


def first_difference(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return where two tensors first differ, bit for bit, as text; None where nowhere."""
    different = got.view(torch.int16) != expected.view(torch.int16)
    if not bool(different.any()):
        return None
    index = tuple(different.nonzero()[0].tolist())
    return f"element {list(index)} is {got[index].item()}, eager gives {expected[index].item()}"


def _median_us(replay: Callable[[], None]) -> float:
    times = []
    for _ in range(TIMED_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def kernel_count(replay: Callable[[], None]) -> int | None:
    """Return how many GPU kernels one replay runs, by torch's profiler; None where it sees none."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        replay()
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len(kernels) or None
