"""What the judgements of all end-to-end tests share."""

from __future__ import annotations

import pytest

from tests.e2e import hosts
from tests.e2e.cases import CASES

HOSTS = sorted(hosts.pythons())
#: Linear functions of sglang that must not run while the plugin serves; its CUTLASS may (prefill).
NEVER = ("triton_w8a8", "deepgemm_w8a8", "flashinfer_gemm")


def calls(record: dict, **wanted) -> int:
    """Count calls, over all processes, whose fields equal `wanted`."""
    rows = [row for process in record["processes"] for row in process["calls"]]
    return sum(
        row["count"] for row in rows if all(row[key] == value for key, value in wanted.items())
    )


def ours(record: dict) -> list[dict]:
    """Return the counted calls of our Triton backend."""
    rows = [row for process in record["processes"] for row in process["calls"]]
    return [row for row in rows if (row["by"], row["name"]) == ("plugin", "triton")]


def captured(record: dict) -> set[int]:
    """Return the numbers of rows that our Triton backend was captured with."""
    return {row["m"] for row in ours(record) if row["capturing"]}


def stock_calls(record: dict) -> list[dict]:
    """Return what sglang's own linear functions served that the plugin should have."""
    rows = [row for process in record["processes"] for row in process["calls"]]
    return [row for row in rows if row["by"] == "stock" and row["name"].startswith(NEVER)]


def here(*names: str):
    """Mark one test per case, for the hosts of this machine."""
    return [
        pytest.param(name, marks=pytest.mark.cases(name))
        for name in names
        if CASES[name].host in HOSTS
    ]
