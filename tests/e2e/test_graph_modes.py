"""Graphs of every kind, torch.compile, deterministic inference in a real server: eager's tokens.

Every token must be eager's: so it was wherever both came up, compiled or not.
"""

from __future__ import annotations

import os

import pytest

from sglang_kt_sm120 import heuristic
from tests.e2e import compare, hosts, runs
from tests.e2e.cases import CASES, FEWER, MLA, MLA_BF16, NEWER, QWEN
from tests.e2e.judge import calls, captured, here, ours, stock_calls

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not (torch.cuda.is_available() or os.environ.get("E2E_RECORDS")), reason="no CUDA device"
    ),
    pytest.mark.skipif(not hosts.pythons(), reason="no real sglang host: see tests/e2e/hosts.py"),
]
KT = "kt-0.6.1"
MODES = [f"{KT}-{QWEN}-{mode}" for mode in ("compiled", "piecewise")]
DETERMINISTIC = f"{KT}-{QWEN}-deterministic"
DEFAULTS = [f"{NEWER}-{kind}-default" for kind in (QWEN, MLA)]
#: What the host cannot do with its MLA model: it autotunes the router's product in capture, and
#: traces FlashInfer's routing, which cannot be traced. Without us it comes as far, or less far.
INDUCTOR = "torch._inductor.exc.InductorError"  # fp64 numbers for sglang's quantisation kernel
REFUSED = {
    "compiled": ("operation not permitted when stream is capturing", INDUCTOR),
    "piecewise": ("fused_topk_deepseek", "fused_topk_deepseek"),
}
WITHOUT = [f"{KT}-{QWEN}-{backend}-{mode}-without" for backend in ("auto", "triton")
           for mode in REFUSED]  # fmt: skip
MLA_MODES = [f"{KT}-{MLA}-{way}{mode}{without}" for mode in REFUSED
             for way, without in (("", ""), ("triton-", "-without"))]  # fmt: skip
#: Rows with which a start compiles kernels, before it knows of any split: see warm.py.
COMPILED_WITH = (16, 32, 64)
TRTLLM = "gemm_fp8_nt_groupwise does not support backend 'trtllm' with capability 120"


def eager_of(name: str) -> str:
    """Return the start without graphs whose other flags, as far as they change sums, are equal."""
    own = f"{name}-eager"
    return own if own in CASES else name.rpartition("-")[0] + "-eager"


def launched(got: dict) -> set[str]:
    return {name for process in got["processes"] for name in process["kernels"]}


def compiled_graphs(got: dict) -> int:
    return max(process["dynamo"]["graphs"] for process in got["processes"])


@pytest.mark.parametrize("name", here(*MODES, *DEFAULTS, DETERMINISTIC))
def test_served_with_the_tokens_of_eager(name, record):
    got, eager = record(name), record(eager_of(name))
    assert got["answers"], got["traceback"] or got["lines"]
    assert eager["answers"], eager["traceback"] or eager["lines"]
    assert calls(got, by="plugin", name="triton", capturing=True) > 0
    assert calls(eager, by="plugin", name="triton") > 0
    assert calls(eager, by="plugin", capturing=True) == 0
    assert not stock_calls(got)
    result = compare.compare(got["answers"], eager["answers"])
    print(name, "against eager:", result)
    assert result["equal"] == result["prompts"], result


@pytest.mark.cases(f"{KT}-{QWEN}-eager")
@pytest.mark.parametrize("name", here(DETERMINISTIC, f"{DETERMINISTIC}-eager"))
def test_deterministic_inference_has_one_order_of_k(name, record):
    """The flag reaches the scheduler's kernels: how K is split follows from N and K alone."""
    got = record(name)
    assert got["answers"], got["traceback"] or got["lines"]
    rows = [row for row in ours(got) if row["capturing"] or row["m"] not in COMPILED_WITH]
    assert any(row["m"] <= 64 for row in rows)
    assert any(row["m"] > 64 for row in rows)
    for row in rows:
        assert row["ranges"] == heuristic.fixed_splits(row["n"], row["k"]), row
    # The kernel that decodes few rows without the flag has orders of its own.
    assert "_direct_kernel" not in launched(got)
    assert "_direct_kernel" in launched(record(f"{KT}-{QWEN}-eager"))


@pytest.mark.parametrize("name", here(DETERMINISTIC))
def test_deterministic_inference_gives_the_same_numbers_with_and_without_graphs(name, record):
    """Also where a graph pads the batch, and prompts meet in other batches."""
    result = compare.compare(record(name)["answers"], record(eager_of(name))["answers"])
    assert result["prompt_worst_difference"] == 0, result
    assert result["worst_logprob_difference"] == 0, result


@pytest.mark.parametrize("name", here(f"{NEWER}-{QWEN}-default"))
def test_prefill_was_captured_too(name, record):
    """From the sizes that decode has as well up to the largest that the flags allow."""
    prefill = captured(record(name)) - set(runs.GRAPH_BATCH_SIZES)
    assert min(prefill) < 64 < max(prefill) == dict(FEWER)["cuda_graph_max_bs_prefill"]


@pytest.mark.parametrize("name", here(f"{NEWER}-{MLA}-default"))
def test_the_host_captures_no_prefill_of_mla(name, record):
    """And says so; decode is captured all the same."""
    got = record(name)
    assert any("incompatible with MLA attention" in line for line in got["lines"]), got["lines"]
    assert captured(got) == set(runs.GRAPH_BATCH_SIZES)


@pytest.mark.parametrize("name", here(*MODES))
def test_torch_compile_was_at_work(name, record):
    """More graphs than sglang's own helpers, which it compiles in any mode."""
    assert compiled_graphs(record(name)) > compiled_graphs(record(eager_of(name)))


@pytest.mark.cases(*WITHOUT)
@pytest.mark.parametrize(
    ("name", "fails_with"),
    [
        ("auto-compiled", TRTLLM),
        ("auto-piecewise", TRTLLM),
        ("triton-compiled", INDUCTOR),
        ("triton-piecewise", None),
    ],
)
def test_what_the_host_does_by_itself(name, fails_with, record):
    got = record(f"{KT}-{QWEN}-{name}-without")
    if fails_with is None:
        assert got["answers"], got["traceback"] or got["lines"]
    else:
        assert not got["answers"]
        assert any(fails_with in line for line in got["traceback"]), got["traceback"]


@pytest.mark.parametrize("name", here(f"{KT}-{QWEN}-auto-piecewise-alone-without"))
def test_the_hosts_trtllm_path_does_not_serve_piecewise_graphs_either(name, record):
    """Without decode graphs to crash first, torch.compile meets FlashInfer's checks, and ends."""
    got = record(name)
    assert not got["answers"]
    ended = "\n".join(got["traceback"])
    assert "init_piecewise_cuda_graphs" in ended, got["lines"]
    assert "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback" in ended, ended
    assert "sglang_kt_sm120" not in ended


@pytest.mark.parametrize("name", here(f"{KT}-{MLA_BF16}-compiled-without"))
def test_the_hosts_compiled_router_dies_in_capture_without_any_fp8(name, record):
    got = record(name)
    assert not got["answers"]
    assert any(REFUSED["compiled"][0] in line for line in got["traceback"]), got["traceback"]


@pytest.mark.cases(*MLA_MODES)
@pytest.mark.parametrize("mode", REFUSED)
def test_what_the_host_refuses_it_refuses_without_us_too(mode, record):
    names = (f"{KT}-{MLA}-{mode}", f"{KT}-{MLA}-triton-{mode}-without")
    for name, message in zip(names, REFUSED[mode], strict=True):
        got = record(name)
        assert not got["answers"]
        assert any(message in line for line in got["traceback"]), (name, got["traceback"])
        assert not any("sglang_kt_sm120" in line for line in got["traceback"])
