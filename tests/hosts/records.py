"""Records of what was played, and whether they still hold: what each was made from, as hashes.

A play of hours must not be thrown away because a help text changed. So a record keeps the hash of
every file of ours that took part in it: the plugin's modules that the host's processes imported,
what makes the plugin start, and the tests' own files that ran in or around the host. It holds as
long as all of them are the same; nothing else of this project can have had a part in it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.hosts import lab

#: What runs in a host, or says how it is started and what lies around it.
PLAYED_BY = ("client.py", "contract.py", "lab.py", "play.py", "probe.py", "released_stubs.py",
             "releases.py", "stubs.py", "requirements/common.txt",
             "requirements/released-common.txt")  # fmt: skip
#: What makes the plugin start, in its site folder.
STARTS = ("sglang_kt_sm120.pth", "sglang_kt_sm120.start", "*.dist-info/entry_points.txt")


def made_from(plugin: Path, modules: Iterable[str], further: Iterable[Path] = ()) -> dict:
    """Return what a play with the plugin in site folder `plugin` was made from.

    Args:
        plugin: The site folder.
        modules: Files of the plugin that were imported, relative to it.
        further: Files of the tests beside `PLAYED_BY`.
    """
    starts = [file.relative_to(plugin) for name in STARTS for file in sorted(plugin.glob(name))]
    ours = sorted({*map(str, starts), *modules})
    tests = [*(lab.HERE / name for name in PLAYED_BY), *further]
    return {
        "python": sys.version,
        "torch": importlib.metadata.version("torch"),
        "plugin": {name: digest(plugin / name) for name in ours},
        "tests": {str(file.relative_to(lab.PROJECT)): digest(file) for file in sorted(tests)},
    }


def holds(kept: dict, plugin: Path, further: Iterable[Path] = ()) -> bool:
    """True where a play made now would be made from the very same files."""
    return kept == made_from(plugin, kept.get("plugin", ()), further)


def digest(file: Path) -> str | None:
    """Return the file's SHA-256, or None where it is missing."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def read(path: Path) -> dict | None:
    """Return the JSON object in `path`; None where there is none, or half of one."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write(path: Path, record: dict) -> None:
    """Write a JSON object whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(record))
    part.replace(path)
