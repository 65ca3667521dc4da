"""How tensor-parallel ranks come to one verdict on a kernel, without a collective.

Ranks that multiply a replicated layer by different kernels drift apart. The probe's layer is
seeded, so equal cards judge alike; what can differ is a build or an allocation that failed on one
rank. A collective over the host's groups could not mend that: a rank that never gets there (its
layer is not ours, it died) would leave the others waiting inside it, or pair it with a collective
of the host's. So ranks write into the key-value store that their process group was made with, and
the first decision written there is everybody's: atomic, and bounded in time.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import distributed_c10d

logger = logging.getLogger("sglang_kt_sm120")
PREFIX = "sglang_kt_sm120"
#: Longer than a kernel takes to build on one rank while the others wait for it.
SECONDS = 300.0
YES = b"yes"
_warned = False


@dataclass
class Group:
    """The ranks that have to agree.

    Attributes:
        store: A `torch.distributed.Store` that all of them reach.
        rank: This one.
        ranks: All of them.
        seconds: How long to wait for the others, once; then no kernel is used any more.
    """

    store: Any
    rank: int
    ranks: tuple[int, ...]
    seconds: float = SECONDS
    silent: bool = False


def ranks_of_host() -> tuple[Any, int, tuple[int, ...]]:
    """Return (store, rank, ranks) of sglang's tensor-parallel group; the store is None without one.

    The store is the one that torch's process group was made with: no collective is needed.
    """
    global _warned
    parallel_state = sys.modules.get("sglang.srt.distributed.parallel_state")
    try:
        group = parallel_state.get_tp_group()
        return distributed_c10d._get_default_store(), group.rank, tuple(group.ranks)
    except Exception as error:  # none yet, or a host or a torch that has changed
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            if not _warned:
                logger.warning(
                    "sglang-kt-sm120: cannot read the host's tensor-parallel group (%s: %s): each "
                    "rank trusts its own probes", type(error).__name__, error,
                )  # fmt: skip
            _warned = True
        return None, 0, ()


def same(group: Group, question: str, value: str, *, wait: bool = True) -> str | None:
    """Return None where every rank says the same, else why not.

    The first value that is written is what the others compare theirs with.

    Args:
        group, question: As for `settle`.
        value: What this rank says, not empty.
        wait: False for a rank to which the others' answers make no difference.
    """
    try:
        first = group.store.compare_set(f"{_base(group, question)}/first", "", value)
    except Exception as error:  # a store that is gone
        logger.warning("sglang-kt-sm120: ranks cannot compare their %s: %s", question, error)
        return "the ranks could not agree on it"
    differs = None if first == value.encode() else f"ranks have different {question}"
    silent = group.silent
    try:
        return settle(group, question, differs, wait=wait)
    finally:  # the first question of a load: a rank that is late for it may come yet
        group.silent = silent


def _base(group: Group, question: str) -> str:
    return f"{PREFIX}/{'-'.join(map(str, group.ranks))}/{question}"


def settle(group: Group, question: str, why: str | None, *, wait: bool = True) -> str | None:
    """Return the verdict of all ranks: None where each found None, else why not.

    Args:
        group: The ranks; every one asks the same questions, in any order, each once.
        question: What the verdict is about; names a key of the store.
        why: This rank's own verdict.
        wait: False where a yes of this rank needs no answer: it is said, and that is all.
    """
    base = _base(group, question)
    try:
        group.store.set(f"{base}/{group.rank}", why or YES)
        if not wait and why is None:
            return None
        decision = _decision(group, base, why)
    except Exception as error:  # a store that is gone; what this rank saw is all there is
        logger.warning("sglang-kt-sm120: ranks cannot agree on %s: %s", question, error)
        return why or "the ranks could not agree on it"
    if decision == YES:
        return why
    return why or f"another rank cannot use it: {decision.decode(errors='replace')}"


def _decision(group: Group, base: str, why: str | None) -> bytes:
    """Return what the first rank to decide wrote; that is this one where it knows enough."""
    others = [f"{base}/{rank}" for rank in group.ranks]
    mine = why.encode() if why else None
    deadline = time.monotonic() + (0 if group.silent else group.seconds)
    while mine is None:
        if group.store.check([f"{base}/decision"]):
            break
        if group.store.check(others):
            mine = YES  # each has spoken; who found a fault has decided, or is about to
            for key in others:
                said = group.store.get(key)
                mine = said if said != YES else mine
        elif time.monotonic() > deadline:
            group.silent = True
            mine = f"a rank did not answer in {group.seconds:.0f} s".encode()
            logger.warning("sglang-kt-sm120: %s on %s", mine.decode(), base)
        else:
            time.sleep(0.02)
    return group.store.compare_set(f"{base}/decision", "", mine or YES)
