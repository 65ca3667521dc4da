"""The host's real libraries on a GPU: probe, layouts, capture and fall-back.

Runs what imports. On a Hopper sgl-kernel's op has a kernel of its own behind the same contract, so
that it serves for real; FlashInfer's groupwise product and sglang's JIT kernel refuse there, which
is what the fall-back is for. To have them: PYTHONPATH with the host's packages.
"""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import replace

import pytest
import torch

from sglang_kt_sm120 import devices, env, graphs, limits, op, select, shapes
from sglang_kt_sm120.backends import cutlass, reference
from sglang_kt_sm120.backends.cutlass import libraries, proof
from sglang_kt_sm120.configs import store
from tests.helpers import activation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
R1 = [
    layer
    for layer in shapes.unique(shapes.SHAPE_SETS["deepseek-r1"])
    if layer.n % 128 == 0 and layer.k % 128 == 0
]
MS = (1, 3, 64, 65, 66, 67, 68, 127, 128, 129, 257, 512)
BF16 = torch.bfloat16


def need(module: str):
    """Import a library of the host, or skip: whatever it raises, it is not usable here."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        pytest.skip(f"{module} does not import: {type(error).__name__}: {error}")


@pytest.fixture(autouse=True)
def presented_as_sm120(monkeypatch, tmp_path):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv(env.CONFIG_DIR.name, str(tmp_path))  # no table of this machine's
    if not devices.is_sm120(torch.cuda.get_device_capability()):
        monkeypatch.setenv(env.TEST_CAPABILITY.name, "12.0")

    def forget():
        devices.device.cache_clear()
        cutlass.forget()
        store.forget()
        op.forget_choices()

    forget()
    yield
    forget()


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "sglang_kt_sm120")
    return caplog


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def layer(n: int, k: int) -> graphs.Layer:
    return graphs.Layer(shapes.Linear("x", n, k), device())


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """As the probe judges: per 128 columns, against float64 on the same operands.

    Not element by element: a Hopper adds FP8 products up in fewer bits than fp32.
    """
    assert got.shape == want.shape
    wrong = (got.double() - want).unflatten(1, (-1, 128)).norm(dim=(0, 2))
    error = (wrong / want.unflatten(1, (-1, 128)).norm(dim=(0, 2))).max().item()
    assert error <= proof.TOLERANCE, error


def expected(made, x):
    return reference.multiply(*reference.quantise(x), made.weight, made.scale)


def force(monkeypatch, n: int, k: int, dtype=BF16) -> limits.Known:
    monkeypatch.setenv(env.BACKEND.name, "cutlass")
    known = op.prove_cutlass(device(), n, k, dtype)
    op.forget_choices()
    return known


def arch() -> str | None:
    return devices.arch(device().index)


@pytest.mark.parametrize("linear", R1, ids=lambda linear: f"{linear.n}x{linear.k}")
def test_sgl_kernel_is_proven_on_every_whole_shape(linear, warnings):
    need("sgl_kernel")
    known = cutlass.prove(device(), linear.n, linear.k, BF16, ("sgl_kernel",), (), arch=arch())
    assert known.proven == ("sgl_kernel",), known
    assert not warnings.records


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@torch.inference_mode()
def test_the_op_is_right_by_sgl_kernel_for_every_m_and_layout(monkeypatch, dtype):
    need("sgl_kernel")
    n, k = 1536, 1024
    assert force(monkeypatch, n, k, dtype).proven == ("sgl_kernel",)
    made = layer(n, k)
    for m in MS:
        x = activation(m, k, dtype, "cuda")
        assert_close(op.block_fp8_linear(x, made.weight, made.scale), expected(made, x))
        codes, scales = reference.quantise(x)
        want = reference.multiply(codes, scales, made.weight, made.scale)
        wide = torch.full((k // 128, m + 3), torch.nan, device="cuda")
        wide[:, :m] = scales.t()
        for given in (scales, scales.t().contiguous().t(), wide.t()[:m]):
            got = op.fp8_gemm_nt_groupwise(codes, made.weight, given, made.scale, dtype)
            assert_close(got, want)


@torch.inference_mode()
def test_captured_as_eager(monkeypatch):
    need("sgl_kernel")
    n, k, m = 1536, 1024, 129
    force(monkeypatch, n, k)
    made, x = layer(n, k), activation(m, k, device="cuda")
    op.block_fp8_linear(x, made.weight, made.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.block_fp8_linear(x, made.weight, made.scale)
    for _ in range(3):
        x.copy_(activation(m, k, device="cuda"))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, op.block_fp8_linear(x, made.weight, made.scale))
        assert_close(out, expected(made, x))


def launches(call) -> list[str]:
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kinds = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == kinds]


@torch.inference_mode()
def test_padding_costs_no_kernel(monkeypatch):
    """sgl-kernel fills and joins to pad M % 4; given whole rows, it launches what M = 132 does."""
    sgl_kernel = need("sgl_kernel")
    n, k = 1536, 1024
    force(monkeypatch, n, k)
    made = layer(n, k)
    counts = {}
    for m in (129, 132):
        x = activation(m, k, device="cuda")
        counts[m] = len(launches(lambda x=x: op.block_fp8_linear(x, made.weight, made.scale)))
    assert 2 <= counts[129] == counts[132], counts
    codes, scales = reference.quantise(activation(129, k, device="cuda"))
    operands = (codes, made.weight.t(), scales.t().contiguous().t(), made.scale.t(), BF16)
    unpadded = len(launches(lambda: sgl_kernel.fp8_blockwise_scaled_mm(*operands)))
    assert unpadded + 1 > counts[129], "sgl-kernel no longer copies: limits.py could let it"


def test_another_layout_is_found_out(monkeypatch):
    """The probe sees that a real kernel got its scales row by row."""
    need("sgl_kernel")
    assert cutlass.prove(device(), 1536, 1024, BF16, ("sgl_kernel",), (), arch=arch()).proven
    wrong = replace(limits.BY_NAME["sgl_kernel"], column_major=False)
    monkeypatch.setitem(limits.BY_NAME, "sgl_kernel", wrong)
    product = libraries.load("sgl_kernel")
    why = proof.judge(product, "sgl_kernel", device(), 1536, 1024, BF16, arch())
    assert why, "row-major scales went unnoticed"


@torch.inference_mode()
def test_the_hosts_default_serves_prefill_alone(monkeypatch):
    """With sgl-kernel's op as the host's default; decode and 2112 stay ours."""
    sgl_kernel = need("sgl_kernel")
    cutlass.offer(sgl_kernel.fp8_blockwise_scaled_mm, is_default=True)
    facts = devices.device(device().index)
    for n, k in ((1536, 1024), (2112, 1024)):
        op.prove_cutlass(device(), n, k, BF16)
        made, known = layer(n, k), op.known_cutlass(device(), n, k, BF16)
        for m in MS:
            choice = select.choose(op.problem_of(m, n, k, BF16), facts, known)
            assert choice.backend == ("cutlass" if m > 64 and n == 1536 else "triton")
            x = activation(m, k, device="cuda")
            got, want = op.block_fp8_linear(x, made.weight, made.scale), expected(made, x)
            assert_close(got[:, :1536], want[:, :1536])
            assert_close(got[:, -128:], want[:, -128:])


def test_the_graph_check_captures_what_the_host_would_serve(monkeypatch):
    """Layers of the check are probed as a server's are: above 64 rows its CUTLASS is captured."""
    sgl_kernel = need("sgl_kernel")
    cutlass.offer(sgl_kernel.fp8_blockwise_scaled_mm, is_default=True)
    served, original = [], cutlass.plan

    def plan(config, n, k, **options):
        served.append((config.kernel, n, k))
        return original(config, n, k, **options)

    monkeypatch.setattr(cutlass, "plan", plan)
    rows = list(graphs.check([shapes.Linear("x", 1536, 1024)], [8, 128], device()))
    assert [row.bs for row in rows if row.equal] == [128, 8]
    assert served == [("sgl_kernel", 1536, 1024)]


def struck_off(name: str, warnings) -> str:
    """Probe a kernel that this GPU cannot run; ours serves, after one warning for all shapes."""
    for n, k in ((1536, 1024), (1024, 512)):
        known = op.prove_cutlass(device(), n, k, BF16, every=True)
        assert name not in known.proven
        made, x = layer(n, k), activation(129, k, device="cuda")
        assert_close(op.block_fp8_linear(x, made.weight, made.scale), expected(made, x))
    title = limits.BY_NAME[name].title
    mine = [record for record in warnings.records if title in record.getMessage()]
    assert len(mine) == 1, [record.getMessage() for record in mine]
    assert "N=1536 K=1024, nor for any other layer" in mine[0].getMessage()
    return dict(known.struck)[name]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 12,
    reason="FlashInfer serves SM12x",
)
@torch.inference_mode()
def test_flashinfer_refuses_this_gpu_and_ours_serves(warnings):
    need("flashinfer.gemm")
    assert "BackendSupportedError" in struck_off("flashinfer", warnings)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 12,
    reason="sglang's JIT kernel serves SM12x",
)
@torch.inference_mode()
def test_sglangs_jit_kernel_refuses_this_gpu_and_ours_serves(warnings):
    for module in ("sglang.kernels.ops.gemm", "sglang.jit_kernel"):
        try:
            host = importlib.import_module(f"{module}.fp8_blockwise_gemm")
            break
        except Exception:
            continue
    else:
        pytest.skip("no sglang with a JIT kernel imports here")
    cutlass.offer(host.fp8_blockwise_scaled_mm, is_default=True)
    assert "requires SM120" in struck_off("sglang_jit", warnings)
    assert host.__name__ in sys.modules


@pytest.mark.parametrize("name", limits.NAMES)
@torch.inference_mode()
def test_every_kernel_of_an_sm12x_host_is_right(monkeypatch, name):
    """On a real SM12x card: each kernel that its host has, over every M of interest."""
    if torch.cuda.get_device_capability()[0] != 12:
        pytest.skip("needs an SM12x GPU")
    n, k = 1536, 1024
    known = cutlass.prove(device(), n, k, BF16, (name,), (), arch=arch())
    if not known.proven:
        pytest.skip(f"{name}: {dict(known.struck)[name]}")
    call = cutlass.plan(limits.Cutlass(name), n, k, arch=arch())
    made = layer(n, k)
    for m in MS:
        x = activation(m, k, device="cuda")
        got = call(x, made.weight, made.scale, None, BF16, None, None)
        assert_close(got, expected(made, x))
