"""The tuner on the GPU at hand: a short real run, and what serving makes of its table."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch
from typer.testing import CliRunner

from sglang_kt_sm120 import cli, devices, env, graphs, heuristic, op, select, shapes, warm
from sglang_kt_sm120.backends import reference
from sglang_kt_sm120.backends import triton as backend
from sglang_kt_sm120.configs import store, table
from tests.helpers import activation, assert_right

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = ("2112,7168", "7168,2048")
DEVICE = torch.device("cuda", 0)
#: Right, and not what the heuristic would take.
TUNED = heuristic.Config("direct", 8, 64, num_warps=4, unroll=2, fused=True, splits=2, chunk=5)


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    monkeypatch.setenv(env.CONFIG_DIR.name, str(tmp_path / "user"))
    monkeypatch.setattr(store, "SHIPPED", ())
    forget()
    yield tmp_path / "user"
    forget()


def forget() -> None:
    store.forget()
    op.forget_choices()
    warm._warmed.clear()


def tune(*arguments: str) -> dict:
    named = [part for shape in SHAPES for part in ("--shape", shape)]
    result = CliRunner().invoke(cli.app, ["tune", *named, "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_short_run_is_right_resumable_and_served(places, record_property):
    """20 s are too few for all six cases or enough: either way a second run ends the work."""
    start = time.monotonic()
    first = tune("--m", "1,4,64", "--budget", "20s")
    assert time.monotonic() - start < 90  # what was begun is ended, and the compilers start
    second = tune("--m", "1,4,64", "--budget", "120s")
    assert (second["ended"], len(second["cases"]), second["failures"]) == ("done", 6, [])
    full = {(c["n"], c["m"]): c for c in first["cases"] if c["effort"] == "full"}
    assert all(case in second["cases"] for case in full.values())
    for case in second["cases"]:
        assert case["tried"] > 10
        assert case["old_us"] > 1
        assert case["error"] < 2e-3
        assert case["us"] <= case["old_us"]
        assert case["backend"] is None or case["us"] <= 0.98 * case["over_us"]
    record_property("distance", second["distance"])
    written = store.read(store.user_file(devices.device(0).name), devices.device(0))
    assert written.refused == ()
    assert len(written.shapes) == 2
    assert_served(second["cases"])
    third = tune("--m", "1,4,64", "--budget", "1s")
    assert third["cases"] == second["cases"]


def assert_served(cases: list[dict]) -> None:
    """The table that was written decides each case; where a row names a kernel, that one serves."""
    forget()
    device = devices.device(0)
    for case in cases:
        problem = op.problem_of(case["m"], case["n"], case["k"], torch.bfloat16)
        answer = store.lookup(problem, device)
        assert answer is not None, case
        assert answer.found.file == store.user_file(device.name)
        assert (answer.row.m, answer.row.backend) == (case["m"], case["backend"])
        known = op.known_cutlass(DEVICE, case["n"], case["k"], torch.bfloat16)
        choice = select.choose(problem, device, known)
        if case["backend"] is None:  # nothing beat the heuristic
            assert choice.evidence == "heuristic"
        else:
            assert (choice.evidence, choice.backend) == ("user table", case["backend"])
            assert dataclasses.asdict(choice.config) == case["config"]


def put(config: heuristic.Config) -> select.Device:
    device = devices.device(0)
    row = {"m": 8, "backend": "triton", "config": dataclasses.asdict(config)}
    shape = {"n": 2112, "k": 7168, "dtype": "bfloat16", "rows": [row]}
    data = {
        "schema": 1, "gpu": store.facts(device), "kernels": table.revisions(), "method": {},
        "shapes": [shape],
    }  # fmt: skip
    store.save(store.user_file(device.name), data)
    forget()
    return device


@torch.inference_mode()
def test_a_layer_runs_what_its_table_says(monkeypatch):
    device = put(TUNED)
    launched = []
    real = backend.plan
    monkeypatch.setattr(
        backend, "plan", lambda config, *a, **k: launched.append(config) or real(config, *a, **k)
    )
    layer = graphs.Layer(shapes.Linear("x", 2112, 7168), DEVICE)
    warm.layer(layer.linear, layer.weight, layer.scale, torch.bfloat16)
    assert TUNED in launched
    choice = select.choose(select.Problem(4, 2112, 7168), device)
    assert (choice.evidence, choice.config) == ("user table", TUNED)
    x = activation(4, 7168, torch.bfloat16, "cuda")
    right = reference.multiply(*reference.quantise(x), layer.weight, layer.scale)
    assert_right(layer(x), right)
    graph = torch.cuda.CUDAGraph()  # warmed: nothing but launches
    with torch.cuda.graph(graph):
        out = layer(x)
    out.fill_(float("nan"))
    graph.replay()
    assert_right(out, right)


@torch.inference_mode()
def test_a_tuned_configuration_that_fails_at_load_gives_way(monkeypatch, caplog):
    device = put(TUNED)
    real = backend.plan

    def plan(config, *arguments, **options):
        if config == TUNED:
            raise RuntimeError("out of resource: shared memory")
        return real(config, *arguments, **options)

    monkeypatch.setattr(backend, "plan", plan)
    layer = graphs.Layer(shapes.Linear("x", 2112, 7168), DEVICE)
    warm.layer(layer.linear, layer.weight, layer.scale, torch.bfloat16)
    assert "out of resource" in caplog.text
    assert select.choose(select.Problem(4, 2112, 7168), device).evidence == "heuristic"
    x = activation(4, 7168, torch.bfloat16, "cuda")
    right = reference.multiply(*reference.quantise(x), layer.weight, layer.scale)
    assert_right(layer(x), right)
