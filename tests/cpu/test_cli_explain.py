"""`sglang-kt-sm120 explain`: what a server would take, from the object that routes."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_kt_sm120 import devices, env, limits, select, system
from sglang_kt_sm120.configs import store, table
from tests.commands import RTX, run


def test_explain_answers_without_a_gpu_and_from_the_object_that_routes():
    result = run("explain", "--shape", "2112,7168", "--m", "1,16,4096", "--gpu", RTX, "--json")
    answer = json.loads(result.stdout)
    assert (answer["schema"], answer["ok"]) == (1, True)
    assert [row["m"] for row in answer["rows"]] == [1, 16, 4096]
    for row in answer["rows"]:
        choice = select.choose(
            select.Problem(select.bucket(row["m"]), 2112, 7168), devices.describe(RTX)
        )
        assert (row["n"], row["k"]) == (2112, 7168)
        assert row["backend"] == choice.backend == "triton"
        assert row["config"]["kernel"] == choice.config.kernel
        assert row["source"] == choice.evidence
        assert row["reason"] == choice.reason
        assert row["rejected"].keys() | {"triton"} == set(select.BACKENDS)
        assert "no kernel for compute capability 120" in row["rejected"]["flashinfer_trtllm"]


def test_explain_shows_a_table():
    text = run("explain", "--set", "deepseek-r1", "--m", "1", "--gpu", RTX).stdout
    for word in ("fused_qkv_a_proj_with_mqa", "2112,7168", "triton", "flashinfer_trtllm"):
        assert word in text


def test_explain_of_a_model_and_its_shards(tmp_path):
    config = {
        "hidden_size": 2048, "num_hidden_layers": 2, "intermediate_size": 1280,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "model_type": "qwen3",
        "quantization_config": {"weight_block_size": [128, 128]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("explain", "--model", str(tmp_path), "--gpu", RTX, "--m", "1", "--json")
    assert len(json.loads(run(*arguments, "--tp", "2").stdout)["rows"]) == 4
    refused = run(*arguments, "--tp", "4", code=1).stderr
    for word in ("320", "no multiple of the 128", "1, 2"):
        assert word in " ".join(refused.split())


@pytest.mark.parametrize(
    ("installed", "flags", "prefill"),
    [
        (True, (), "cutlass"),
        (False, (), "triton"),
        (False, ("--host-cutlass",), "cutlass"),
        (True, ("--no-host-cutlass",), "triton"),
    ],
)
def test_the_hosts_default_is_shown_as_a_server_takes_it(installed, flags, prefill, monkeypatch):
    found = {"path": "/host/sglang", "cutlass": installed}
    monkeypatch.setattr(system, "host", lambda: found)
    arguments = ("explain", "--shape", "4096,7168", "--m", "64,65", "--gpu", RTX, *flags)
    rows = json.loads(run(*arguments, "--json").stdout)["rows"]
    assert [row["backend"] for row in rows] == ["triton", prefill]
    text = run(*arguments).stdout
    assert ("proves itself on this layer at load" in text) is (prefill == "cutlass")
    if prefill == "cutlass":
        assert rows[1]["config"] == {"kernel": "sglang_jit"}
        assert rows[1]["otherwise"] == "triton"
        assert "cutlass, else triton" in text
    assert [row["condition"] is None for row in rows] == [True, prefill == "triton"]


@pytest.mark.parametrize("kernel", limits.NAMES)
def test_a_tuned_row_that_names_cutlass_is_shown(kernel, monkeypatch, tmp_path):
    """Whatever the host's default is: the table is what a server consults first."""
    monkeypatch.setattr(limits, "versions", lambda: dict.fromkeys(limits.NAMES, "host 1.0"))
    row = {"m": 512, "backend": "cutlass", "config": {"kernel": kernel}}
    data = {
        "schema": 1, "gpu": store.facts(devices.describe(RTX)), "kernels": table.revisions(),
        "method": {"stand_in": False},
        "shapes": [{"n": 4096, "k": 7168, "dtype": "bfloat16", "rows": [row]}],
    }  # fmt: skip
    monkeypatch.setenv(env.CONFIG_DIR.name, str(tmp_path))
    store.forget()
    store.save(store.user_file(RTX), data)
    arguments = ("explain", "--shape", "4096,7168", "--m", "512", "--gpu", RTX)
    for flags in ((), ("--no-host-cutlass",)):
        (shown,) = json.loads(run(*arguments, *flags, "--json").stdout)["rows"]
        assert (shown["backend"], shown["config"]) == ("cutlass", {"kernel": kernel})
        assert shown["source"] == "user table"
        assert str(tmp_path) in shown["table"]
        assert "at load" in shown["condition"]
    store.forget()


def test_forcing_cutlass_shows_what_would_be_probed(monkeypatch):
    monkeypatch.setenv(env.BACKEND.name, "cutlass")
    arguments = ("explain", "--m", "1", "--gpu", RTX)
    answer = json.loads(run(*arguments, "--shape", "4096,7168", "--json").stdout)
    (row,) = answer["rows"]
    assert (row["backend"], row["source"], row["otherwise"]) == (
        "cutlass", "forced", "the load stops",
    )  # fmt: skip
    both = json.loads(
        run(*arguments, "--shape", "4096,7168", "--shape", "2112,7168", "--json", code=1).stdout
    )
    assert [row["backend"] for row in both["rows"]] == ["cutlass", None]
    assert "2112 x 7168 is not in whole 128 x 128 blocks" in both["rows"][1]["reason"]


def test_reasons_say_which_rows_they_are_of():
    arguments = ("explain", "--shape", "2112,7168", "--shape", "4096,7168", "--gpu", RTX)
    text = run(*arguments, "--m", "16,512", "--host-cutlass").stdout
    lines = [line.strip() for line in text.splitlines()]
    where = {line.rpartition(" [")[0]: line.rpartition(" [")[2] for line in lines}
    (partial,) = [key for key in where if key.startswith("cutlass: 2112 x 7168 is not in whole")]
    assert where[partial] == "2112,7168 at M=16,512]"
    assert where["cutlass: M <= 64: bound by reading the weight"] == "4096,7168 at M=16]"
    assert where["triton: cutlass is preferred here"] == "4096,7168 at M=512]"
    assert sum(line.startswith("flashinfer_trtllm: ") for line in lines) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a CUDA device")
def test_the_test_override_serves_on_the_cpu(monkeypatch):
    monkeypatch.setenv(env.TEST_CAPABILITY.name, "12.0")
    devices.device.cache_clear()
    answer = json.loads(run("explain", "--shape", "2112,7168", "--m", "1", "--json").stdout)
    devices.device.cache_clear()
    assert [row["backend"] for row in answer["rows"]] == ["reference"]
    assert "`explain` says so" in env.TEST_CAPABILITY.help


def test_shapes_are_taken_as_sharded():
    arguments = ("explain", "--shape", "4096,7168", "--gpu", RTX, "--m", "1")
    assert "--tp" in run(*arguments, "--tp", "8", code=2).stderr
    run(*arguments, "--tp", "1")


def test_explain_prints_the_recorded_limits_and_what_is_never_taken():
    arguments = ("explain", "--shape", "2112,7168", "--m", "4", "--gpu", RTX)
    lines = run(*arguments).stdout.splitlines()
    text = " ".join(" ".join(lines).split())
    for kernel in limits.KERNELS:
        start = text.index(f"{kernel.name} ({kernel.title}): tile ")
        said = text[start:].split(" needs ")[0] + text[start:].partition(" needs ")[2][:40]
        for _, tile in kernel.tiles:
            assert tile in said
        for word in ("N and K multiples of 128", "a multiple of 4", kernel.odd_rows, "12.0"):
            assert word in said, (kernel.name, word)
        assert ("12.1" in said, "nvcc 12.8" in said) == {
            "sgl_kernel": (False, False), "sglang_jit": (True, True), "flashinfer": (True, True),
        }[kernel.name]  # fmt: skip
    assert "sglang-kt's source names 12.0a for any card" in text
    answer = json.loads(run(*arguments, "--json").stdout)
    assert [kernel["name"] for kernel in answer["kernels"]] == list(limits.NAMES)
    assert answer["kernels"][1]["tiles"] == [[64, "32x128x128"], [None, "128x128x128"]]
    for name, why in limits.REJECTED.items():
        assert f"{name}: {why}" in text
    assert json.loads(run(*arguments, "--json").stdout)["never"] == limits.REJECTED


@pytest.mark.parametrize(
    "arguments",
    [
        ("--shape", "2112"),
        ("--shape", "2112,7100"),
        ("--shape", "a,b"),
        ("--m", "1,x"),
        ("--m", "-1"),
        ("--gpu", "NVIDIA Unheard Of"),
        ("--dtype", "float32"),
        ("--set", "no-such-model"),
        ("--model", "/no/such/folder"),
        ("--tp", "0"),
        ("--shape", "128,128", "--set", "kimi-k2"),
    ],
)
def test_usage_errors_are_2(arguments):
    given = arguments if "--gpu" in arguments else (*arguments, "--gpu", RTX)
    run("explain", *given, code=2)


def test_explain_without_a_gpu_needs_a_name():
    assert "--gpu" in run("explain", code=3).stderr
