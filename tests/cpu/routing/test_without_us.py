"""The hosts as they are: the stand-in for a GPU leaves their decisions to them, and they crash.

Nothing of the plugin is in these processes. Where a later sglang-kt repairs something, the test
here that pins the crash is the one to change.
"""

from __future__ import annotations

import pytest

from .conftest import HOSTS, NEW, OLD, SMALL

FLASHINFER = "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback"
TRTLLM = "gemm_fp8_nt_groupwise does not support backend 'trtllm' with capability"
VARIABLE = {"SGLANG_ENABLE_FLASHINFER_FP8_GEMM": "1"}

#: What a card of each capability makes the host's own functions answer (with CUDA 12.8 or newer).
SEES = {
    (8, 9): {"is_blackwell": False, "is_sm90": False, "is_sm100": False, "is_sm120": False},
    (9, 0): {"is_blackwell": False, "is_sm90": True, "is_sm100": False, "is_sm120": False},
    (10, 0): {"is_blackwell": True, "is_sm90": False, "is_sm100": True, "is_sm120": False},
    (12, 0): {"is_blackwell": True, "is_sm90": False, "is_sm100": False, "is_sm120": True},
    (12, 1): {"is_blackwell": True, "is_sm90": False, "is_sm100": False, "is_sm120": True},
}
#: ... and its dispatch, under "auto" with DeepGEMM off.
AUTO = {
    (OLD, (8, 9)): "triton_w8a8_block_fp8_linear",
    (OLD, (9, 0)): "cutlass_w8a8_block_fp8_linear_with_fallback",
    (OLD, (10, 0)): FLASHINFER,
    (OLD, (12, 0)): FLASHINFER,
    (OLD, (12, 1)): FLASHINFER,
    (NEW, (8, 9)): "triton_w8a8_block_fp8_linear",
    (NEW, (9, 0)): "cutlass_w8a8_block_fp8_linear_with_fallback",
    (NEW, (10, 0)): FLASHINFER,
    (NEW, (12, 0)): "cutlass_w8a8_block_fp8_linear_with_fallback",
    (NEW, (12, 1)): "cutlass_w8a8_block_fp8_linear_with_fallback",
}


def crashed_in_flashinfer(layer: dict, sm: str = "120") -> None:
    """Assert the first report's crash: sglang's apply, its FlashInfer function, FlashInfer's no."""
    assert layer["dispatch"]["stock"] == FLASHINFER
    assert layer["stage"] == "apply"
    error = layer["error"]
    assert (error["module"], error["type"]) == ("flashinfer.utils", "BackendSupportedError")
    assert error["message"] == f"{TRTLLM} {sm}"
    functions = [frame["function"] for frame in error["frames"]]
    assert functions[-4:] == ["forward", "apply", FLASHINFER, "wrapper"]
    assert error["frames"][-1]["file"].endswith("flashinfer/utils.py")


@pytest.mark.parametrize("host", HOSTS)
def test_the_parts_are_real(ask, host):
    result = ask(host)()
    assert result["host"]["sglang-kt"] == host.rpartition("-")[2]
    assert result["host"]["flashinfer"] == "0.6.3"
    assert f"/.hosts/{host}/" in result["host"]["fp8_utils"]
    assert result["modules"] == []
    assert result["wrapped"] == {"dispatch": False, "load": False}


@pytest.mark.parametrize("capability", SEES, ids=str)
@pytest.mark.parametrize("host", HOSTS)
def test_the_host_decides_as_on_such_a_card(ask, host, capability):
    layers = [SMALL | {"apply": capability[0] == 12}]
    result = ask(host)(capability=capability, layers=layers)
    sees = dict(result["sees"])
    assert sees.pop("get_device_sm") == capability[0] * 10 + capability[1]
    assert sees.pop("is_flashinfer_available")
    assert not sees.pop("ENABLE_JIT_DEEPGEMM")
    assert sees == SEES[capability]
    assert result["layers"][0]["dispatch"]["stock"] == AUTO[host, capability]


@pytest.mark.xdist_group(OLD)
@pytest.mark.parametrize("capability", [(12, 0), (12, 1)], ids=str)
def test_auto_crashes_as_reported(ask, capability):
    layer = ask(OLD)(capability=capability)["layers"][0]
    assert layer["asked"]["shape"] == [2112, 7168]
    crashed_in_flashinfer(layer, "".join(map(str, capability)))


@pytest.mark.xdist_group(OLD)
@pytest.mark.parametrize("refusal", ["recipe", "architecture"])
def test_auto_with_deep_gemm_crashes_as_reported(ask, refusal):
    """N of the first layer, 2112, is a multiple of 64: the host asks DeepGEMM for it."""
    result = ask(OLD)(deep_gemm=refusal)
    layer = result["layers"][0]
    assert result["sees"]["ENABLE_JIT_DEEPGEMM"]
    assert layer["dispatch"]["stock"] == "deepgemm_w8a8_block_fp8_linear_with_fallback"
    assert layer["weight_scale"] == "torch.int32"  # rounded to powers of two and packed
    expected = {"recipe": "Unknown recipe", "architecture": "Unsupported architecture"}[refusal]
    assert layer["error"]["type"] == "RuntimeError"
    assert layer["error"]["message"].endswith(expected)
    assert "gemm_nt_f8f8bf16" in [frame["function"] for frame in layer["error"]["frames"]]


@pytest.mark.xdist_group(NEW)
def test_newer_host_leaves_deep_gemm_alone(ask):
    result = ask(NEW)(deep_gemm="recipe", layers=[{"load": False}])
    assert not result["sees"]["ENABLE_JIT_DEEPGEMM"]
    assert "deep_gemm" not in result["modules"]


@pytest.mark.parametrize("host", HOSTS)
def test_asking_for_trtllm_crashes(ask, host):
    flag = SMALL | {"backend": "flashinfer_trtllm"}
    crashed_in_flashinfer(ask(host)(layers=[flag])["layers"][0])
    crashed_in_flashinfer(ask(host)(env=VARIABLE, layers=[SMALL])["layers"][0])
