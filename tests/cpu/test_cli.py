"""The command line: tables, JSON, exit codes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_kt_sm120 import devices, env
from tests.commands import RTX, pretend_gpus, run


@pytest.mark.parametrize("spelling", ["bf16", "bfloat16", "BF16", "fp16", "float16"])
def test_dtypes_are_spelled_alike_everywhere(spelling, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run("explain", "--shape", "2112,7168", "--gpu", RTX, "--m", "1", "--dtype", spelling)
    run("tune", "--dtype", spelling, code=3)
    for command in (("warm", "--gpu", RTX), ("aot",)):  # further than the dtype, and no further
        run(*command, "--dtype", spelling, "--tp", "0", code=2)
        assert "float32" in run(*command, "--dtype", "float32", code=2).stderr


def test_env_marks_what_is_not_understood(monkeypatch):
    monkeypatch.setenv(env.BACKEND.name, "fastest")
    monkeypatch.setenv("SGLANG_KT_SM120_ENABEL", "0")
    answer = json.loads(run("env", "--json", code=1).stdout)
    assert answer["ok"] is False
    wrong = {row["name"]: row["wrong"] for row in answer["variables"] if row["wrong"]}
    assert wrong.keys() == {env.BACKEND.name, "SGLANG_KT_SM120_ENABEL"}
    assert "auto, triton, cutlass, reference" in wrong[env.BACKEND.name]
    assert env.ENABLE.name in wrong["SGLANG_KT_SM120_ENABEL"]
    result = run("env", code=1)
    assert "fastest" in result.stdout
    assert "did you mean" in result.stdout
    page = Path(__file__).parents[2] / "docs" / "environment.md"
    assert run("env", "--markdown").stdout == page.read_text()


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
    arguments = ("--shape", "512,256", "--arch", "sm_120a", "--dtype", "float16", "--json")
    result = run("aot", *arguments, code=1)
    kernels = json.loads(result.stdout)["kernels"]
    assert {kernel["dtype"] for kernel in kernels} == {"fp16"}
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


@pytest.fixture
def lacks(monkeypatch):
    """Return a function that makes libraries missing."""

    def function(*names: str) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(
            "importlib.util.find_spec",
            lambda name, *rest: None if name in names else find(name, *rest),
        )
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return function


@pytest.mark.parametrize(
    ("cuda", "advice", "never"),
    [(None, "pip install triton", "reinstall"), ("12.8", "reinstall torch", "pip install triton")],
)
def test_a_missing_triton_is_asked_for_as_torch_is_built(cuda, advice, never, lacks, monkeypatch):
    lacks("triton")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for arguments in (("aot",), ("warm", "--gpu", RTX)):
        said = run(*arguments, code=1).stderr
        assert advice in said
        assert never not in said


def test_without_a_cuda_device_nothing_asks_for_triton(lacks, monkeypatch):
    lacks("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("graphs", "bench", "tune"):
        said = run(command, code=3).stderr
        assert "needs a CUDA device" in said
        assert "triton" not in said


def test_a_missing_matplotlib_is_asked_for_by_name(lacks, tmp_path):
    lacks("matplotlib")
    said = run("bench", "--plot", str(tmp_path / "x.png"), code=1).stderr
    assert "pip install matplotlib" in said
    assert "torch" not in said


def test_earlier_results_are_shown_without_triton_and_torch(tmp_path):
    rows = [record.as_dict() for record in records(7.0)]
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps({"records": rows}))
    code = (
        "import sys; sys.modules['triton'] = sys.modules['torch'] = None\n"
        f"from sglang_kt_sm120 import cli; cli.app(['bench', '--from', {str(file)!r}])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "35.00" in result.stdout


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
    pretend_gpus(monkeypatch, ("NVIDIA GeForce RTX 4090", (8, 9)), (RTX, (12, 0)))
    monkeypatch.setattr(devices, "device", lambda index: (None, gpu)[index])
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
