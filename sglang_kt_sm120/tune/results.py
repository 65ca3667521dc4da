"""What a tuning run leaves: its state (to go on later), the table, and a file to share.

All are written atomically. The state holds every finished case in full; the table is made from it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sglang_kt_sm120 import system
from sglang_kt_sm120.configs import store, table

#: What of a case goes into the table beside backend and configuration, as evidence.
EVIDENCE = ("us", "old_us", "over_us", "error", "shared_bytes", "registers", "effort")
TIMING = (
    "CUDA graphs over rotating weights of more than three times the L2, contenders in turn, "
    "quantisation inside, median; checked against float64 before and after"
)


def header(device, dtype: str, stand_in: bool) -> dict[str, Any]:
    """Return what makes results comparable: GPU, kernel revisions, method. Without dates."""
    lowering = "SM120 lowering up to M = 16, native above" if stand_in else "as served"
    return {
        "schema": table.SCHEMA,
        "gpu": store.facts(device),
        "kernels": table.revisions(),
        "method": {"stand_in": stand_in, "lowering": lowering, "timing": TIMING},
        "dtype": dtype,
    }


def state_file(name: str, search: str) -> Path:
    """Return where the state of a search (such as "bfloat16") on the GPU called `name` is kept."""
    file = store.user_file(name)
    return file.with_name(f"tune-{file.stem}-{search}.state.json")


def load_state(file: Path, head: dict[str, Any]) -> tuple[dict[str, dict], str]:
    """Return (finished cases, what to tell the user): none where the state is of something else.

    A state that cannot be read, or was made with other kernels, another GPU or method, starts over.
    """
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        cases = dict(state["cases"])
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, f"{file} cannot be read ({error}): starting over"
    changed = [name for name, value in head.items() if state.get(name) != value]
    if changed:
        return {}, f"{file} is of another {' and '.join(changed)}: starting over"
    return cases, f"going on after {len(cases)} finished cases of {file}"


def save_state(file: Path, head: dict[str, Any], cases: dict[str, dict]) -> None:
    """Write the state; OSError where the folder cannot be written."""
    store.save(file, {**head, "cases": cases})


def environment(device_facts: dict[str, Any]) -> dict[str, Any]:
    """Return what was installed and how the card was set, beside the facts that torch gives.

    nvidia-smi numbers cards in its own order, so driver and power limit are those of the first
    card of that name.
    """
    gpus = system.guarded(system.gpus)
    listed = gpus if isinstance(gpus, list) else []  # else {"error": ...}
    gpu = next((g for g in listed if g.get("name") == device_facts["gpu"]), {})
    versions = system.guarded(system.versions)
    hosts = ("sglang-kt", "sglang", "sgl-kernel", "flashinfer-python")
    host = {name: version for name, version in versions.items() if name in hosts}
    return {
        **device_facts,
        "driver": gpu.get("driver_version", ""),
        "power_limit": gpu.get("power.limit", ""),
        "host": host or "no sglang installed",
        "python": platform.python_version(),
    }


def make_table(
    head: dict[str, Any], cases: Iterable[dict], facts: dict[str, Any], now: datetime | None = None
) -> dict[str, Any]:
    """Return the table that the finished cases make; a case that kept the old one says null."""
    shapes: dict[tuple[int, int], dict[int, dict]] = {}
    for case in cases:
        evidence = {name: case[name] for name in EVIDENCE if name in case}
        row = {"m": case["m"], "backend": case["backend"], "config": case["config"], **evidence}
        shapes.setdefault((case["n"], case["k"]), {})[case["m"]] = row
    dtype = head["dtype"]
    return {
        **{name: value for name, value in head.items() if name != "dtype"},
        "environment": facts,
        "date": (now or datetime.now(timezone.utc)).strftime("%Y-%m-%d"),
        "shapes": [
            {"n": n, "k": k, "dtype": dtype, "rows": [rows[m] for m in sorted(rows)]}
            for (n, k), rows in sorted(shapes.items())
        ],
    }


def write_table(data: dict[str, Any], file: Path) -> dict[str, Any]:
    """Merge with the file that is there, check the outcome as a server would, and write it.

    Returns what was written.

    Raises:
        table.BadTable: It would not be taken: a mistake of the tuner, so nothing is written.
        OSError: The folder cannot be written.
    """
    try:
        old = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        old = None
    merged = store.merge(old if isinstance(old, dict) else None, data)
    refused = table.parse(json.dumps(merged)).refused
    if refused:
        raise table.BadTable(refused[0])
    store.save(file, merged)
    return merged


def shared(data: dict[str, Any], credit: str) -> dict[str, Any]:
    """Return the table with the name of who shares it.

    Raises:
        table.BadTable: It was measured on a stand-in, or holds nothing that beat the heuristic.
    """
    if data["method"]["stand_in"]:
        raise table.BadTable("measured on a GPU that is no SM12x: it says nothing about one")
    if not any(row["backend"] for shape in data["shapes"] for row in shape["rows"]):
        raise table.BadTable("nothing beat the built-in heuristic: there is nothing to share")
    return {**data, "shared_by": credit}
