"""The rules of tests/hosts/judge.py find what they are there to find."""

from __future__ import annotations

import copy

import pytest

from tests.hosts import judge

TRITON = "triton_w8a8_block_fp8_linear"
GOOD_ASK = {
    "backend": "auto", "method": "fp8", "load": True, "stock": "triton_w8a8_block_fp8_linear",
    "got": "sglang_kt_sm120.linear.Sm120BlockFp8Linear", "same": False, "ours": True,
    "scale": "torch.float32", "output": {"quantised": 1e-3, "exact": 0.02},
}  # fmt: skip
STOCK_ASK = {
    "backend": "auto", "method": "fp8", "load": False, "stock": "f", "got": "f", "same": True,
    "ours": False,
}  # fmt: skip
REFUSED = {
    "backend": "cutlass", "method": "fp8", "load": False, "stock": "refused: no",
    "error": {"message": "no", "type": "RuntimeError", "frames": []},
}  # fmt: skip
PER_TENSOR = STOCK_ASK | {"block": None, "load": True, "left": "sglang.f"}
OTHER = {"type": "TypeError", "message": "a stand-in's own mistake"}
LINE = ["ERROR", f"sglang refuses x on y; what works here: {judge.REMEDY}."]


def result(*asks, wrapped=True, log=()) -> dict:
    return copy.deepcopy(
        {"wrapped": wrapped, "twice": False, "imported": [], "log": list(log), "asks": list(asks),
         "reads": {"SGLANG_ENABLE_FLASHINFER_FP8_GEMM": True}}
    )  # fmt: skip


def played() -> dict:
    cutlass = STOCK_ASK | {"backend": "cutlass"}
    off = STOCK_ASK | {"stock": TRITON, "got": TRITON}
    return {
        "stock, 12.0, on": result(STOCK_ASK, wrapped=False),
        "plugin, 12.0, off": result(GOOD_ASK, cutlass, REFUSED, PER_TENSOR, log=[LINE]),
        "plugin, 9.0, on": result(STOCK_ASK),
        "plugin, 12.0, switched off": result(off, PER_TENSOR, wrapped=False),
        "plugin, 12.1, absent": result(GOOD_ASK | {"deterministic": True}),
    }


def test_a_good_play_has_no_findings():
    assert judge.findings(played()) == []


@pytest.mark.parametrize(
    ("scenario", "ask", "change", "says"),
    [
        ("plugin, 12.0, off", 0, {"ours": False}, "not served by the plugin"),
        ("plugin, 12.0, off", 0, {"scale": "torch.int32"}, "weight scales"),
        ("plugin, 12.0, off", 0, {"output": {"quantised": 2e-3, "exact": 0.02}}, "wrong numbers"),
        ("plugin, 12.0, off", 0, {"output": {"quantised": float("nan"), "exact": 0}}, "wrong"),
        ("plugin, 12.0, off", 1, {"same": False}, "own function object"),
        ("plugin, 12.0, off", 2, {"error": {"message": "other"}}, "the host refuses"),
        ("plugin, 12.0, off", 3, {"left": "sglang_kt_sm120.linear."}, "blocks of None"),
        ("plugin, 12.0, off", 3, {"left": None, "stage": "load"}, "blocks of None"),
        ("plugin, 12.0, switched off", 1, {"left": "sglang.g"}, "blocks of None"),
        ("plugin, 9.0, on", 0, {"same": False}, "own function object"),
        ("plugin, 12.0, switched off", 0, {"got": "g"}, "sglang's is"),
        ("plugin, 12.1, absent", 0, {"deterministic": False}, "deterministic"),
        ("plugin, 12.0, off", None, {"wrapped": False}, "exactly once"),
        ("plugin, 12.0, off", None, {"twice": True}, "exactly once"),
        ("plugin, 12.0, off", None, {"log": []}, "without a line"),
        ("plugin, 12.0, off", None, {"log": [LINE, ["ERROR", "failed"]]}, "logged an error"),
        ("plugin, 12.0, switched off", None, {"wrapped": True}, "is left"),
        ("stock, 12.0, on", None, {"imported": ["sglang_kt_sm120"]}, "meant to be stock"),
        ("stock, 12.0, on", 0, {"stage": "use", "error": OTHER}, "in another way"),
        ("plugin, 12.0, switched off", 0, {"stage": "use", "error": OTHER}, "in another way"),
        ("stock, 12.0, on", None, {"died": "x"}, "died"),
    ],
)
def test_each_rule_can_fail(scenario, ask, change, says):
    observed = played()
    target = observed[scenario] if ask is None else observed[scenario]["asks"][ask]
    target.update(change)
    assert any(says in finding for finding in judge.findings(observed))


@pytest.mark.parametrize("warnings", [0, 2])
def test_the_variable_is_served_with_one_warning(warnings):
    name = "SGLANG_ENABLE_FLASHINFER_FP8_GEMM"
    ask = GOOD_ASK | {"stock": judge.FLASHINFER}
    log = [["WARNING", f"{name}=1 was asked for"]]
    good = {f"plugin, 12.0, {name}": result(ask, log=log)}
    assert judge.findings(good) == []
    bad = {f"plugin, 12.0, {name}": result(ask, log=log * warnings)}
    assert judge.findings(bad) != []
