"""Warm-up without a GPU: which Ms stand for all, and processes that take turns."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch

from sglang_kt_sm120 import devices, op, select, shapes, system, warm

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


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


def test_a_lock_that_is_never_freed_does_not_stop_a_server(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with warm.one_process_at_a_time("a"), warm.one_process_at_a_time("a", seconds=0.2):
        pass
    assert "another process has held" in caplog.text


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
