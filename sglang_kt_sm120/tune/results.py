"""What a tuning run leaves: its state (to go on later), the table, and a file to share.

All are written atomically. The state holds every finished case in full; the table is made from it.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

from sglang_kt_sm120 import env, system
from sglang_kt_sm120.configs import store, table

logger = logging.getLogger("sglang_kt_sm120")
HOSTS = ("sglang-kt", "sglang", "kt-kernel", "sgl-kernel", "sglang-kernel", "flashinfer-python")
#: What of a case goes into the table beside backend and configuration, as evidence.
EVIDENCE = ("us", "old_us", "over_us", "error", "shared_bytes", "registers", "effort")
TIMING = (
    "CUDA graphs over rotating weights of more than three times the L2, contenders in turn, "
    "quantisation inside, median; checked against float64 before and after"
)


def header(device, dtype: str, stand_in: bool) -> dict[str, Any]:
    """Return what makes results comparable: GPU, kernels, method, `setting`. Without dates."""
    lowering = "SM120 lowering up to M = 16, native above" if stand_in else "as served"
    return {
        "schema": table.SCHEMA,
        "gpu": store.facts(device),
        "kernels": table.revisions(),
        "method": {"stand_in": stand_in, "lowering": lowering, "timing": TIMING},
        "dtype": dtype,
        "setting": setting(device.name),
    }


def setting(name: str) -> dict[str, Any]:
    """Return what a time on the GPU called `name` depends on beside card, kernels and method.

    Driver ("" where nvidia-smi is not there), versions of torch, Triton and the host, and the
    variables that change what is launched. nvidia-smi numbers cards in its own order, so the driver
    is that of the first card of that name.
    """
    versions = system.guarded(system.versions)
    return {
        "driver": _card(name).get("driver_version", ""),
        **{one: system.guarded(lambda one=one: str(import_module(one).__version__))
           for one in ("torch", "triton")},
        "host": {one: versions[one] for one in HOSTS if one in versions} or "no sglang installed",
        "pdl": env.PDL.get(),
        "mma": env.MMA.get(),
        "disabled_backends": sorted(env.DISABLED_BACKENDS.get()),
    }  # fmt: skip


def _card(name: str) -> dict[str, str]:
    """Return what nvidia-smi says about the first card called `name`; empty where nothing."""
    listed = system.guarded(system.gpus)
    listed = listed if isinstance(listed, list) else []  # else {"error": ...}
    return next((gpu for gpu in listed if gpu.get("name") == name), {})


def state_file(name: str, search: str) -> Path:
    """Return where the state of a search (such as "bfloat16") on the GPU called `name` is kept."""
    file = store.user_file(name)
    return file.with_name(f"tune-{file.stem}-{search}.state.json")


def load_state(file: Path, head: dict[str, Any]) -> tuple[dict[str, dict], str]:
    """Return (finished cases, what to tell the user): none where the state is of something else.

    A state that cannot be read, or was made with other kernels, another GPU, method or `setting`,
    starts over: times of two settings must not be compared.
    """
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        cases = dict(state["cases"])
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, f"{file} cannot be read ({error}): starting over"
    changed = [name for name, value in _flat(head).items() if _flat(state).get(name) != value]
    if changed:
        return {}, f"{file} is of another {' and '.join(changed)}: starting over"
    return cases, f"going on after {len(cases)} finished cases of {file}"


def _flat(head: dict[str, Any]) -> dict[str, Any]:
    """Return a header with its setting's parts beside the others, to name what differs."""
    inner = head.get("setting")
    return {**head, **(inner if isinstance(inner, dict) else {}), "setting": None}


def save_state(file: Path, head: dict[str, Any], cases: dict[str, dict]) -> None:
    """Write the state; OSError where the folder cannot be written."""
    store.save(file, {**head, "cases": cases})


def environment(device_facts: dict[str, Any]) -> dict[str, Any]:
    """Return what was installed and how the card was set, beside the facts that torch gives."""
    name = device_facts["gpu"]
    return {
        **setting(name),
        **device_facts,
        "power_limit": _card(name).get("power.limit", ""),
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
        **{name: value for name, value in head.items() if name not in ("dtype", "setting")},
        "environment": {**head["setting"], **facts},
        "date": (now or datetime.now(timezone.utc)).strftime("%Y-%m-%d"),
        "shapes": [
            {"n": n, "k": k, "dtype": dtype, "rows": [rows[m] for m in sorted(rows)]}
            for (n, k), rows in sorted(shapes.items())
        ],
    }


def write_table(data: dict[str, Any], file: Path) -> dict[str, Any]:
    """Merge with the file that is there and write every row that a server would take.

    A row that it would not take is left out with one warning for all, whether it is an earlier one
    (edited by hand, of another kernel) or a new one (a mistake of the tuner): it must not cost the
    others. So is a whole file that cannot be read or merged.

    Returns what was written.

    Raises:
        table.BadTable: None of the new rows would be taken: nothing is written.
        OSError: The folder cannot be written.
    """
    new, refused = table.sound(data)
    if new is None or (refused and not new["shapes"]):
        raise table.BadTable(refused[0])
    old, lost = _earlier(file, new)
    for reasons, what in ((lost, "earlier"), (refused, "new")):
        if reasons:
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            logger.warning(
                "sglang-kt-sm120: %s: %s rows are left out: %s%s", file, what, reasons[0], more
            )
    merged = store.merge(old, new)
    store.save(file, merged)
    return merged


def _earlier(file: Path, new: dict[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the sound part of the table in `file` that goes with `new`, and what is left out."""
    try:
        text = file.read_text(encoding="utf-8")
        old, lost = table.sound(json.loads(text))
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError, RecursionError) as error:
        return None, [f"the file cannot be read ({type(error).__name__}: {error})"]
    differs = store.differs(old, new) if old is not None else []
    return old, [f"they are of another {' and '.join(differs)}"] if differs else lost


def check_sharing(method: dict[str, Any], host: Any, credit: str) -> str:
    """Return the name of who shares a table.

    Args:
        method: As in the table's header. host: `setting`'s.
        credit: One line: it goes to the logs of other people's servers.

    Raises:
        table.BadTable: It was measured on a stand-in, beside no host, or `credit` is no name.
    """
    if method["stand_in"]:
        raise table.BadTable("measured on a GPU that is no SM12x: it says nothing about one")
    if not isinstance(host, dict) or not host:
        raise table.BadTable(
            "no sglang is installed here: what was beaten is unknown to others; tune in the "
            "environment that serves"
        )
    return table.credit(credit) or "anonymous"


def shared(data: dict[str, Any], credit: str) -> dict[str, Any]:
    """Return the table with the name of who shares it.

    Raises:
        table.BadTable: What `check_sharing` says, or it holds nothing that beat the heuristic.
    """
    credit = check_sharing(data["method"], data["environment"].get("host"), credit)
    if not any(row["backend"] for shape in data["shapes"] for row in shape["rows"]):
        raise table.BadTable("nothing beat the built-in heuristic: there is nothing to share")
    return {**data, "shared_by": credit}
