"""`make patches-check`: every patch applied to its release, and the patched trees run.

    python -m tests.hosts.patches_check [WORD ...] [--no-compile] [--again]

With words, only patches whose name holds one of them. For each patch of sglang the real FP8 modules
of the patched tree go through contract.py on the CPU, first without the plugin, then with it, and
once with the plugin switched off, and the patch's own unit test runs in it. FlashInfer's Python is
imported and asked. KTransformers' patches run `kt doctor` of the patched CLI against a made-up
nvidia-smi, and build `kt run`'s command line. CUDA sources are compiled for sm_120a (and sm_100a
where they are for that) if nvcc is here.

What was good is kept in `.hosts/patches-checked` and shown again as long as the patch, the tests
and those files of the plugin that took part are the same. Large wheels are fetched once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_kt_sm120.patches import Patch
from tests.hosts import (
    cuda_units,
    lab,
    patched,
    patched_flashinfer,
    patched_kt,
    patched_sglang,
    records,
)

CHECKED = lab.ROOT / "patches-checked"
TESTS = ("cuda_units.py", "own_test.py", "patched.py", "patched_flashinfer.py", "patched_kt.py",
         "patched_sglang.py")  # fmt: skip
NOT_COMPILED = "not compiled"
console = Console(stderr=True)

Finding = tuple[bool, str]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.patches_check")
    parser.add_argument("word", nargs="*", help="only patches whose name holds one of these")
    parser.add_argument("--no-compile", action="store_true", help="leave CUDA sources out")
    parser.add_argument("--again", action="store_true", help="check what was good before, too")
    chosen = parser.parse_args(arguments)
    patches = [
        patch
        for patch in patched.all_patches()
        if not chosen.word or any(word in patch.name for word in chosen.word)
    ]
    if not patches:
        console.print(f"no patch's name holds {' or '.join(chosen.word)}")
        return 2
    plugin = lab.plugin()
    failed, not_compiled = 0, 0
    text = TextColumn("{task.description:<60}")
    bar = Progress(text, BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
    with bar:
        task = bar.add_task("", total=len(patches))
        for patch in patches:
            bar.update(task, description=patch.name)
            bar.console.print(f"[bold]{escape(patch.name)}[/]")
            for good, text in _checked(patch, plugin, chosen.no_compile, chosen.again):
                compiled = NOT_COMPILED not in text
                word = "[red]FAIL[/]" if not good else "ok  " if compiled else "[yellow]--  [/]"
                bar.console.print(f"  {word} {escape(text)}", soft_wrap=True)
                failed += not good
                not_compiled += not compiled
            bar.advance(task)
    good = f"all {len(patches)} patches are good"
    left = f", {not_compiled} CUDA sources {NOT_COMPILED}" if not_compiled else ""
    console.print(f"[red]{failed} failed[/]{left}" if failed else f"{good}{left}")
    return 1 if failed else 0


def _checked(patch: Patch, plugin: Path, no_compile: bool, again: bool) -> Iterator[Finding]:
    """Check one patch, or say what an earlier check found; keep what is good and complete."""
    path = CHECKED / f"{patch.name.removesuffix('.patch').replace('/', '-')}.json"
    further = [*(lab.HERE / name for name in TESTS), *(p.path for p in patched.series(patch))]
    kept = records.read(path)
    if kept and not again and records.holds(kept["made_from"], plugin, further):
        for text in kept["found"]:
            yield True, text
        yield True, f"(found {kept['when']}; --again checks anew)"
        return
    found: list[Finding] = []
    try:
        for finding in check(patch, plugin, compile_cuda=not no_compile):
            found.append(finding)
            yield finding
    except (RuntimeError, OSError) as error:
        yield False, str(error)
        return
    if all(good and NOT_COMPILED not in text for good, text in found):
        files = patched_sglang.plugin_files.get(patch.name, ())
        record = {
            "found": [text for _, text in found],
            "when": time.strftime("%Y-%m-%d %H:%M"),
            "made_from": records.made_from(plugin, files, further),
        }
        records.write(path, record)


def check(patch: Patch, plugin: Path, compile_cuda: bool) -> Iterator[Finding]:
    """Apply one patch to its release, run the result, and yield what was found."""
    name, version = patched.release(patch)
    source = patched.tree(name, version, fetch=True)
    package = {"kt-kernel": "kt_kernel", "flashinfer-python": "flashinfer"}.get(name, "sglang")
    tree = patched.patched(patch, source, package)
    yield True, f"applies to {name} {version}"
    if package == "sglang":
        yield from patched_sglang.findings(patch, tree, str(plugin))
    elif package == "kt_kernel":
        yield from patched_kt.findings(patch, tree)
    else:
        yield from patched_flashinfer.findings(patch, tree)
    if compile_cuda:
        yield from cuda_units.findings(patch, tree)
    elif any(file.endswith((".cu", ".cuh")) for file in patch.files):
        yield True, f"its CUDA sources are {NOT_COMPILED}: --no-compile"


if __name__ == "__main__":
    os.chdir(lab.PROJECT)
    sys.exit(main())
