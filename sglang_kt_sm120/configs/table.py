"""The format of a tuned table, and every check that one passes before it may decide anything.

A table is one JSON object for one GPU:

    {"schema": 1, "gpu": {"name", "capability", "sm_count", "bandwidth_gbs", "shared_bytes", ...},
     "kernels": {"direct": REVISION, ..., "sglang_jit": "sglang-kt 0.7.2", ...},
     "method": {"stand_in": false, ...},
     "shapes": [{"n", "k", "dtype", "rows": [{"m", "backend", "config", ...}, ...]}, ...]}

A row whose `backend` is null says that M was tuned and nothing beat the heuristic. `config` is a
`heuristic.Config` written out for "triton"; for "cutlass" it is {"kernel": name of limits.py}, or
null for any of them. A row is bound to the revision, or the library's version, of its kernel. Other
keys (times, versions, proof) are for people and are not read here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_kt_sm120 import heuristic, limits

SCHEMA = 1
BACKENDS = ("triton", "cutlass")
DTYPES = ("bfloat16", "float16")
DECODE_M = heuristic.DECODE_ROWS
#: Classes of M: up to 8, 16, 32 and 64 rows, as the heuristic has them, and prefill.
CLASSES = (8, 16, 32, DECODE_M)
PREFILL = 0
#: A tuned M answers for fewer rows of its class down to a quarter of it (see `Table.row`).
REACH = 4
#: The largest M of a row: a load walks all Ms up to five times the largest (see variants.rows).
MAX_M = 16384
MAX_CREDIT = 80
_TOO_LARGE = f"rows end at M={MAX_M}"
KERNELS = Path(__file__).parent.parent / "kernels"
#: What each kernel is made of besides its own file: a change in any of them voids its entries.
SOURCES = {
    "direct": ("direct.py", "parts.py"),
    "pipelined": ("pipelined.py", "parts.py", "quant.py"),
    "tiled": ("tiled.py", "parts.py", "quant.py"),
}
#: Allowed values of each launch field, where a set says it all.
_ALLOWED = {
    "kernel": set(SOURCES),
    "block_m": {8, 16, 32, 64, 128},
    "block_n": {16, 32, 64, 128},
    "num_warps": {1, 2, 4, 8, 16},
    "num_stages": set(range(1, 9)),
    "unroll": {1, 2, 4},
    "registers": {0, *range(24, 256, 8)},
    "chunk": set(range(1, 33)),
    "group_m": set(range(1, 65)),
    "prefetch": set(range(9)),
}
_KINDS = {"str": str, "int": int, "bool": bool}  # of heuristic.Config's fields


class BadTable(ValueError):
    """A table that must not be used; the message says why."""


#: What reading a value of the wrong kind, or one that is not there, raises.
_MALFORMED = (BadTable, KeyError, TypeError, AttributeError)


def row_class(m: int) -> int:
    """Return the class of `m`: one of `CLASSES`, or `PREFILL`."""
    return next((rows for rows in CLASSES if m <= rows), PREFILL)


@dataclass(frozen=True)
class Row:
    """One tuned M of one shape.

    Attributes:
        m: Rows of the activation.
        backend: "triton", "cutlass", or None: nothing beat the heuristic.
        config: `heuristic.Config` for "triton"; for "cutlass" {"kernel": name}, or None: any.
        refused: It cannot serve here: for the Ms that it would decide this table says nothing.
    """

    m: int
    backend: str | None
    config: Any = None
    refused: bool = False


@dataclass(frozen=True)
class Table:
    """A checked table.

    Attributes:
        gpu: Its GPU's facts, as in the file.
        shapes: (n, k, dtype) -> rows, by rising M.
        refused: What of it is not used, a text each.
        stand_in: Measured through another GPU's lowering: only for the very GPU that it names.
        credit: Who shared it.
        digest: Of its text.
    """

    gpu: dict[str, Any]
    shapes: dict[tuple[int, int, str], tuple[Row, ...]]
    refused: tuple[str, ...] = ()
    stand_in: bool = False
    credit: str = ""
    digest: str = ""

    def row(self, m: int, n: int, k: int, dtype: str) -> Row | None:
        """Return the row that decides `m`, or None where this table has nothing to say.

        It is the smallest tuned M that is not below `m`: a tile made for at least as many rows. It
        must be of the same `row_class`, since the next class has other tiles, and not more than
        `REACH` times `m`. Above the largest tuned M that one decides, up to `REACH` times it, if
        both are prefill. Where that row is refused, the next table is to be asked.
        """
        rows = self.shapes.get((n, k, dtype), ())
        row = next((row for row in rows if row.m >= m), None)
        if row is not None:
            decides = row_class(row.m) == row_class(m) and row.m <= REACH * m
        elif rows:
            row = rows[-1]
            decides = row.m > DECODE_M and m <= REACH * row.m
        return row if row is not None and decides and not row.refused else None


@functools.cache
def revision(kernel: str) -> str:
    """Return the revision of a kernel: a digest of the sources that it is made of."""
    digest = hashlib.sha256()
    for name in SOURCES[kernel]:
        digest.update((KERNELS / name).read_bytes())
    return digest.hexdigest()[:12]


def revisions() -> dict[str, str]:
    """Return what a table records of kernels: revisions of ours, versions of the host's here."""
    return {kernel: revision(kernel) for kernel in SOURCES} | limits.versions()


def shared_bytes(config: heuristic.Config) -> int:
    """Return the shared memory that a launch needs at least: its ring of tiles, in bytes.

    One stage fewer than `num_stages` is in flight, each the weight tile and the activation tile of
    one K block (two bytes an element where it is quantised on the way).
    """
    if config.kernel == "direct":
        return 0
    activation = config.block_m * heuristic.GROUP * (2 if config.fused else 1)
    return max(config.num_stages - 1, 1) * (config.block_n * heuristic.GROUP + activation)


def parse(text: str, device=None) -> Table:
    """Check a table's text and return it.

    Args:
        text: The file's content.
        device: The `select.Device` that it shall serve, for the limits of shared memory and of
            its instructions and the versions of the host's libraries; None checks against the GPU
            that the table names.

    Raises:
        BadTable: Not JSON, another schema, a missing key, a value of the wrong kind, or Ms that do
            not rise. A row that merely cannot serve here (kernel changed, too much shared memory,
            a value out of range) is refused, its M is left to the next table, and `refused` lists
            it; one above `MAX_M` is as if it were not there, and listed too.
    """
    if not text.strip():
        raise BadTable("it is empty")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadTable(f"it is no JSON (cut off?): {error}") from None
    try:
        return replace(_table(data, device), digest=hashlib.sha256(text.encode()).hexdigest()[:8])
    except KeyError as error:
        raise BadTable(f"it has no {error}") from None
    except (TypeError, AttributeError) as error:
        raise BadTable(f"a value of the wrong kind: {error}") from None


def _table(data: dict, device) -> Table:
    if data["schema"] != SCHEMA:
        raise BadTable(f"its schema is {data['schema']!r}, this version reads {SCHEMA}")
    gpu = data["gpu"]
    for key, kind in (
        ("name", str), ("capability", str), ("sm_count", int), ("bandwidth_gbs", (int, float)),
        ("shared_bytes", int),
    ):  # fmt: skip
        if not isinstance(gpu[key], kind):
            raise BadTable(f"gpu.{key} is {gpu[key]!r}")
    if not gpu["name"].isprintable():  # it goes to a server's log
        raise BadTable(f"gpu.name is {gpu['name']!r}")
    place = _Place(data["kernels"], gpu, device, None if device is None else limits.versions())
    shapes: dict[tuple[int, int, str], tuple[Row, ...]] = {}
    refused: list[str] = []
    for shape in data["shapes"]:
        n, k, dtype = _shape(shape)
        if (n, k, dtype) in shapes:
            raise BadTable(f"N={n} K={k} {dtype} comes twice")
        rows, before = [], 0
        for row in shape["rows"]:
            m = row["m"]
            if not _positive(m) or m <= before:
                raise BadTable(f"N={n} K={k}: M={m!r} after {before}; Ms must rise")
            before = m
            if m > MAX_M:
                refused.append(f"N={n} K={k} M={m}: {_TOO_LARGE}")
                continue
            try:
                rows.append(_row(row, n, k, place))
            except BadTable as error:
                refused.append(f"N={n} K={k} M={m}: {error}")
                rows.append(Row(m, None, refused=True))
        shapes[n, k, dtype] = tuple(rows)
    method = data.get("method", {})
    return Table(
        gpu, shapes, tuple(refused), bool(method.get("stand_in")), credit(data.get("shared_by", ""))
    )


def credit(text: Any) -> str:
    """Return who shared a table, as logs and `explain` name them; BadTable where it is no name."""
    if not isinstance(text, str) or not text.isprintable() or len(text) > MAX_CREDIT:
        raise BadTable(
            f"shared_by is {text!r:.120}: no name on one line of {MAX_CREDIT} characters"
        )
    return text.strip()


def sound(data: Any) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a table's data with the rows that a server would take, and what the others lack.

    For data that may be broken anywhere, such as a file that was edited by hand. Rows come out by
    rising M; of an M that comes twice the last one is kept. None where there are no rows to find.
    """
    try:
        listed = list(data["shapes"])
        place = _Place(data["kernels"], data["gpu"], None, limits.versions())
        _ = place.limit, place.capability
    except _MALFORMED as error:
        return None, [f"it is no table ({type(error).__name__}: {error})"]
    kept: dict[tuple[int, int, str], dict[int, dict]] = {}
    dropped: list[str] = []
    for shape in listed:
        try:
            name, rows = _shape(shape), list(shape["rows"])
        except _MALFORMED as error:
            dropped.append(_lack(error))
            continue
        n, k, _ = name
        for row in rows:
            try:
                m = row["m"]
                if not _positive(m) or m > MAX_M:
                    raise BadTable(_TOO_LARGE if _positive(m) else "no M")
                _row(row, n, k, place)
                kept.setdefault(name, {})[m] = row
            except _MALFORMED as error:
                m = row.get("m") if isinstance(row, dict) else row
                dropped.append(f"N={n} K={k} M={m!r}: {_lack(error)}")
    shapes = [
        {"n": n, "k": k, "dtype": dtype, "rows": [by_m[m] for m in sorted(by_m)]}
        for (n, k, dtype), by_m in sorted(kept.items())
    ]
    return {**data, "shapes": shapes}, dropped


def _lack(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _shape(shape: dict) -> tuple[int, int, str]:
    """Return (n, k, dtype) of a table's entry."""
    n, k, dtype = shape["n"], shape["k"], shape["dtype"]
    if not (_positive(n) and _positive(k) and k % heuristic.GROUP == 0 and dtype in DTYPES):
        raise BadTable(f"no shape of a block-FP8 layer: n={n!r} k={k!r} dtype={dtype!r}")
    return n, k, dtype


def _positive(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True)
class _Place:
    """What a table's rows are checked against.

    Attributes:
        kernels: As the table records them.
        gpu: As the table has it.
        device: The `select.Device` to serve, or None: the GPU of the table.
        versions: The host's libraries that are here, or None: any version that is recorded.
    """

    kernels: dict[str, str]
    gpu: dict[str, Any]
    device: Any
    versions: dict[str, str] | None

    @property
    def limit(self) -> int:
        return self.gpu["shared_bytes"] if self.device is None else self.device.shared_bytes

    @property
    def capability(self) -> tuple[int, int]:
        if self.device is not None:
            return self.device.capability
        parts = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", self.gpu["capability"], re.ASCII)
        if parts is None:
            raise BadTable(f"gpu.capability is {self.gpu['capability']!r}")
        return int(parts[1]), int(parts[2])

    def changed(self, kernel: str) -> bool:
        """True where a kernel of ours is another than when the table was made."""
        return self.kernels.get(kernel) != revision(kernel)


def _row(row: dict, n: int, k: int, place: _Place) -> Row:
    backend, config, device = row["backend"], row["config"], place.device
    if backend is None:
        if any(map(place.changed, SOURCES)):
            raise BadTable("a kernel has changed since none beat the heuristic; tune again")
        return Row(row["m"], None)
    if backend not in BACKENDS:
        raise BadTable(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    if backend == "cutlass":
        why = limits.unusable(config, n, k, place.capability, place.kernels, place.versions)
        if why:
            raise BadTable(why)
        return Row(row["m"], backend, config)
    made = config_from(config)
    check(made, row["m"], k)
    recorded = row.get("shared_bytes", 0)
    needs = max(shared_bytes(made), recorded if isinstance(recorded, int) else 0)
    if needs > place.limit:
        raise BadTable(
            f"needs {needs} bytes of shared memory, this GPU has {place.limit} per block"
        )
    if device is not None and made.unit_scaled and device.mma != "block_scale":
        raise BadTable("a block-scaled configuration, and this GPU takes plain FP8")
    if made.block_m < getattr(device, "tokens", 0):
        raise BadTable(f"this Triton has no product with {made.block_m} tokens")
    if place.changed(made.kernel):
        raise BadTable(f"the {made.kernel} kernel has changed since it was tuned; tune again")
    return Row(row["m"], backend, made)


def config_from(fields: dict) -> heuristic.Config:
    """Return the `heuristic.Config` that `fields` write out; BadTable where they are not its."""
    known = {field.name: field for field in dataclasses.fields(heuristic.Config)}
    for name, value in fields.items():
        if name not in known:
            raise BadTable(f"unknown key {name!r}")
        if type(value) is not _KINDS[known[name].type]:
            raise BadTable(f"{name}={value!r} is no {known[name].type}")
    missing = {name for name, field in known.items() if field.default is dataclasses.MISSING}
    if missing - fields.keys():
        raise BadTable(f"no {', '.join(sorted(missing - fields.keys()))}")
    return heuristic.Config(**fields)


def check(config: heuristic.Config, m: int, k: int) -> None:
    """Raise BadTable where a launch with this configuration would be wrong or impossible."""
    for name, allowed in _ALLOWED.items():
        if getattr(config, name) not in allowed:
            raise BadTable(f"{name}={getattr(config, name)!r} is out of range")
    steps = -(-k // (heuristic.GROUP * config.unroll))
    if not 1 <= config.splits <= min(steps, heuristic.MAX_SPLITS):
        raise BadTable(f"splits={config.splits} is out of range for K={k}")
    if config.split_order:
        raise BadTable("split_order belongs to deterministic serving, which takes no table")
    if config.kernel == "direct":
        if m > config.block_m or config.block_m > 16:
            raise BadTable(f"the direct kernel serves {config.block_m} rows, not {m}")
        if not config.fused or config.block_n % (16 * config.num_warps):
            raise BadTable("the direct kernel quantises itself, 16 weight rows or more a warp")
    elif config.unroll != 1 or config.registers:
        raise BadTable("unroll and registers belong to the direct kernel")
    if config.kernel == "tiled" and (config.splits > 1 or config.fused):
        raise BadTable("the tiled kernel neither splits K nor quantises")
    if config.kernel != "tiled" and config.unit_scaled:
        raise BadTable("unit_scaled belongs to the tiled kernel")
