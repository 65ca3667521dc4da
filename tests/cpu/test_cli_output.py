"""What the commands print: tables that lose nothing, JSON objects also of what failed."""

from __future__ import annotations

import json
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rich.markup import escape

from sglang_kt_sm120 import devices, env, graphs, host, op, shapes
from sglang_kt_sm120.aot import compiling
from sglang_kt_sm120.backends import cutlass
from tests.commands import RTX, pretend_gpus, run


@pytest.mark.parametrize("columns", [None, 40, 60, 80, 120])
@pytest.mark.parametrize("command", ["explain", "env"])
def test_tables_lose_nothing(command, columns, monkeypatch):
    """Not in a narrow terminal, and not in a pipe: every word of every cell is there, unbroken."""
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    else:
        monkeypatch.delenv("COLUMNS", raising=False)
    if command == "env":
        text = run("env").stdout
        cells = [cell for v in env.VARIABLES for cell in (v.name, v.default, v.help, v.allowed)]
    else:
        arguments = ("explain", "--gpu", RTX, "--m", "1,512")
        text = run(*arguments).stdout
        rows = json.loads(run(*arguments, "--json").stdout)["rows"]
        cells = [
            text
            for row in rows
            for text in (
                row["name"], f"{row['n']},{row['k']}", row["backend"],
                *(f"{key}={row['config'][key]}" for key in ("kernel", "block_n", "num_warps")),
            )
        ]  # fmt: skip
    words = {word for cell in cells for word in cell.split()}
    lost = [word for word in words if word not in text]
    assert not lost


@pytest.mark.parametrize("columns", [20, 60, 80, 200])
def test_a_table_of_long_cells(columns, monkeypatch, capsys):
    """Every shape of table that the commands print, at any width, keeps every word whole."""
    from sglang_kt_sm120.cli import output

    monkeypatch.setenv("COLUMNS", str(columns))
    shown = output.table("kernel", "M", "notes", title="title", whole=("kernel", "M"))
    names = [f"direct[8x128x{i}, a-very-long-name-of-a-kernel-{i:020}]" for i in range(3)]
    for index, name in enumerate(names):
        shown.add_row(escape(name), str(index), f"word{index} " * 30 + f"end-of-{index}")
    shown.show()
    text = capsys.readouterr().out
    assert all(name in text for name in names)
    assert all(f"end-of-{index}" in text for index in range(3))
    assert text.count("word1") == 30


def test_what_aot_and_graphs_print_is_whole_at_60_columns(monkeypatch, capsys):
    from sglang_kt_sm120.cli import kernels as commands

    monkeypatch.setenv("COLUMNS", "60")
    arguments = ("aot", "--shape", "256,256", "--arch", "sm_120a", "--dtype", "bfloat16")
    kernels = json.loads(run(*arguments, "--json").stdout)["kernels"]
    assert {kernel["dtype"] for kernel in kernels} == {"bf16"}
    commands._print_aot(kernels, [])
    text = capsys.readouterr().out
    for kernel in kernels:
        assert kernel["name"] in text
        assert all(f"{count} {name}" in text for name, count in kernel["mma"].items())

    pretend_a_gpu(monkeypatch, lambda *_: [graphs.Row(256, 1234567, 1234.5, 7654.3, 98765.4, True)])
    text = run("graphs", "--bs", "256").stdout
    for word in ("256", "1234567", "1234.5", "7654.3", "98765.4", RTX):
        assert word in text


def pretend_a_gpu(monkeypatch, check):
    """Let `graphs` find a GPU, and `check` in place of what captures there."""
    pretend_gpus(monkeypatch, (RTX, (12, 0)))
    monkeypatch.setattr(graphs, "check", check)


@pytest.mark.parametrize(
    ("gpus", "index", "notes"),
    [
        ((("NVIDIA GeForce RTX 4090", (8, 9)), (RTX, (12, 0)), (RTX, (12, 0))), 1, 0),
        ((("NVIDIA GeForce RTX 4090", (8, 9)), ("NVIDIA GB10", (12, 1))), 1, 0),
        ((("NVIDIA H200", (9, 0)),), 0, 1),
    ],
)
def test_graphs_are_checked_on_the_card_that_serves(gpus, index, notes, monkeypatch):
    seen = []
    current = pretend_gpus(monkeypatch, *gpus)

    def check(layers, sizes, device):
        seen.append(device)
        yield graphs.Row(1)

    monkeypatch.setattr(graphs, "check", check)
    result = run("graphs", "--bs", "1", "--json")
    assert seen == [torch.device("cuda", index)]
    assert current == [index]
    assert json.loads(result.stdout)["device"] == gpus[index][0]
    assert result.stderr.count("says nothing about one") == notes


@pytest.mark.parametrize(("wanted", "says"), [((), 0), (("sglang_jit",), 1)])
def test_graphs_says_before_the_host_builds_for_minutes(wanted, says, monkeypatch):
    """Only where a choice could take a kernel that is built at its first use."""
    pretend_a_gpu(monkeypatch, lambda *_: [graphs.Row(1)])
    monkeypatch.setattr(cutlass, "is_built_at_use", lambda name: True)
    monkeypatch.setattr(op, "cutlass_to_prove", lambda *_: (wanted, ()))
    assert run("graphs", "--bs", "1").stderr.count("nvcc minutes") == says


def test_graphs_checks_our_kernels_where_sglang_is_broken(monkeypatch):
    def broken():
        raise OSError("libcudart.so.13: cannot open shared object file")

    pretend_a_gpu(monkeypatch, lambda *_: [graphs.Row(1)])
    monkeypatch.setattr(host, "offer_cutlass", broken)
    result = run("graphs", "--bs", "1", "--json")
    assert json.loads(result.stdout)["ok"] is True
    assert "libcudart.so.13" in result.stderr
    assert "only our own kernels are checked" in " ".join(result.stderr.split())


def test_a_fault_in_the_counted_replay_is_found(monkeypatch):
    """A missing profiler is no fault; one of the GPU comes again when it is waited for."""
    whole = 1.0, types.SimpleNamespace(replay=lambda: None), []
    where = types.SimpleNamespace(bytes=lambda: 0, kept=[], pool=None)

    def raises(*_):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs, "replace", lambda where, **_: where)
    monkeypatch.setattr(graphs, "_compare", lambda *_: whole)
    monkeypatch.setattr(graphs, "_median_us", lambda _: 5.0)
    monkeypatch.setattr(graphs, "kernel_count", raises)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    row = graphs._check_batch([types.SimpleNamespace(name="x")], 1, where)
    assert (row.equal, row.kernels) == (True, None)
    monkeypatch.setattr(torch.cuda, "synchronize", raises)
    row = graphs._check_batch([types.SimpleNamespace(name="x")], 1, where)
    assert row.equal is False
    assert "an illegal memory access" in row.failures[0]


def test_the_layers_of_the_graph_check_are_probed_as_a_servers_are(monkeypatch):
    asked = []
    monkeypatch.setattr(op, "prove_cutlass", lambda *layer: asked.append(layer))
    graphs.Layer(shapes.Linear("x", 256, 384), torch.device("cpu"))
    assert asked == [(torch.device("cpu"), 256, 384, torch.bfloat16)]


def test_graphs_keeps_the_rows_that_it_has_when_memory_ends(monkeypatch):
    def check(*_):
        yield graphs.Row(16, 12, 1.5, 2.5, 99.5)
        yield graphs.Row(
            8, equal=False, failures=["alone: o [7168, 2048]: RuntimeError: " + "x " * 80]
        )
        raise torch.OutOfMemoryError("CUDA out of memory.")

    pretend_a_gpu(monkeypatch, check)
    result = run("graphs", "--bs", "16,8,4", code=1)
    assert "99.5" in result.stdout
    assert "batch size 8: alone: o [7168, 2048]: RuntimeError: " + "x " * 80 in result.stderr
    assert "a larger --tp" in result.stderr
    assert result.stdout.count("?") == 4  # what was not measured is no zero
    answer = json.loads(run("graphs", "--bs", "16,8,4", "--json", code=1).stdout)
    assert answer["ok"] is False
    assert "out of memory" in answer["error"]
    assert [row["replay_us"] for row in answer["rows"]] == [99.5, None]


def test_an_unforeseen_end_is_an_object_too(monkeypatch):
    from sglang_kt_sm120 import ahead

    def full(*_, **__):
        raise PermissionError(13, "Permission denied", "/opt/cache")
        yield

    arguments = ("warm", "--gpu", RTX, "--shape", "256,256", "--json")
    monkeypatch.setattr(ahead, "compile_all", full)
    answer = json.loads(run(*arguments, code=1).stdout)
    assert "TRITON_CACHE_DIR" in answer["error"]
    assert "Permission denied" in answer["error"]
    assert answer["kernels"] == []

    def mistaken(*_, **__):
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(ahead, "compile_all", mistaken)
    answer = json.loads(run(*arguments, code=1).stdout)
    assert answer["error"] == "KeyError: 'a mistake of ours'"


def test_graphs_fails_with_shape_batch_size_and_element(monkeypatch):
    text = "alone: o [7168, 2048] at batch size 8: element [3, 70] is 1.5, eager gives 1.25"
    rows = [graphs.Row(16), graphs.Row(8, equal=False, failures=[text])]
    pretend_a_gpu(monkeypatch, lambda *_: rows)
    result = run("graphs", "--bs", "8,16", code=1)
    assert text in " ".join(result.stderr.split())
    answer = json.loads(run("graphs", "--bs", "8,16", "--json", code=1).stdout)
    assert answer["ok"] is False
    assert [row["equal"] for row in answer["rows"]] == [True, False]
    assert answer["rows"][1]["failures"] == [text]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "Is a server running on this GPU"),
        (RuntimeError("no kernel image"), "RuntimeError: no kernel image"),
    ],
)
def test_graphs_that_cannot_begin_say_so_in_json_too(error, says, monkeypatch):
    def check(*_):
        raise error
        yield

    pretend_a_gpu(monkeypatch, check)
    answer = json.loads(run("graphs", "--json", code=1).stdout)
    assert answer["ok"] is False
    assert says in answer["error"]
    assert answer["rows"] == []


def test_a_capture_that_fails_is_told_with_its_layers(monkeypatch):
    class Where:
        pool = None

        def bytes(self):
            return 0

    def fails(row, name, layers, where, run):
        raise RuntimeError("operation not permitted when stream is capturing")

    layer = types.SimpleNamespace(name="o [7168, 2048]")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs, "replace", lambda where, **_: where)
    monkeypatch.setattr(graphs, "_capture_and_compare", fails)
    row = graphs._check_batch([layer, layer], 8, Where())
    assert not row.equal
    assert [text.split(":")[0] for text in row.failures] == [
        "all layers", "alone", "alone", "two streams",
    ]  # fmt: skip
    assert all("o [7168, 2048]: RuntimeError: operation" in t or ", o [" in t for t in row.failures)


@pytest.mark.parametrize(
    ("arguments", "code", "key"),
    [
        (("explain", "--m", "x", "--gpu", RTX), 2, "rows"),
        (("explain", "--no-such-option"), 2, "rows"),
        (("explain", "--tp", "0"), 2, "rows"),
        (("graphs", "--bs", "0"), 2, "rows"),
        (("bench", "--m", "x"), 2, "records"),
        (("bench",), 3, "records"),
        (("tune", "--budget", "soon"), 2, "cases"),
        (("tune",), 3, "cases"),
        (("aot", "--arch", "sm_90a"), 2, "kernels"),
        (("warm", "--gpu", "NVIDIA Unheard Of"), 2, "kernels"),
        (("patch", "/no/such/place"), 1, "lines"),
        (("patch", "--check", "--apply"), 2, "lines"),
        (("env", "--no-such-option"), 2, "variables"),
        (("doctor", "surplus"), 2, "checks"),
    ],
)
def test_a_failure_under_json_is_an_object_with_the_list_of_success(
    arguments, code, key, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answer = json.loads(run(*arguments, "--json", code=code).stdout)
    assert answer.pop("error")
    assert answer == {"schema": 1, "ok": False, key: []}
    assert "{" not in run(*arguments, code=code).stdout


def test_what_a_library_prints_is_not_in_the_json(monkeypatch):
    """Triton prints a whole kernel to stdout where its assembler refuses it."""
    real = devices.describe

    def noisy(*arguments, **facts):
        print("Internal Triton PTX codegen error")
        return real(*arguments, **facts)

    monkeypatch.setattr(devices, "describe", noisy)
    result = run("explain", "--set", "deepseek-r1", "--gpu", "RTX 5090", "--json")
    assert json.loads(result.stdout)["ok"]
    assert "Internal Triton" in result.stderr


def test_asking_the_compiler_prints_nothing(capfd):
    def refused():
        print("Internal Triton PTX codegen error")
        raise RuntimeError

    assert compiling._tried(refused, 16) == 16
    assert capfd.readouterr().out == ""


def test_threads_that_ask_the_compiler_leave_stdout_alone(monkeypatch):
    """A server's threads may be the first to ask, all at once."""

    def slow(*_, through, **__):
        time.sleep(0.05)
        through.compiled.append(types.SimpleNamespace(asm={"ptx": "mma.sync.e4m3"}))

    monkeypatch.setattr(compiling.probe, "probe", slow)
    before = sys.stdout
    compiling._features.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compiling.features, ("sm_120a", "sm_121a", "sm_120a", "sm_121a")))
    compiling._features.cache_clear()
    assert sys.stdout is before
