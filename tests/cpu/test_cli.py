"""The command line: tables, JSON, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sglang_kt_sm120 import cli, devices, env, limits, select

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
runner = CliRunner()


def run(*arguments: str, code: int = 0):
    result = runner.invoke(cli.app, list(arguments))
    assert result.exit_code == code, result.output
    return result


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
        "hidden_size": 2048, "num_hidden_layers": 2, "intermediate_size": 1280, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "model_type": "qwen3",
        "quantization_config": {"weight_block_size": [128, 128]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("explain", "--model", str(tmp_path), "--gpu", RTX, "--m", "1", "--json")
    assert len(json.loads(run(*arguments, "--tp", "2").stdout)["rows"]) == 4
    refused = run(*arguments, "--tp", "4", code=1).stderr
    for word in ("320", "no multiple of the 128", "1, 2"):
        assert word in " ".join(refused.split())


def test_assuming_the_hosts_cutlass():
    arguments = ("explain", "--shape", "4096,7168", "--m", "64,65", "--gpu", RTX, "--json")
    rows = json.loads(run(*arguments, "--host-cutlass").stdout)["rows"]
    assert [row["backend"] for row in rows] == ["triton", "cutlass"]
    assert rows[1]["config"] == {"kernel": "sglang_jit"}


def test_explain_prints_the_recorded_limits_and_what_is_never_taken():
    arguments = ("explain", "--shape", "4096,7168", "--m", "128", "--gpu", RTX)
    text = " ".join(run(*arguments).stdout.split())
    for kernel in limits.KERNELS:
        assert f"{kernel.name}: not probed (tile" in text
        assert kernel.odd_rows in text
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


def test_env_lists_every_variable(monkeypatch):
    monkeypatch.setenv(env.STRICT.name, "1")
    answer = json.loads(run("env", "--json").stdout)
    assert (answer["schema"], answer["ok"]) == (1, True)
    assert [row["name"] for row in answer["variables"]] == [v.name for v in env.VARIABLES]
    by_name = {row["name"]: row for row in answer["variables"]}
    assert by_name[env.STRICT.name]["value"] == "1"
    assert by_name[env.ENABLE.name]["value"] is None
    text = run("env").stdout
    assert all(variable.name in text for variable in env.VARIABLES)


def test_help_loads_no_torch():
    code = (
        "import sys; from sglang_kt_sm120 import cli\n"
        "try: cli.app(['--help'])\n"
        "except SystemExit: assert not {'torch', 'triton', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_aot_judges_what_selection_can_return():
    answer = json.loads(run("aot", "--shape", "2112,256", "--arch", "sm_120a", "--json").stdout)
    assert (answer["schema"], answer["ok"]) == (1, True)
    kernels = answer["kernels"]
    assert {"direct", "pipelined", "tiled"} <= {k["config"].get("kernel") for k in kernels}
    for kernel in kernels:
        assert kernel["arch"] == "sm_120a"
        assert kernel["spills"] == 0
        assert kernel["shared_bytes"] <= 101376
        assert (
            kernel["mma"].get("QMMA", 0) + kernel["mma"].get("QMMA.SF", 0) or not kernel["config"]
        )
        assert kernel["failures"] == []
    assert {kernel["dtype"] for kernel in kernels} == {"bf16", "fp16"}
    schedules = answer["schedules"]
    assert {(2112, 7168), (34816, 5120)} <= {(s["n"], s["k"]) for s in schedules}
    assert all(s["busy"] == 188 and s["failures"] == [] for s in schedules)
    run("aot", "--arch", "sm_90a", code=2)


def test_aot_fails_where_a_gate_fails(monkeypatch):
    from sglang_kt_sm120.aot import gates

    monkeypatch.setattr(gates, "SHARED_LIMIT", 1024)
    result = run("aot", "--shape", "512,256", "--arch", "sm_120a", "--json", code=1)
    kernels = json.loads(result.stdout)["kernels"]
    assert any("> 1024" in text for kernel in kernels for text in kernel["failures"])


def test_help_shows_the_defaults():
    text = run("explain", "--help").stdout.replace("│", " ")
    assert "default: deepseek-r1" in " ".join(text.split())


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "this needs torch" in " ".join(run("graphs", code=1).stderr.split())
    answer = json.loads(run("aot", "--json", code=1).stdout)
    assert answer["ok"] is False
    assert "torch and triton" in answer["error"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a CUDA device")
def test_graphs_need_a_cuda_device():
    assert "needs a CUDA device" in run("graphs", code=3).stderr
    assert "needs a CUDA device" in run("bench", code=3).stderr
    assert json.loads(run("graphs", "--json", code=3).stdout)["ok"] is False
    run("bench", "--m", "x", code=2)
    run("graphs", "--bs", "0", code=2)


def records(us: float | None):
    from sglang_kt_sm120 import bench

    return [
        bench.Record("layer", 2112, 7168, m, name, us=value, note="" if value else "wrong result")
        for m in (1, 16)
        for name, value in (("ours", us), ("stock", 35.0), ("read", 4.0))
    ]


@pytest.mark.parametrize(("us", "code"), [(7.0, 0), (None, 1)])
def test_bench_writes_what_it_timed(us, code, monkeypatch, tmp_path):
    """A wrong result of ours is exit 1; timing itself is tested on a GPU."""
    from sglang_kt_sm120 import bench

    gpu = devices.describe(RTX)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "device", lambda index: gpu)
    monkeypatch.setattr(devices, "arch", lambda index: None)
    monkeypatch.setattr(
        bench, "run", lambda *a, progress, **k: progress(records(us)) or records(us)
    )
    monkeypatch.setattr(bench, "environment", lambda: {"gpu": RTX})
    files = tmp_path / "out.csv", tmp_path / "out.png"
    arguments = ("--set", "deepseek-r1", "--csv", str(files[0]), "--plot", str(files[1]))
    answer = json.loads(run("bench", *arguments, "--json", code=code).stdout)
    assert answer["ok"] is (code == 0)
    assert len(answer["records"]) == 6
    assert files[0].read_text().startswith("shape,n,k,m,candidate,us")
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "35.00" in run("bench", code=code).stdout

    written, again = tmp_path / "out.json", tmp_path / "again.png"
    written.write_text(json.dumps(answer))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = run("bench", "--from", str(written), "--plot", str(again), "--json", code=code)
    assert json.loads(shown.stdout)["records"] == answer["records"]
    assert again.read_bytes().startswith(b"\x89PNG")
    written.write_text("{}")
    assert "holds no benchmark" in " ".join(
        run("bench", "--from", str(written), code=2).stderr.split()
    )


def test_a_plot_holds_every_candidate_over_the_floor():
    from sglang_kt_sm120.cli import plots

    (lines,) = plots.curves([*records(8.0), *records(None)[:1]]).values()
    assert lines == {"ours": [(16, 2.0)], "stock": [(1, 8.75), (16, 8.75)]}


def test_version():
    from sglang_kt_sm120 import __version__

    assert run("--version").stdout.strip() == __version__


def test_the_page_of_variables_is_the_one_that_env_makes():
    page = Path(__file__).parents[2] / "docs" / "environment.md"
    assert run("env", "--markdown").stdout == page.read_text(), "run `make docs`"
