"""Warm-up without a GPU: which Ms stand for all, and processes that take turns."""

from __future__ import annotations

import multiprocessing
import re
import time
from dataclasses import replace

import pytest
import torch

from sglang_kt_sm120 import devices, env, heuristic, limits, op, select, shapes, system, warm
from sglang_kt_sm120.configs import store, table

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
BF16 = torch.bfloat16


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("gpu", [RTX, "NVIDIA GeForce RTX 5090", "NVIDIA GB10"])
def test_the_representatives_cover_every_m(gpu, deterministic):
    """What a layer runs once at load holds every variant that any M from 1 to 20,000 can take."""
    device = devices.describe(gpu)
    for layer in shapes.unique(shapes.SHAPE_SETS["deepseek-r1"]):
        problem = select.Problem(1, layer.n, layer.k, deterministic=deterministic)

        def variant(m, problem=problem):
            asked = select.Problem(
                select.bucket(m), problem.n, problem.k, deterministic=deterministic
            )
            return select.choose(asked, device).config.variant()

        warmed = {variant(m) for m in warm.representatives(problem, device)}
        met = {variant(m) for m in (*range(1, 400), *range(400, 20_000, 61))}
        assert met <= warmed, (layer, met - warmed)


def rank(queue, start, compiled, job: str) -> None:
    """Warm as a rank does: compile into the shared folder what is not there, then load it."""
    start.wait()
    with warm.one_process_at_a_time(job):
        queue.put(("in", time.monotonic()))
        if not compiled.exists():
            time.sleep(0.3)
            compiled.touch()
            queue.put(("compiled", time.monotonic()))
        time.sleep(0.5)
        queue.put(("out", time.monotonic()))


def ranks(compiled, job: str, count: int = 4) -> list[str]:
    """Run `rank` in processes of its own at once; return what they did, in order of time."""
    context = multiprocessing.get_context("spawn")
    queue, start = context.Queue(), context.Barrier(count)
    arguments = (queue, start, compiled, job)
    children = [context.Process(target=rank, args=arguments) for _ in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=120)
        assert child.exitcode == 0
    events = []
    while not queue.empty():
        events.append(queue.get(timeout=10))
    return [name for name, _ in sorted(events, key=lambda event: event[1])]


def test_ranks_compile_once_and_never_wait_for_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert system.triton_cache() == tmp_path
    cold = ranks(tmp_path / "kernel", "job")
    assert cold[:3] == ["in", "compiled", "out"]  # alone, while it compiles
    assert sorted(cold) == sorted(["in", "out"] * 4 + ["compiled"])
    warm_start = ranks(tmp_path / "kernel", "job")
    assert warm_start == ["in"] * 4 + ["out"] * 4  # all at once
    assert ranks(tmp_path / "kernel", "another") != warm_start  # not known to be there: in turn


def test_a_job_that_failed_is_not_done(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="out of memory"), warm.one_process_at_a_time("job"):
        raise RuntimeError("out of memory")
    assert not list(tmp_path.glob("*.done"))


GEFORCE = "NVIDIA GeForce RTX 5090"


@pytest.fixture
def loading(monkeypatch, tmp_path):
    """A layer of a card that is made up, about to be warmed; nothing is launched."""
    card = devices.describe(GEFORCE)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(env.CONFIG_DIR.name, str(tmp_path / "tables"))
    monkeypatch.setattr(devices, "device", lambda index: card)
    monkeypatch.setattr(devices, "arch", lambda index: None)
    monkeypatch.setattr(warm, "_warmed", set())
    store.forget()
    yield torch.zeros(7168, 2048, dtype=torch.float8_e4m3fn), torch.ones(56, 16)
    store.forget()


@pytest.mark.parametrize(
    ("variable", "value"), [(env.BACKEND, "cutlass"), (env.DISABLED_BACKENDS, "triton")]
)
def test_a_server_without_our_kernels_loads(loading, variable, value, monkeypatch):
    """What no CUTLASS kernel could serve is none of this layer's business."""
    proven = limits.Known(("flashinfer",), (), "flashinfer")
    monkeypatch.setenv(variable.name, value)
    monkeypatch.setattr(op, "known_cutlass", lambda *_: proven)
    called = []
    warm.layer(lambda **call: called.append(call["input"].shape[0]), *loading, torch.bfloat16)
    assert called


def test_a_start_says_in_one_line_what_it_compiled(loading, monkeypatch, caplog):
    """For all layers together; again only for what another mode compiles."""
    caplog.set_level("INFO", logger="sglang_kt_sm120")
    _, scale = loading
    launched = []
    monkeypatch.setattr(warm, "_compile", lambda *_: 17)

    def load():
        for n, k in ((7168, 2048), (2112, 7168), (7168, 2048)):
            shape = torch.zeros(n, k, dtype=torch.float8_e4m3fn)
            warm.layer(lambda **call: launched.append(call["input"].shape), shape, scale, BF16)

    def lines():
        return [text for text in caplog.messages if "ready in" in text]

    load()
    (line,) = lines()
    assert re.fullmatch(r"sglang-kt-sm120: 17 kernel variants ready in \d+\.\d s", line)
    once = len(launched)
    assert once
    load()
    assert len(launched) == once
    op.set_deterministic(True)
    try:
        load()
        assert len(lines()) == 2
        assert len(launched) > once
    finally:
        op.set_deterministic(False)


def tuned_table() -> None:
    card, config = devices.describe(GEFORCE), replace(heuristic.SHORT8, splits=4, chunk=9)
    row = {"m": 4, "backend": "triton", "config": store.config_dict(config)}
    shape = {"n": 7168, "k": 2048, "dtype": "bfloat16", "rows": [row]}
    head = {"schema": 1, "gpu": store.facts(card), "kernels": table.revisions()}
    store.save(store.user_file(card.name), {**head, "shapes": [shape]})


def test_what_takes_the_place_of_a_failed_configuration_is_compiled_in_turn(loading, monkeypatch):
    """The job that failed is not done, and the heuristic's kernels are another job."""
    tuned_table()
    jobs, launched, real = [], [], warm._locked

    def locked(folder, seconds):
        jobs.append(len(list(folder.glob("*.done"))))
        return real(folder, seconds)

    def launch(linear, weight, scale, dtype, ms):
        launched.append(ms)
        if len(launched) == 1:
            raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(warm, "_locked", locked)
    monkeypatch.setattr(warm, "_launch", launch)
    monkeypatch.setattr(warm, "_compile", lambda *_: 0)
    warm.layer(None, *loading, torch.bfloat16)
    assert len(launched) == 2
    assert jobs == [0, 0]  # the lock was taken for both, and nothing was done after the first
    assert len(list(system.triton_cache().glob("*.done"))) == 1


def test_a_job_is_named_after_what_it_compiles(loading, monkeypatch):
    weight, _ = loading
    problem, card = select.Problem(1, 7168, 2048), devices.describe(GEFORCE)
    none, ms = select.NOTHING_KNOWN, [1, 9, 300]

    def job(cutlass=none, ms=ms):
        return warm._job(problem, card, cutlass, weight, ms)

    jobs = [job(), job(ms=[1, 9]), job(limits.Known(("flashinfer",), (), "flashinfer"))]
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/cuda/bin/ptxas")
    jobs.append(job())
    assert len(set(jobs)) == 4
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert job() == jobs[-1]


def test_a_lock_that_is_never_freed_does_not_stop_a_server(tmp_path, monkeypatch, caplog):
    """It is waited for once, whatever the number of jobs."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm, "_waited_in_vain", False)
    begun = time.monotonic()
    with warm.one_process_at_a_time("held"):
        for job in "abcdef":
            with warm.one_process_at_a_time(job, seconds=1):
                pass
    assert 1 <= time.monotonic() - begun < 2
    assert caplog.text.count("another process has held") == 1


def test_who_has_nothing_to_compile_does_not_wait_for_who_has(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm, "_waited_in_vain", False)
    with warm.one_process_at_a_time("known"):
        pass
    with warm.one_process_at_a_time("new"), warm.one_process_at_a_time("known", seconds=0.2):
        pass
    assert caplog.text == ""


def test_a_folder_that_cannot_be_written_does_not_stop_a_server(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/nobody/writes/here")
    with warm.one_process_at_a_time("job"):
        pass


def test_rows_of_counters_keep_their_alignment(monkeypatch):
    monkeypatch.setattr(torch, "zeros", lambda *size, **_: torch.empty(*size, dtype=torch.int32))
    for n in (8, 2112, 7168, 36864, 577 * 64):  # the last: 577 tiles
        counters = op.counters_for(n, 7168, torch.device("cuda"))
        assert counters.shape[0] == op.COUNTER_SLOTS
        assert all(row.data_ptr() % 16 == 0 for row in counters.unbind())
