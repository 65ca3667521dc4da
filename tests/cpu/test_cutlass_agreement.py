"""Ranks come to one verdict, whatever each of them saw and whenever it got there."""

from __future__ import annotations

import os
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

from sglang_kt_sm120 import devices, host, op, select
from sglang_kt_sm120 import ranks as rank_agreement
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


def compare(groups, question: str, values: dict, delays: dict | None = None) -> list[str | None]:
    """Let every rank say its value at the same time; who says "none" does not wait."""

    def one(rank):
        time.sleep((delays or {}).get(rank, 0))
        value = values[rank]
        return agreement.same(groups[rank], question, value, wait=value != "none")

    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(one, values))


def test_ranks_that_say_the_same_go_on_and_others_do_not(groups):
    assert compare(groups, "same", dict.fromkeys(RANKS, "a")) == [None] * 3
    assert compare(groups, "nothing", dict.fromkeys(RANKS, "none")) == [None] * 3
    started = time.monotonic()
    answers = compare(groups, "tables", {4: "a", 5: "b", 7: "a"})
    assert all("ranks have different tables" in answer for answer in answers)
    answers = compare(groups, "some", {4: "a", 5: "none", 7: "a"}, {5: 0.2})
    assert all("different some" in answer for answer in answers)
    answers = compare(groups, "few", {4: "none", 5: "none", 7: "a"}, {7: 0.2})
    assert "different few" in answers[2]
    assert time.monotonic() - started < 3  # nobody waits out the 5 s


def test_a_rank_that_is_late_for_the_tables_is_waited_for_later(groups):
    """It may still be loading experts; kernels are asked about after that."""
    groups[4].seconds = 0.2
    assert "did not answer" in agreement.same(groups[4], "late tables", "a")
    assert not groups[4].silent


def test_who_waits_for_no_answer_is_not_held_up(groups):
    """The others never come: a rank without tables loads its model all the same."""
    started = time.monotonic()
    assert agreement.same(groups[4], "alone", "none", wait=False) is None
    assert time.monotonic() - started < 1


def test_whatever_is_compared_and_whenever_the_ranks_agree(groups):
    kinds = set()
    for number in range(30):
        values = {rank: random.choice(("a", "a", "a", "b", "none")) for rank in RANKS}
        delays = {rank: random.random() * 0.05 for rank in RANKS}
        answers = dict(zip(RANKS, compare(groups, f"any {number}", values, delays), strict=True))
        alike = len(set(values.values())) == 1
        for rank, value in values.items():
            if value != "none":  # who has tables takes them where all have the same
                assert (answers[rank] is None) == alike, (values, delays, answers)
        kinds.add(alike)
    assert kinds == {True, False}


def test_a_store_that_is_gone_is_no_yes():
    class Gone:
        def compare_set(self, *_):
            raise RuntimeError("connection reset")

    group = agreement.Group(Gone(), 4, RANKS)
    assert agreement.same(group, "gone", "a") == "the ranks could not agree on it"


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


TABLES = """
import json, logging, sys, types
import torch
from pathlib import Path
from sglang_kt_sm120 import devices, heuristic, op, ranks, select
from sglang_kt_sm120.backends import cutlass
from sglang_kt_sm120.backends.cutlass import agreement
from sglang_kt_sm120.configs import store, table

rank, port, split = int(sys.argv[1]), sys.argv[2], sys.argv[3]
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
card = devices.describe("NVIDIA GeForce RTX 5090")
devices.device = lambda index: card
store.SHIPPED = ()
if split != "none":
    config = heuristic.Config("direct", 8, 64, num_warps=4, unroll=2, fused=True, splits=int(split))
    row = {"m": 4, "backend": "triton", "config": store.config_dict(config)}
    shape = {"n": 2112, "k": 7168, "dtype": "bfloat16", "rows": [row]}
    store.save(store.user_file(card.name), {
        "schema": 1, "gpu": store.facts(card), "kernels": table.revisions(), "shapes": [shape],
        "written by": rank,
    })
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:" + port,
                                     rank=rank, world_size=2)
parallel_state = types.ModuleType("parallel_state")
parallel_state.get_tp_group = lambda: types.SimpleNamespace(rank=rank, ranks=[0, 1])
sys.modules["sglang.srt.distributed.parallel_state"] = parallel_state
cutlass.join(*agreement.ranks_of_host())
before = op.generation
for _ in range(3):
    ranks.agree_on_tables(torch.device("cuda", rank))
choice = select.choose(select.Problem(4, 2112, 7168), card)
print("evidence:", choice.evidence, "forgotten:", op.generation - before)
torch.distributed.barrier()
"""


@pytest.mark.parametrize(
    ("splits", "evidence"),
    [
        (("3", "3"), "user table"),
        (("3", "4"), "heuristic"),
        (("3", "none"), "heuristic"),
        (("none", "3"), "heuristic"),
        (("none", "none"), "heuristic"),
    ],
)
def test_ranks_take_one_table_or_none(splits, evidence, tmp_path):
    """Two hosts, each with a folder of its own: nobody waits, and both serve alike."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TABLES, str(rank), port, splits[rank]], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "SGLANG_KT_SM120_CONFIG_DIR": str(tmp_path / str(rank))},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [process.communicate(timeout=120) for process in ranks]
    assert all(process.returncode == 0 for process in ranks), said
    assert time.monotonic() - started < 60
    for split, (out, _) in zip(splits, said, strict=True):
        left = evidence == "heuristic" and split != "none"
        assert f"evidence: {evidence} forgotten: {int(left)}" in out
        assert out.count("tuned tables are left alone") == int(left)


def test_ranks_compare_their_tables_before_a_layer_decides(monkeypatch):
    called = []
    for module, name in ((cutlass, "join"), (rank_agreement, "agree_on_tables"),
                         (op, "prove_cutlass")):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, name=name: called.append(name))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weight = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), shape=(128, 128))
    host._prove_cutlass(weight, torch.bfloat16)
    assert called == ["join", "agree_on_tables", "prove_cutlass"]


def test_each_device_is_compared_once_and_only_who_has_tables_waits(groups, monkeypatch):
    asked = []
    monkeypatch.setattr(cutlass, "_group", groups[4])
    monkeypatch.setattr(cutlass, "_devices", [])
    monkeypatch.setattr(cutlass, "_compared", {})
    monkeypatch.setattr(
        agreement, "same", lambda group, *said, wait: asked.append((*said, wait)) or None
    )
    monkeypatch.setattr(devices, "device", lambda index: index)
    monkeypatch.setattr(select, "tables_digest", {2: "", 3: "abc"}.get)
    for index in (2, 2, 3, 3, 2):  # a layer each
        rank_agreement.agree_on_tables(torch.device("cuda", index))
    assert asked == [("0/tables", "none", False), ("1/tables", "abc", True)]


def test_under_deterministic_inference_no_rank_is_asked(monkeypatch):
    monkeypatch.setattr(op, "_deterministic", True)
    monkeypatch.setattr(cutlass, "same", None)
    rank_agreement.agree_on_tables(torch.device("cuda", 0))


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
