"""Finds the tuned table of a GPU, once per process, and writes one.

Order: the user's folder (`SGLANG_KT_SM120_CONFIG_DIR`), then a table that ships with this package
for this very GPU, then one for its class (SM count, memory bandwidth, capability), else none: the
heuristic. The first table that says something about an M decides it, also when it says "keep the
heuristic"; a row that is refused says nothing. Ranks of one host read the same files; several hosts
need the same folder's content.

Nothing here raises while serving: a file that cannot be used gives one warning with its name and
the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kt_sm120 import env
from sglang_kt_sm120.configs import table

logger = logging.getLogger("sglang_kt_sm120")
HERE = Path(__file__).parent
#: Folders of the wheel, in the order in which they are asked; files within one by name.
SHIPPED = (HERE / "shipped", HERE / "community")
USER, DEVICE, CLASS = "user table", "device table", "class table"


@dataclass(frozen=True)
class Found:
    """A table that applies to a GPU: where it comes from ("user table", ...), its file, itself."""

    kind: str
    file: Path
    table: table.Table

    def title(self) -> str:
        """Name it for a person: file, the GPU it was tuned on, who shared it."""
        credit = f", shared by {self.table.credit}" if self.table.credit else ""
        return f"{self.file} (tuned on {self.table.gpu['name']}{credit})"


@dataclass(frozen=True)
class Answer:
    """What a table says about one product: the row that decides it, and where it stands."""

    row: table.Row
    found: Found


_refused: set[tuple[int, int, str]] = set()  # (n, k, dtype) whose rows failed at load
_left: set[Any] = set()  # devices for which no table is asked any more


def folder() -> Path:
    """Return the user's folder."""
    return env.CONFIG_DIR.get()


def user_file(name: str) -> Path:
    """Return the file in the user's folder that belongs to the GPU called `name`."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return folder() / f"{slug}.json"


def facts(device) -> dict[str, Any]:
    """Return what a table records about its GPU, from a `select.Device`."""
    return {
        "name": device.name,
        "capability": "{}.{}".format(*device.capability),
        "sm_count": device.sm_count,
        "bandwidth_gbs": device.bandwidth_gbs,
        "shared_bytes": device.shared_bytes,
    }


def relation(found: table.Table, device) -> str | None:
    """Return DEVICE or CLASS where a table of that GPU may serve this one, else None.

    Editions of one GPU (Server, Workstation, Max-Q) are one class: a choice of tile depends on SM
    count, memory and instructions, hardly on clocks.
    """
    gpu, own = found.gpu, facts(device)
    alike = all(gpu[key] == own[key] for key in ("capability", "sm_count"))
    if alike and gpu["name"] == own["name"]:
        return DEVICE
    known = own["bandwidth_gbs"] and gpu["bandwidth_gbs"] == own["bandwidth_gbs"]
    return CLASS if alike and known and not found.stand_in else None


def read(file: Path, device=None) -> table.Table:
    """Read and check a file.

    Raises:
        table.BadTable: What `table.parse` says, or the file cannot be read.
        FileNotFoundError: There is no such file.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(file) from None
    except (OSError, UnicodeError) as error:
        raise table.BadTable(f"it cannot be read: {error}") from None
    return table.parse(text, device)


def _refuse(file: Path, reason: object) -> None:
    logger.warning(
        "sglang-kt-sm120: tuned table %s is not used: %s; the next table decides, or the built-in "
        "heuristic.",
        file, reason,
    )  # fmt: skip


def _mine(file: Path, device) -> Found:
    mine = read(file, device)
    if relation(mine, device) is None:
        this = f"{device.name} ({device.capability[0]}.{device.capability[1]})"
        raise table.BadTable(
            f"it is for {mine.gpu['name']} ({mine.gpu['capability']}), this is {this}"
        )
    return Found(USER, file, mine)


def trouble(device) -> str | None:
    """Return why the user's table for `device` is not used, in full or in part; None if it is."""
    try:
        file = user_file(device.name)
        refused = _mine(file, device).table.refused
    except FileNotFoundError:
        return None
    except table.BadTable as error:
        return f"{file}: {error}"
    except (OSError, RuntimeError) as error:
        return str(error)
    return f"{file}: not used for {refused[0]}" if refused else None


@functools.cache
def _tables(user: Path | None, device) -> tuple[Found, ...]:
    """Return `_find`'s answer, the same for the life of the process: each file is read once."""
    try:
        found = _find(user, device)
        _announce(found, device)
    except Exception as error:  # ours must not take a server down: no table it is
        _refuse(user or HERE, f"{type(error).__name__}: {error}")
        return ()
    return tuple(found)


def _find(user: Path | None, device) -> list[Found]:
    """Read every table that applies to `device`, in the order in which they are asked."""
    found: list[Found] = []
    if user is not None:
        try:
            found.append(_mine(user, device))
        except FileNotFoundError:
            pass
        except table.BadTable as error:
            _refuse(user, error)
    for kind in (DEVICE, CLASS):
        for file in (file for place in SHIPPED for file in sorted(place.glob("*.json"))):
            try:
                shipped = read(file, device)
            except table.BadTable as error:
                if kind == DEVICE:  # said once, not in both passes
                    _refuse(file, error)
                continue
            if relation(shipped, device) == kind:
                found.append(Found(kind, file, shipped))
    return found


def _announce(found: list[Found], device) -> None:
    """Log what was found, once, or how to come by a table."""
    for item in found:
        for reason in item.table.refused[:1]:
            more = len(item.table.refused) - 1
            logger.warning(
                "sglang-kt-sm120: tuned table %s: not used for %s%s; the next table decides "
                "there, or the heuristic.",
                item.file, reason, f" (and {more} more)" if more else "",
            )  # fmt: skip
        digest = item.table.digest
        logger.info("sglang-kt-sm120: %s %s, digest %s", item.kind, item.title(), digest)
    if not found:
        logger.info("sglang-kt-sm120: %s", offer(device.name))


def offer(name: str) -> str:
    """Return the line that offers tuning, for a GPU that no table covers."""
    return (
        f"no tuned table for {name}: `sglang-kt-sm120 tune --quick --model PATH` (90 s, server "
        "stopped) finds what is fastest on this card"
    )


def tables(device) -> tuple[Found, ...]:
    """Return the tables that apply to a `select.Device`, the first to ask first. Never raises."""
    if device in _left:
        return ()
    try:
        user = user_file(device.name)
    except RuntimeError:  # no home folder
        user = None
    return _tables(user, device)


def forget() -> None:
    """Read the files anew at the next question (tests, and `tune` after it has written)."""
    _tables.cache_clear()
    said.cache_clear()
    _refused.clear()
    _left.clear()


@functools.cache
def said(device) -> str:
    """Return a digest of every row that may decide on `device`, in their order; "" for none.

    Of what was read, not of the files: a row may be refused on one host and stand on another.
    """
    listed = [sorted(found.table.shapes.items()) for found in tables(device)]
    listed = [one for one in listed if not all(row.refused for _, rows in one for row in rows)]
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:16] if listed else ""


def leave(device, reason: str) -> bool:
    """Ask no table for `device` in this process from now on. False where that was so before."""
    if device in _left:
        return False
    _left.add(device)
    said.cache_clear()
    logger.warning(
        "sglang-kt-sm120: tuned tables are left alone (%s); the heuristic serves. Ranks need the "
        "same tables: copy one host's %s to the others, with the same package versions.",
        reason, env.CONFIG_DIR.name,
    )  # fmt: skip
    return True


def distrust(n: int, k: int, dtype: str, reason: str) -> bool:
    """Stop using tables for this shape in this process, because what one said failed at load.

    Returns False where that was so before: the failure has another cause.
    """
    if (n, k, dtype) in _refused:
        return False
    _refused.add((n, k, dtype))
    logger.warning(
        "sglang-kt-sm120: a tuned configuration for N=%d K=%d failed (%s); the heuristic serves "
        "this shape. `sglang-kt-sm120 tune` makes a new table.", n, k, reason,
    )  # fmt: skip
    return True


def lookup(problem, device) -> Answer | None:
    """Return what the tables say about a `select.Problem`, or None: the heuristic decides."""
    if (problem.n, problem.k, problem.dtype) in _refused:
        return None
    for found in tables(device):
        row = found.table.row(problem.m, problem.n, problem.k, problem.dtype)
        if row is not None:
            return Answer(row, found)
    return None


def rows(problem, device) -> list[int]:
    """Return every M that a table holds for the shape of `problem`: what a warm-up has to walk."""
    key = (problem.n, problem.k, problem.dtype)
    listed = (row for found in tables(device) for row in found.table.shapes.get(key, ()))
    return sorted({row.m for row in listed if not row.refused})


def triton_configs(device) -> list[Any]:
    """Return every `heuristic.Config` in the tables for `device`: what could be compiled ahead."""
    listed = [
        row.config
        for found in tables(device)
        for shape in found.table.shapes.values()
        for row in shape
        if row.backend == "triton"
    ]
    return list({config.variant(): config for config in listed}.values())


def differs(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return in what two tables differ so that no row of one may stand in the other.

    Not `kernels`: each row is bound to its own, and `table.sound` leaves out the stale ones.
    """
    return [key for key in ("schema", "gpu", "method") if old.get(key) != new.get(key)]


def merge(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return `new` with the rows of `old` that it says nothing about, shapes and Ms in order.

    Rows of another GPU or method are dropped: one table, one truth. Rows that were measured in
    another environment (driver, versions) stay and say in which.

    Args:
        old, new: What `table.sound` returned: rows of the kernels that are here now.
    """
    kept: dict[tuple, dict[int, dict]] = {}
    if old is not None and differs(old, new):
        old = None
    for source in (old, new):
        measured = {}
        if source is old and old and old.get("environment") != new.get("environment"):
            measured = {"environment": old.get("environment")}
        for shape in (source or {}).get("shapes", ()):
            rows_of = kept.setdefault((shape["n"], shape["k"], shape["dtype"]), {})
            rows_of.update({row["m"]: {**measured, **row} for row in shape["rows"]})
    shapes = [
        {"n": n, "k": k, "dtype": dtype, "rows": [by_m[m] for m in sorted(by_m)]}
        for (n, k, dtype), by_m in sorted(kept.items())
    ]
    return {**new, "shapes": shapes}


def save(file: Path, data: dict[str, Any]) -> None:
    """Write a table or another JSON object so that a reader sees the old file or the new one.

    Raises:
        OSError: The folder cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            json.dump(data, handle, indent=1)
            handle.write("\n")
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(name, 0o644)  # mkstemp's is private; other users' servers may read a table
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def config_dict(config: Any) -> dict[str, Any] | None:
    """Return a backend's configuration as a table holds it."""
    return None if config is None else dataclasses.asdict(config)
