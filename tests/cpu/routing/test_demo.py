"""`make demo` judges what it sees: it must fail when a host does not crash or we do not serve."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.hosts import client, demo, lab

STOCK = "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback"
CRASH = {
    "asked": {"rows": 4},
    "dispatch": {"name": STOCK, "module": "fp8_utils", "stock": STOCK, "ours": False, "type": "f"},
    "error": {
        "type": "BackendSupportedError",
        "module": "flashinfer.utils",
        "message": f"{demo.REPORTED}0",
        "frames": [],
    },
}
SERVED = {
    "asked": {"rows": 4},
    "dispatch": {"name": "ours", "module": "", "stock": None, "ours": True, "type": "ours"},
    "output": {"quantised": 1.6e-3, "exact": 2.6e-2},
}
HOST = {"sglang-kt": "0.6.1", "flashinfer": "0.6.3", "torch": "2"}


def answer(python, scenario: dict) -> dict:
    """What a host would answer, were everything as it should be."""
    on = scenario["plugin"] and scenario["env"].get("SGLANG_KT_SM120_ENABLE") != "0"
    layer = copy.deepcopy(SERVED if on else CRASH)
    return {"host": HOST, "layers": [layer], "log": []}


@pytest.fixture
def act(monkeypatch):
    """Run act one with answers changed by `change(scenario, result)`; return what fails."""

    def run(change=lambda scenario, result: None) -> list[str]:
        def once(python, scenario):
            result = answer(python, scenario)
            change(scenario, result)
            return result

        monkeypatch.setattr(client, "once", once)
        with ThreadPoolExecutor(1) as pool:
            played = demo.Demo(pool)
            played.plugin = "somewhere"
            demo._first_act(played, lab.Host("sglang-kt-0.6.1", lab.ROOT))
        return played.failed

    return run


def test_nothing_fails_where_everything_holds(act):
    assert act() == []


def test_a_host_that_does_not_crash_is_noticed(act):
    def mended(scenario, result):
        if not scenario["plugin"]:
            del result["layers"][0]["error"]

    assert any("reported crash" in claim for claim in act(mended))


def test_another_crash_is_not_taken_for_the_reported_one(act):
    def other(scenario, result):
        if not scenario["plugin"]:
            result["layers"][0]["error"]["module"] = "builtins"

    assert any("reported crash" in claim for claim in act(other))


def test_a_plugin_that_is_not_there_is_noticed(act):
    def absent(scenario, result):
        result["layers"] = [copy.deepcopy(CRASH)]

    failed = act(absent)
    assert any("the plugin's" in claim for claim in failed)
    assert any("no output" in claim for claim in failed)


def test_a_wrong_product_is_noticed(act):
    def wrong(scenario, result):
        if "output" in result["layers"][0]:
            result["layers"][0]["output"]["quantised"] = 3e-3

    assert any("relative error 3.00e-03" in claim for claim in act(wrong))


def test_an_off_switch_that_leaves_a_trace_is_noticed(act):
    def trace(scenario, result):
        if "SGLANG_KT_SM120_ENABLE" in scenario["env"]:
            result["layers"][0]["dispatch"]["stock"] = None

    assert any("stock exactly" in claim for claim in act(trace))


def test_a_failing_kernel_is_a_row_not_a_traceback():
    class Broken:
        @staticmethod
        def measure(variant, arch):
            raise ValueError("ptxas said no")

        @staticmethod
        def name_of(variant):
            return "tiled"

    record = demo._compile(Broken, None)
    assert record["failures"] == ["ValueError: ptxas said no"]


def test_an_unknown_host_is_named():
    with pytest.raises(lab.LabError, match=r"unknown host 'sglang-9'; there are sglang-kt-0\.6\.1"):
        lab.install("sglang-9")


def test_a_failing_pip_is_quoted(tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("sglang-kt==0.0.0.not.a.version\n")
    with pytest.raises(lab.LabError, match=r"(?s)pip install.*not\.a\.version"):
        lab._pip(["-r", str(requirements)], "broken", requirements, lambda *step: None)
