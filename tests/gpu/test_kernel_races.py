"""Dependent launch under load: 10,000 rounds of chains whose layers hand memory on to each other.

A kernel that wrote before its producer had finished, or read an activation, a partial sum or a
weight too early, would change a result here. Each round is compared bit for bit.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from sglang_kt_sm120 import heuristic
from sglang_kt_sm120.backends import triton as backend

PROPERTIES = torch.cuda.get_device_properties(0)
CAPABILITY = (PROPERTIES.major, PROPERTIES.minor)
ARCH = None if CAPABILITY == (12, 0) else "sm120"
DEVICE = SimpleNamespace(
    capability=CAPABILITY,
    sm_count=PROPERTIES.multi_processor_count,
    shared_bytes=getattr(PROPERTIES, "shared_memory_per_block_optin", 101376),
)
ROUNDS = 10_000
#: Layers that hand their output on. Of small ones, and of such as larger models have.
CHAIN = ((2112, 2048), (7168, 2112 // 128 * 128), (576, 7168), (2048, 384), (2048, 2048))
ROWS = (1, 8, 16, 24, 64, 300)
LARGE = ((7168, 7168), (4096, 7168), (9216, 4096), (7168, 9216))


class Layer:
    """One linear with its own counters, as `prepare` makes it."""

    def __init__(self, n, k, deterministic=False):
        self.deterministic = deterministic
        self.weight = (torch.randn(n, k, device="cuda") * 60).to(torch.float8_e4m3fn)
        self.scale = (torch.rand(-(-n // 128), k // 128, device="cuda") + 0.5) / 60 / k**0.5
        counters = heuristic.counters_needed(n, k)
        self.counters = torch.zeros(counters, dtype=torch.int32, device="cuda")

    def __call__(self, x, pdl=True):
        problem = SimpleNamespace(
            m=x.shape[0],
            n=self.weight.shape[0],
            k=x.shape[1],
            prequantised=False,
            deterministic=self.deterministic,
        )
        config = heuristic.config_for(problem, DEVICE)
        return backend.run(
            x, self.weight, self.scale, None, x.dtype, config, self.counters, arch=ARCH, pdl=pdl
        )


def chain(layers, x, pdl=True):
    for layer in layers:
        x = layer(x[:, : layer.weight.shape[1]], pdl)
    return x


def replayed(body, rounds, per_graph=50):
    """Capture `body` per_graph times and replay until `rounds` are done."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(per_graph):
            body()
    for _ in range(rounds // per_graph):
        graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("shapes", [CHAIN, LARGE], ids=["small", "large"])
def test_layers_that_share_freed_memory(shapes, m):
    layers = [Layer(n, k) for n, k in shapes]
    x = torch.randn(m, shapes[0][1], device="cuda").bfloat16()
    expected = chain(layers, x, pdl=False)
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")

    def body():
        # Only the comparison at the end of a round stands between two rounds of ours.
        wrong.add_((chain(layers, x) != expected).any())

    replayed(body, ROUNDS)
    assert wrong.item() == 0
    assert not any(layer.counters.any() for layer in layers)


@pytest.mark.skipif(PROPERTIES.multi_processor_count != 132, reason="the shapes are for 132 SMs")
def test_the_chains_above_meet_every_decode_variant():
    met = {
        heuristic.config_for(heuristic.Case(m, n, k), DEVICE).variant()
        for n, k in (*CHAIN, *LARGE)
        for m in ROWS
    }
    assert heuristic.RESOURCES.keys() <= met
    assert any(config.kernel == "tiled" for config in met)


def test_back_to_back_without_any_other_kernel():
    """No plain kernel between ours: every start overlaps the end of the one before."""
    layers = [Layer(n, k) for n, k in CHAIN]
    x = torch.randn(4, CHAIN[0][1], device="cuda").bfloat16()
    expected = chain(layers, chain(layers, chain(layers, x, False), False), False)
    for _ in range(ROUNDS // 100):
        outs = [chain(layers, chain(layers, chain(layers, x))) for _ in range(100)]
        assert all(torch.equal(out, expected) for out in outs[::25])


@pytest.mark.parametrize("m", [1, 16, 24, 64])
@pytest.mark.parametrize(("n", "k"), [(2112, 2048), (4096, 7168), (7168, 7168)])
def test_a_weight_written_by_the_kernel_before(n, k, m):
    layer = Layer(n, k)
    x = torch.randn(m, k, device="cuda").bfloat16()
    first, second = layer.weight.clone(), layer.weight.flip(0).contiguous()
    expected = [layer(x, pdl=False)]
    layer.weight.copy_(second)
    expected.append(layer(x, pdl=False))
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")

    def body():
        for weight, result in zip((first, second), expected, strict=True):
            layer.weight.copy_(weight)
            out = layer(x)
            again = layer(x)  # starts while the one before still runs
            wrong.add_(((out != result) | (again != result)).any())

    replayed(body, ROUNDS // 2, per_graph=25)
    assert wrong.item() == 0


def test_two_streams_with_their_own_counters():
    layers = [Layer(2112, 2048), Layer(2112, 2048)]
    x = torch.randn(8, 2048, device="cuda").bfloat16()
    expected = [layer(x, pdl=False) for layer in layers]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs = [[], []]
    for _ in range(500):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[index].append(layers[index](x))
    torch.cuda.synchronize()
    for index in range(2):
        assert all(torch.equal(out, expected[index]) for out in outs[index])
