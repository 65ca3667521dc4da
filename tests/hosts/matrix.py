"""`make test-hosts`: the contract on every released host; writes docs/compatibility.{md,json}.

    python -m tests.hosts.matrix                    # all of requirements/releases.txt, torch 2.9.1
    python -m tests.hosts.matrix sglang==0.5.17     # one
    python -m tests.hosts.matrix --newest           # the newest of each, by name; writes no docs
    python -m tests.hosts.matrix --torch 2.9.1      # our own tests on that torch and its Triton

Every release is played (play.py) and judged (judge.py). A record per release lies in
`.hosts/records`, and holds for as long as the files that took part in it are the same (records.py),
so that a run can be broken off and taken up again. Two releases are played at a time.

Where every sglang module that took part in a release's play is the same file, byte for byte, in the
next release with the same pins, only the central scenario is played there, and the rest of the
record is the first one's; the notes say so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.hosts import compatibility, judge, lab, other_torch, play, records, releases

CENTRAL = "plugin, 12.0, off"
RECORDS = lab.ROOT / "records"
#: Differ between any two releases, and nothing but a version is in them.
VERSION_FILES = ("sglang/version.py", "sglang/_version.py")
console = Console(stderr=True)


class Matrix:
    """One run: its plugin, its records, and who plays what."""

    def __init__(self, plugin: Path, progress: Progress):
        self.plugin, self.progress = plugin, progress
        self.lock = threading.Lock()
        self.done: list[dict] = []
        self.played = 0

    def record(self, release: releases.Release) -> dict | None:
        """Return the release's record where it still holds."""
        record = records.read(RECORDS / f"{release}.json")
        holds = record is not None and records.holds(record.get("made_from", {}), self.plugin)
        return record if holds else None

    def group(self, group: list[releases.Release], task) -> None:
        """Play releases with the same pins in one process, oldest first."""
        stage = None
        try:
            for release in group:
                record = self.record(release)
                if record is None:
                    host = releases.build(release, lambda *a: None)
                    stage = stage or play.Stage(host, self.plugin)
                    try:
                        record = self.play(release, host, stage)
                    except (lab.LabError, OSError) as error:
                        self.progress.console.print(f"[red]{release}[/]: {escape(str(error))}")
                        self.progress.update(task, advance=1)
                        continue
                    records.write(RECORDS / f"{release}.json", record)
                    self.played += 1
                with self.lock:
                    self.done.append(record)
                    self.progress.update(task, advance=1, description=str(release))
                    if not console.is_terminal:  # a log shows no bar
                        console.print(f"{len(self.done)} done: {release}, {record['seconds']} s")
                    for finding in judge.everything(record):
                        self.progress.console.print(f"[red]{release}[/]: {escape(finding)}")
        finally:
            if stage is not None:
                stage.close()

    def play(self, release: releases.Release, host: releases.Host, stage: play.Stage) -> dict:
        started = time.monotonic()
        scenarios = play.scenarios(release, full=True)
        central = stage.play(host, CENTRAL, scenarios[CENTRAL])
        twin = self.twin(host)
        if twin is not None and _gist(twin["played"][CENTRAL]) == _gist(central):
            played, sources, loader = twin["played"], twin["sources"], twin["loader"]
            ours = {*twin["made_from"]["plugin"], *central.get("plugin_files", ())}
        else:
            twin = None
            played = {
                name: central if name == CENTRAL else stage.play(host, name, scenario)
                for name, scenario in scenarios.items()
            }
            names = {n for result in played.values() for n in result.pop("sources", ())}
            sources = _hashes(host.own, names)
            loader = {}
            if (host.own / "sglang" / "srt" / "plugins" / "__init__.py").is_file():
                loader = play.loader_alone(host, stage)
                if release.era:
                    loader |= play.loader(host, self.plugin)
            results = [*played.values(), *(result for way in loader.values() for result in way)]
            ours = {file for result in results for file in result.pop("plugin_files", ())}
        return {
            "distribution": release.name,
            "version": release.version,
            "pins": host.pins,
            "played": played,
            "loader": loader,
            "sources": sources,
            "twin": twin and twin["version"],
            "made_from": records.made_from(self.plugin, ours),
            "seconds": round(time.monotonic() - started),
        }

    def twin(self, host: releases.Host) -> dict | None:
        with self.lock:
            candidates = [record for record in self.done if record["pins"] == host.pins]
        for record in candidates:
            same = record["distribution"] == host.release.name and not record["twin"]
            same = same and record["sources"]  # else it could not even be imported
            if same and _hashes(host.own, record["sources"]) == record["sources"]:
                return record
        return None


def _gist(result: dict) -> list:
    """What was observed, without what is random (the numbers) or of the moment."""
    left_out = ("output",)
    return [
        result.get("wrapped"),
        result.get("log"),
        [{k: v for k, v in ask.items() if k not in left_out} for ask in result.get("asks", ())],
    ]


def _hashes(folder: Path, names) -> dict[str, str | None]:
    hashes = {}
    for name in sorted(set(names) - set(VERSION_FILES)):
        file = folder / name
        hashes[name] = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
    return hashes


def groups(chosen: list[releases.Release]) -> list[list[releases.Release]]:
    """Return the releases by their pins, the largest groups first."""
    by_pins: dict[str, list[releases.Release]] = {}
    for release in chosen:
        pins = json.dumps([release.name, releases.build(release, lambda *a: None).pins])
        by_pins.setdefault(pins, []).append(release)
    return sorted(by_pins.values(), key=len, reverse=True)


def newest() -> list[releases.Release]:
    """Ask the registry for the newest release of both distributions, by name."""
    found = []
    for name in ("sglang-kt", "sglang"):
        command = [sys.executable, "-m", "pip", "index", "versions", name]
        said = subprocess.run(command, capture_output=True, text=True)
        version = said.stdout.partition("(")[2].partition(")")[0]
        if said.returncode or not version:
            raise lab.LabError(f"the registry does not say which {name} is newest\n{said.stderr}")
        found.append(releases.Release(name, version, era=True))  # played in full
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.matrix", description=__doc__)
    parser.add_argument("release", nargs="*", help="DISTRIBUTION==VERSION; default: all")
    parser.add_argument("--newest", action="store_true", help="the newest of each, by name")
    parser.add_argument(
        "--plugin", type=Path, help="an installed copy of this project to play with"
    )
    parser.add_argument("--jobs", type=int, default=2, help="releases at a time")
    parser.add_argument("--report", action="store_true", help="only write docs from the records")
    parser.add_argument(
        "--torch", metavar="VERSION", help="op, compile and aot tests on this torch"
    )
    parser.add_argument("--no-torch", action="store_true", help="leave the other torch out")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.torch:
            return other_torch.run(chosen.torch)
        return _all(chosen)
    except lab.LabError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1


def _all(chosen: argparse.Namespace) -> int:
    played = releases.released()
    if chosen.newest:
        played = newest()
    elif chosen.release:
        listed = {f"{release.name}=={release.version}": release for release in played}
        asked = [(name, releases.Release(*name.split("=="))) for name in chosen.release]
        played = [listed.get(name, release) for name, release in asked]
    done = _play(played, chosen)
    bad = [record for record in done if judge.everything(record)]
    missing = len(played) - len(done)
    some = f", {missing} not played" if missing else ""
    console.print(f"{len(done)} releases, {len(bad)} with findings{some}")
    code = 1 if bad or missing else 0
    if chosen.report and missing:
        console.print("docs/compatibility.* stay as they are: play what is missing first")
        return code
    if not chosen.release and not chosen.newest:
        if not chosen.no_torch and not chosen.report:
            code |= other_torch.run(other_torch.PINNED, again=False)
        compatibility.write(done)
    return code


def _play(played: list[releases.Release], chosen: argparse.Namespace) -> list[dict]:
    """Play what has no record that holds, and return the records in the order of `played`."""
    text = TextColumn("{task.description:<24}")
    with Progress(
        text, BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        matrix = Matrix(chosen.plugin or lab.plugin(), progress)
        if chosen.report:
            matrix.done = [record for record in map(matrix.record, played) if record]
        else:
            task = progress.add_task("fetching", total=len(played))
            with ThreadPoolExecutor(chosen.jobs) as pool:
                work = [pool.submit(matrix.group, group, task) for group in groups(played)]
            for future in work:
                future.result()
    order = [str(release) for release in played]
    return sorted(matrix.done, key=lambda r: order.index(f"{r['distribution']}-{r['version']}"))


if __name__ == "__main__":
    sys.exit(main())
