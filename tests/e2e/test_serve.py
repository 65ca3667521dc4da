"""Real servers on a GPU: up, through CUDA-graph capture, and generating, with the plugin's kernels.

Where the GPU is no SM12x, the starts wear an SM120 personality (see inside/e2e_inside.py) and our
kernels are lowered as for SM120. A start in which the plugin was not active cannot pass: the calls
of its backends are counted in the scheduler process.

E2E_RECORDS=FOLDER judges the records of an earlier run instead of starting anything.
"""

from __future__ import annotations

import os

import pytest

from tests.e2e import compare, hosts, runs
from tests.e2e.cases import CASES, MLA, QWEN, YARDSTICKS
from tests.e2e.judge import HOSTS, calls, here, stock_calls

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not (torch.cuda.is_available() or os.environ.get("E2E_RECORDS")), reason="no CUDA device"
    ),
    pytest.mark.skipif(not hosts.pythons(), reason="no real sglang host: see tests/e2e/hosts.py"),
]
CUTLASS = "cutlass_w8a8_block_fp8_linear_with_fallback"
REFUSED = "gemm_fp8_nt_groupwise does not support backend 'trtllm' with capability 120"

SERVED = [
    name
    for name, case in CASES.items()
    if case.plugin and not case.flags and (case.host != "installed" or not case.deep_gemm)
]
CRASHES = [name for name in CASES if name.endswith("-crash")]
STOCK = [name for name in CASES if "-stock-" in name]


@pytest.mark.parametrize("name", here(*STOCK))
def test_stock_serves_without_the_plugin(name, record):
    """The yardsticks: sglang's own Triton and CUTLASS paths, and nothing of ours."""
    got = record(name)
    assert got["answers"], got["traceback"] or got["lines"]
    assert calls(got, by="plugin") == 0
    own = {"triton": "triton_w8a8_block_fp8_linear", "cutlass": CUTLASS}[CASES[name].backend]
    assert calls(got, by="stock", name=own) > 0


@pytest.mark.parametrize("name", here(*CRASHES))
def test_without_the_plugin_it_crashes_in_capture(name, record):
    got = record(name)
    assert not got["answers"]
    assert any(REFUSED in line for line in got["traceback"]), got["traceback"][-3:] or got["lines"]
    assert any("cuda_graph_runner" in line for line in got["traceback"])
    assert calls(got, by="plugin") == 0


@pytest.mark.parametrize("name", here(*SERVED))
def test_served_through_graph_capture(name, record):
    got = record(name)
    assert got["answers"], got["traceback"] or got["lines"]
    said = "\n".join(got["lines"])
    assert f"Capture cuda graph bs {runs.GRAPH_BATCH_SIZES}" in said
    assert "is active on" in said
    arch = got["environment"].get("SGLANG_KT_SM120_TEST_CAPABILITY") and "sm120"
    for m in runs.GRAPH_BATCH_SIZES:
        assert calls(got, by="plugin", name="triton", m=m, capturing=True, arch=arch or ""), m
    assert calls(got, by="plugin", name="reference") == 0
    assert not stock_calls(got)


@pytest.mark.parametrize("name", here(*SERVED))
def test_tokens_are_those_of_stock_triton(name, record):
    """Tokens differ at near-ties alone, numbers hardly more than between the host's own paths."""
    case = CASES[name]
    host = case.host if case.host in YARDSTICKS else YARDSTICKS[0]
    own = f"{host}-{case.checkpoint}-stock-"
    starts = [record(n) for n in (name, f"{case.host}-{case.checkpoint}-stock-triton")]
    starts += [record(own + way) for way in ("triton", "cutlass", "triton-lowered")]
    if not all(run["answers"] for run in starts):
        pytest.fail("no answers to compare")
    got, stock, triton, *others = (run["answers"] for run in starts)
    result = compare.compare(got, stock)
    allowed = max(compare.compare(way, triton)["prompt_mean_difference"] for way in others)
    print(name, "against stock Triton:", result, "the host's own paths:", allowed)
    assert compare.near_ties_only(result), result
    assert result["prompt_mean_difference"] <= 1.5 * allowed


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        pytest.param(name, flag, marks=pytest.mark.cases(name))
        for name, flag in (
            (f"kt-0.7.2-{MLA}-trtllm", "--fp8-gemm-backend flashinfer_trtllm"),
            (f"kt-0.7.2-{MLA}-trtllm-variable", "SGLANG_ENABLE_FLASHINFER_FP8_GEMM=1"),
        )
        if "kt-0.7.2" in HOSTS
    ],
)
def test_an_explicit_trtllm_is_served_with_one_warning(name, flag, record):
    warned = [line for line in record(name)["lines"] if "sglang-kt-sm120 serves instead" in line]
    assert len(warned) == 1
    assert flag in warned[0]


@pytest.mark.parametrize("kind", [MLA, QWEN])
def test_deep_gemm_on_or_off_changes_no_token(kind, record):
    """The same kernels serve both; prompts may share prefill batches differently, so near-ties."""
    if "kt-0.6.1" not in HOSTS:
        pytest.skip("needs sglang-kt 0.6.1")
    off, on = record(f"kt-0.6.1-{kind}-auto"), record(f"kt-0.6.1-{kind}-auto-deepgemm")
    assert compare.near_ties_only(compare.compare(on["answers"], off["answers"]))
