"""The same hosts with the plugin: ours on SM12x where it is ours to serve, else theirs."""

from __future__ import annotations

import pytest

from .conftest import HOSTS, OLD, SMALL
from .test_without_us import VARIABLE

#: Against float64 on the same quantised operands only the rounding to bf16 is left: 1.65e-3 in the
#: norm of many elements (tests/helpers.py has the same limit).
ROUNDING = 2e-3
#: e4m3 keeps three bits of mantissa: at most 2^-4 per activation, less in the 2-norm.
QUANTISATION = 2.0**-4

OTHERS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (13, 0)]


def serves(layer: dict) -> None:
    """Assert that the layer is ours and right."""
    assert "error" not in layer, layer["error"]
    assert layer["dispatch"]["ours"], layer["dispatch"]
    assert layer["weight_scale"] == "torch.float32"
    assert layer["output"]["dtype"] == "torch.bfloat16"
    assert layer["output"]["shape"] == [layer["asked"]["rows"], layer["asked"]["shape"][0]]
    assert layer["output"]["quantised"] < ROUNDING
    assert layer["output"]["exact"] < QUANTISATION


def said(result: dict, level: str) -> list[str]:
    return [text for at, name, text in result["log"] if at == level and name == "sglang_kt_sm120"]


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)], ids=str)
@pytest.mark.parametrize("host", HOSTS)
def test_auto_and_triton_are_ours(ask, host, capability):
    layers = [
        {},
        SMALL | {"backend": "triton"},
        {"shape": [576, 512], "rows": 3},
        {"shape": [9, 128]},
    ]
    result = ask(host)(capability=capability, plugin_on=True, layers=layers)
    for layer in result["layers"]:
        serves(layer)
    assert result["wrapped"] == {"dispatch": True, "load": True}
    assert any("is active on" in text for text in said(result, "INFO"))
    assert said(result, "WARNING") + said(result, "ERROR") == []


@pytest.mark.parametrize("refusal", ["recipe", "architecture"])
@pytest.mark.parametrize("host", HOSTS)
def test_deep_gemm_is_neither_called_nor_imported_by_us(ask, host, refusal):
    result = ask(host)(plugin_on=True, deep_gemm=refusal, layers=[SMALL])
    serves(result["layers"][0])
    assert result["sees"]["ENABLE_JIT_DEEPGEMM"] == (host == OLD)
    assert ("deep_gemm" in result["modules"]) == (host == OLD)  # sglang-kt 0.6.1 imports it itself


@pytest.mark.parametrize("host", HOSTS)
def test_trtllm_is_served_with_one_warning_that_names_the_flag(ask, host):
    layers = [SMALL | {"backend": "flashinfer_trtllm"}] * 2
    result = ask(host)(plugin_on=True, layers=layers)
    for layer in result["layers"]:
        serves(layer)
    (warning,) = said(result, "WARNING")
    assert "--fp8-gemm-backend flashinfer_trtllm" in warning

    result = ask(host)(plugin_on=True, env=VARIABLE, layers=[SMALL, SMALL])
    for layer in result["layers"]:
        serves(layer)
    (warning,) = said(result, "WARNING")
    assert "SGLANG_ENABLE_FLASHINFER_FP8_GEMM=1" in warning


@pytest.mark.parametrize("host", HOSTS)
def test_strict_refuses_trtllm_when_the_layer_is_built(ask, host):
    strict = {"SGLANG_KT_SM120_STRICT": "1"}
    layers = [SMALL | {"backend": "flashinfer_trtllm"}, SMALL]
    refused, served = ask(host)(plugin_on=True, env=strict, layers=layers)["layers"]
    assert refused["stage"] == "load"
    assert refused["error"]["type"] == "RuntimeError"
    assert "--fp8-gemm-backend auto or triton" in refused["error"]["message"]
    serves(served)


@pytest.mark.parametrize("host", HOSTS)
def test_what_is_not_ours_stays_the_hosts_own_function(ask, host):
    """Explicit cutlass, a per-tensor FP8 checkpoint, other blocks: the object that it would use."""
    kinds = [{"backend": "cutlass"}, {"block": None}, {"block": [64, 128]}, {"block": [128, 64]}]
    layers = [SMALL | kind | {"apply": False} for kind in kinds]
    ours = ask(host)(plugin_on=True, layers=layers)["layers"]
    stock = ask(host)(layers=layers)["layers"]
    for with_us, without in zip(ours, stock, strict=True):
        assert "error" not in with_us, with_us["error"]
        assert with_us["dispatch"] == without["dispatch"]
        assert with_us["dispatch"]["stock"] is not None
    assert ours[0]["dispatch"]["stock"] == "cutlass_w8a8_block_fp8_linear_with_fallback"


@pytest.mark.parametrize("capability", OTHERS, ids=str)
@pytest.mark.parametrize("host", HOSTS)
def test_other_cards_keep_the_hosts_own_function(ask, host, capability):
    layers = [{"load": False}, {"load": False, "backend": "triton"}]
    with_us = ask(host)(capability=capability, plugin_on=True, layers=layers)
    assert with_us["wrapped"]["dispatch"]  # the plugin was there, and stepped aside
    for layer in with_us["layers"]:
        assert layer["dispatch"]["stock"] is not None
        assert layer["dispatch"]["name"] == layer["dispatch"]["stock"]
    assert with_us["layers"][1]["dispatch"]["stock"] == "triton_w8a8_block_fp8_linear"
    assert said(with_us, "WARNING") + said(with_us, "ERROR") == []


@pytest.mark.parametrize("host", HOSTS)
def test_off_switch_restores_the_host(ask, host):
    off = {"SGLANG_KT_SM120_ENABLE": "0"}
    layers = [{}, SMALL | {"backend": "flashinfer_trtllm"}]
    switched_off = ask(host)(plugin_on=True, env=off, layers=layers)
    stock = ask(host)(layers=layers)
    assert switched_off["wrapped"] == {"dispatch": False, "load": False}
    assert said(switched_off, "INFO") == []
    for with_us, without in zip(switched_off["layers"], stock["layers"], strict=True):
        assert with_us["dispatch"]["stock"] is not None
        assert with_us == without  # the same function, the same crash, frame by frame


@pytest.mark.parametrize("host", HOSTS)
def test_replace_narrows_what_we_answer(ask, host):
    only_auto = {"SGLANG_KT_SM120_REPLACE": "auto"}
    layers = [SMALL, SMALL | {"backend": "triton", "apply": False}]
    result = ask(host)(plugin_on=True, env=only_auto, layers=layers)
    serves(result["layers"][0])
    assert result["layers"][1]["dispatch"]["stock"] == "triton_w8a8_block_fp8_linear"
    assert any("--fp8-gemm-backend triton" in text for text in said(result, "INFO"))


@pytest.mark.parametrize("host", HOSTS)
def test_the_hosts_own_refusal_stands(ask, host):
    """FlashInfer's DeepGEMM is for Hopper: sglang says so itself, and we name what works."""
    layers = [SMALL | {"backend": "flashinfer_deepgemm"}]
    with_us = ask(host)(plugin_on=True, layers=layers)
    without = ask(host)(layers=layers)
    assert with_us["layers"][0]["error"]["message"] == without["layers"][0]["error"]["message"]
    assert "requires Hopper" in with_us["layers"][0]["error"]["message"]
    (line,) = said(with_us, "ERROR")
    assert "--fp8-gemm-backend auto or triton" in line


@pytest.mark.xdist_group(OLD)
def test_hopper_keeps_deep_gemms_identity(ask):
    """sglang requantises weights where the function *is* its DeepGEMM function: never wrapped."""
    layers = [{"load": False}]
    result = ask(OLD)(capability=(9, 0), plugin_on=True, deep_gemm="recipe", layers=layers)
    stock = result["layers"][0]["dispatch"]["stock"]
    assert stock == "deepgemm_w8a8_block_fp8_linear_with_fallback"
