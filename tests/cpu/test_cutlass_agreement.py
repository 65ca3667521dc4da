"""Ranks come to one verdict, whatever each of them saw and whenever it got there."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from sglang_kt_sm120.backends import cutlass
from sglang_kt_sm120.backends.cutlass import agreement

ROOT = Path(__file__).parents[2]
RANKS = (4, 5, 7)  # the second pipeline stage of something


@pytest.fixture(scope="module")
def server():
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))


@pytest.fixture
def groups(server):
    """One group per rank, each with a connection of its own, as in processes of their own."""

    def make(rank):
        store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=10))
        return agreement.Group(store, rank, RANKS, seconds=5.0)

    return {rank: make(rank) for rank in RANKS}


def ask(groups, question: str, said: dict, delays: dict | None = None) -> list[str | None]:
    """Let every rank that is in `said` settle the question at the same time."""

    def one(rank):
        time.sleep((delays or {}).get(rank, 0))
        return agreement.settle(groups[rank], question, said[rank])

    with ThreadPoolExecutor(len(said)) as pool:
        return list(pool.map(one, said))


def test_all_say_yes(groups):
    assert ask(groups, "all", dict.fromkeys(RANKS)) == [None, None, None]


def test_one_that_fails_decides_for_all(groups):
    said = {4: None, 5: "RuntimeError: Error Internal", 7: None}
    answers = ask(groups, "one", said, {5: 0.2})
    assert answers[1] == "RuntimeError: Error Internal"
    for answer in (answers[0], answers[2]):
        assert answer == "another rank cannot use it: RuntimeError: Error Internal"


def test_a_fault_that_is_known_but_not_yet_decided_counts(groups):
    """The rank with the fault has spoken, and is held up before it writes the decision."""
    groups[5].store.set(f"{agreement.PREFIX}/4-5-7/held up/5", "broken")
    answers = ask(groups, "held up", {4: None, 7: None})
    assert answers == ["another rank cannot use it: broken"] * 2


def test_a_rank_that_never_asks_costs_one_wait_and_no_more(groups, caplog):
    for group in groups.values():
        group.seconds = 0.4
    said = {4: None, 5: None}
    started = time.monotonic()
    first = ask(groups, "silent", said)
    assert 0.4 <= time.monotonic() - started < 3
    assert all("a rank did not answer" in answer for answer in first)
    started = time.monotonic()
    assert all("did not answer" in answer for answer in ask(groups, "silent again", said))
    assert time.monotonic() - started < 0.3
    # The one that comes late, and says yes, is told what the others decided.
    assert "did not answer" in agreement.settle(groups[7], "silent", None)
    assert "a rank did not answer in 0 s" in caplog.text


def test_whatever_happens_the_ranks_agree(groups):
    """Random verdicts at random times, some past the wait: the same answer everywhere."""
    for group in groups.values():
        group.seconds = 0.05
    kinds = set()
    for number in range(40):
        for group in groups.values():
            group.silent = False
        said = {rank: random.choice((None, None, None, "broken")) for rank in RANKS}
        delays = {rank: random.random() * 0.08 for rank in RANKS}
        answers = ask(groups, f"random {number}", said, delays)
        assert len({answer is None for answer in answers}) == 1, (said, delays, answers)
        assert answers[0] is not None or not any(said.values())
        kinds.add(answers[0] is None)
    assert kinds == {True, False}


def test_without_a_store_each_rank_has_what_it_saw():
    class Gone:
        def set(self, *_):
            raise RuntimeError("connection reset")

    group = agreement.Group(Gone(), 4, RANKS)
    assert agreement.settle(group, "gone", "slow") == "slow"
    assert agreement.settle(group, "gone", None) == "the ranks could not agree on it"


def test_what_this_rank_saw_is_never_talked_away(groups):
    """A question that was settled before, as by a process with a second device."""
    assert ask(groups, "twice", dict.fromkeys(RANKS)) == [None] * 3
    assert agreement.settle(groups[4], "twice", "broken here") == "broken here"


def test_each_device_of_a_process_has_its_own_verdict(groups, monkeypatch):
    monkeypatch.setattr(cutlass, "_group", groups[4])
    asked = []
    monkeypatch.setattr(agreement, "settle", lambda group, question, why: asked.append(question))
    cutlass._devices.clear()
    for index in (2, 2, 5, None):
        device = torch.device("cpu") if index is None else torch.device("cuda", index)
        cutlass.agreed("q", device, None)
    cutlass._devices.clear()
    assert asked == ["0/q", "0/q", "1/q", "2/q"]


def test_nobody_is_held_up_by_a_rank_that_failed_first(groups):
    """Who knows a fault answers at once, alone."""
    done = threading.Event()
    thread = threading.Thread(
        target=lambda: (agreement.settle(groups[5], "at once", "broken"), done.set())
    )
    thread.start()
    assert done.wait(2)
    thread.join()


def test_ranks_are_the_hosts_tensor_parallel_group(monkeypatch):
    assert agreement.ranks_of_host() == (None, 0, ())
    store = torch.distributed.HashStore()
    group = types.SimpleNamespace(rank=3, ranks=[2, 3])
    module = types.SimpleNamespace(get_tp_group=lambda: group)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", module)
    assert agreement.ranks_of_host() == (None, 0, ())  # torch.distributed is not up
    monkeypatch.setattr(agreement.distributed_c10d, "_get_default_store", lambda: store)
    assert agreement.ranks_of_host() == (store, 3, (2, 3))


def test_a_group_that_cannot_be_read_is_no_secret(monkeypatch, caplog):
    """A host that renamed a function: ranks would differ unseen."""
    monkeypatch.setattr(agreement, "_warned", False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    module = types.SimpleNamespace(get_tensor_group=None)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", module)
    for _ in range(2):
        assert agreement.ranks_of_host() == (None, 0, ())
    assert caplog.text.count("cannot read the host's tensor-parallel group (AttributeError") == 1


RANK = """
import os, sys, types
import torch
from sglang_kt_sm120 import kernels, limits
from sglang_kt_sm120.backends import cutlass, reference
from sglang_kt_sm120.backends.cutlass import agreement, libraries

rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[2],
                                     rank=rank, world_size=2)
parallel_state = types.ModuleType("parallel_state")
parallel_state.get_tp_group = lambda: types.SimpleNamespace(rank=rank, ranks=[0, 1])
sys.modules["sglang.srt.distributed.parallel_state"] = parallel_state
cutlass.join(*agreement.ranks_of_host())

def quantise(x, *, column_major, rows, options):
    codes, scales = reference.quantise(torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0])))
    return codes, scales.t().contiguous().t() if column_major else scales

def load(name):
    def product(codes, weight, scales, weight_scale, dtype):
        if name == "sgl_kernel" and rank == 1:
            raise RuntimeError("Error Internal")
        return reference.multiply(codes, scales, weight, weight_scale).to(dtype)
    return product

kernels.quantise, libraries.load = quantise, load
known = cutlass.prove(torch.device("cpu"), 256, 384, torch.bfloat16, (), limits.NAMES)
print(known.proven, dict(known.struck))
torch.distributed.barrier()
"""


def test_the_ranks_of_a_real_process_group_agree():
    """Two processes as a server's: the kernel that one of them cannot run serves on neither."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), port],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [process.communicate(timeout=120) for process in ranks]
    assert all(process.returncode == 0 for process in ranks), said
    for out, _ in said:
        assert out.startswith("('sglang_jit',) {'sgl_kernel': ")
        assert "Error Internal" in out
    assert "another rank cannot use it" in said[0][0]
    assert "another rank" not in said[1][0]
