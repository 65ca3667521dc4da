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


def hold(queue) -> None:
    with warm.one_process_at_a_time():
        queue.put(("in", time.monotonic()))
        time.sleep(0.5)
        queue.put(("out", time.monotonic()))


def test_processes_take_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    children = [context.Process(target=hold, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    events = sorted((queue.get(timeout=120) for _ in range(4)), key=lambda event: event[1])
    for child in children:
        child.join()
    assert [name for name, _ in events] == ["in", "out", "in", "out"]
    assert system.triton_cache() == tmp_path


def test_a_lock_that_is_never_freed_does_not_stop_a_server(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with warm.one_process_at_a_time(), warm.one_process_at_a_time(seconds=0.2):
        pass
    assert "another process has held" in caplog.text


def test_a_folder_that_cannot_be_written_does_not_stop_a_server(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/nobody/writes/here")
    with warm.one_process_at_a_time():
        pass


def test_rows_of_counters_keep_their_alignment(monkeypatch):
    monkeypatch.setattr(torch, "zeros", lambda *size, **_: torch.empty(*size, dtype=torch.int32))
    for n in (8, 2112, 7168, 36864, 577 * 64):  # the last: 577 tiles
        counters = op.counters_for(n, 7168, torch.device("cuda"))
        assert counters.shape[0] == op.COUNTER_SLOTS
        assert all(row.data_ptr() % 16 == 0 for row in counters.unbind())
