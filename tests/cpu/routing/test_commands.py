"""Whole command lines through the host's ServerArgs: the report's, and what kt run builds."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.hosts import client, kt_run, lab

from .conftest import NEW, OLD, SMALL
from .test_with_us import serves
from .test_without_us import crashed_in_flashinfer

#: The first report's command, without the paths of its machine.
REPORTED = """
    --kt-method LLAMAFILE --kt-cpuinfer 38 --kt-threadpool-count 1 --kt-num-gpu-experts 8
    --kt-gpu-prefill-token-threshold 500 --kt-enable-dynamic-expert-update --trust-remote-code
    --mem-fraction-static 0.7 --chunked-prefill-size 32768 --max-running-requests 32
    --max-total-tokens 32768 --watchdog-timeout 3000 --enable-mixed-chunk --tensor-parallel-size 1
    --enable-p2p-check --disable-shared-experts-fusion --attention-backend triton
    --served-model-name DeepSeek-R1 --host 0.0.0.0 --port 10002
""".split()  # noqa: SIM905 (a command line)

#: sglang-kt 0.7.2 would otherwise replace a DeepSeek checkpoint's config by DeepSeek-V4's.
OWN_CONFIG = {"SGLANG_APPLY_CONFIG_BACKUP": "none"}

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A folder that is DeepSeek-R1 as far as server arguments look: its config.json."""
    folder = tmp_path_factory.mktemp("DeepSeek-R1")
    (folder / "config.json").write_text(json.dumps(DEEPSEEK))
    return str(folder)


@pytest.mark.xdist_group(OLD)
def test_the_reported_command(ask, model):
    command = ["--model", model, "--kt-weight-path", model, *REPORTED]
    without = ask(OLD)(arguments=command)
    assert without["arguments"] == "auto"
    crashed_in_flashinfer(without["layers"][0])
    serves(ask(OLD)(arguments=command, plugin_on=True)["layers"][0])


@pytest.mark.xdist_group(NEW)
@pytest.mark.parametrize("method", ["FP8", "LLAMAFILE"])
def test_what_kt_run_launches(ask, model, tmp_path, method):
    """kt adds `--fp8-gemm-backend triton` for an FP8 model by itself; both roads end in ours."""
    command = _kt_run(tmp_path, ["run", model, "--kt-method", method, "--cpu-threads", "8"])
    assert command[1:3] == ["-m", "sglang.launch_server"]
    expected = "triton" if method == "FP8" else "auto"
    assert ("--fp8-gemm-backend" in command) == (method == "FP8")

    stock = ask(NEW)(arguments=command[3:], env=OWN_CONFIG, layers=[{"load": False}])
    assert stock["arguments"] == expected
    assert stock["layers"][0]["dispatch"]["stock"] is not None
    ours = ask(NEW)(arguments=command[3:], env=OWN_CONFIG, plugin_on=True, layers=[SMALL])
    assert ours["arguments"] == expected
    serves(ours["layers"][0])


def _kt_run(home, arguments: list[str]) -> list[str]:
    """Return the command that the real `kt run` of kt-kernel 0.7.2 launches."""
    host = lab.install(NEW)
    driver = [host.python, kt_run.__file__, lab.kt_kernel_cli(), *arguments]
    result = subprocess.run(
        driver, env=client.environment(HOME=str(home)), capture_output=True, text=True
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith(kt_run.MARK)]
    assert lines, result.stdout + result.stderr
    return json.loads(lines[0].removeprefix(kt_run.MARK))
