"""torch.compile, piecewise and prefill graphs in a real server: served by us, with eager's tokens.

Every token must be eager's: so it was wherever both came up, compiled or not.
"""

from __future__ import annotations

import os

import pytest

from tests.e2e import compare, hosts
from tests.e2e.cases import MLA, NEWER, QWEN
from tests.e2e.judge import calls, here, stock_calls

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
TRTLLM = "gemm_fp8_nt_groupwise does not support backend 'trtllm' with capability 120"


def eager_of(name: str) -> str:
    return name.rpartition("-")[0] + "-eager"


def compiled_graphs(got: dict) -> int:
    return max(process["dynamo"]["graphs"] for process in got["processes"])


@pytest.mark.parametrize("name", here(*MODES, *DEFAULTS))
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


@pytest.mark.cases(*MLA_MODES)
@pytest.mark.parametrize("mode", REFUSED)
def test_what_the_host_refuses_it_refuses_without_us_too(mode, record):
    names = (f"{KT}-{MLA}-{mode}", f"{KT}-{MLA}-triton-{mode}-without")
    for name, message in zip(names, REFUSED[mode], strict=True):
        got = record(name)
        assert not got["answers"]
        assert any(message in line for line in got["traceback"]), (name, got["traceback"])
        assert not any("sglang_kt_sm120" in line for line in got["traceback"])
