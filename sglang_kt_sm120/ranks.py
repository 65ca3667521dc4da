"""Tensor-parallel ranks take the same tuned tables, or none.

Ranks on several hosts read folders of their own. With different tables they would multiply a
replicated layer by different kernels and drift apart, and wait in vain for an answer to questions
that only a table raises.
"""

from __future__ import annotations

from importlib import import_module

import torch

from sglang_kt_sm120 import devices, op, select


def agree_on_tables(device: torch.device) -> None:
    """Leave tuned tables alone on every rank, with one warning, where ranks have different ones.

    To be called before a layer on `device` decides anything, by every rank; each answers once. A
    rank without tables says so and does not wait.
    """
    if op.is_deterministic():  # no rank asks a table
        return
    facts = devices.device(device.index)
    mine = select.tables_digest(facts)
    same = import_module("sglang_kt_sm120.backends.cutlass").same
    why = same("tables", device, mine or "none", wait=bool(mine))
    if why and mine and select.leave_tables(facts, why):
        op.forget_choices()
