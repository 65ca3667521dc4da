"""One released host per era, played once per run: see tests/hosts/play.py.

Everything about one release runs in one xdist worker, which keeps one process per set of pinned
packages. Wheels are fetched once into `.hosts`; without a network the tests skip.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import lab, play, releases

ERAS = {str(release): release for release in releases.released(era=True)}
#: Releases with the same pins share a process, if they are in the same worker.
SAME_PINS = {
    "sglang-0.5.9": "sglang-kt-0.5.2.post1",
    "sglang-kt-0.6.4": "sglang-kt-0.6.1.post2",
}


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents and hasattr(item, "callspec"):
            era = item.callspec.params.get("era")
            if era:
                item.add_marker(pytest.mark.xdist_group(SAME_PINS.get(era, era)))
                item.add_marker(pytest.mark.hosts)


@pytest.fixture(scope="session")
def plugin():
    """A site folder with this project's wheel installed."""
    return lab.plugin()


@pytest.fixture(scope="session")
def build() -> Callable[[str], releases.Host]:
    def of(name: str) -> releases.Host:
        try:
            return releases.build(ERAS[name])
        except lab.LabError as error:
            pytest.skip(f"cannot fetch {name}: {error}")

    return of


@pytest.fixture(scope="session")
def stage(build, plugin):
    """`stage(name)(scenario's name, scenario)` plays one scenario on a release."""
    stages: dict[str, play.Stage] = {}

    def of(name: str):
        host = build(name)
        pins = str(host.pins)
        if pins not in stages:
            stages[pins] = play.Stage(host, plugin)
        return lambda title, scenario: stages[pins].play(host, title, scenario)

    yield of
    for process in stages.values():
        process.close()


@pytest.fixture(scope="session")
def played(stage):
    """`played(name)` plays a release's whole contract, once."""
    records: dict[str, dict] = {}

    def of(name: str) -> dict[str, dict]:
        if name not in records:
            ask = stage(name)
            scenarios = play.scenarios(ERAS[name], full=False)
            records[name] = {title: ask(title, how) for title, how in scenarios.items()}
        return records[name]

    return of
