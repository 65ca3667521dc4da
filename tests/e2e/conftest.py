"""Starts every case that the collected tests name, a few at a time, before the first test asks."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
from pathlib import Path

import pytest

from tests.e2e import hosts


def pytest_configure(config):
    config.addinivalue_line("markers", "cases(*names): the starts that a test looks at")


@pytest.fixture(scope="session")
def record(request):
    """Return a function: case name -> record. Cases run E2E_AT_ONCE (3) at a time."""
    from tests.e2e import report, runs
    from tests.e2e.cases import CASES

    here = hosts.pythons()
    if os.environ.get("E2E_RECORDS"):
        records = report.read(Path(os.environ["E2E_RECORDS"]))

        def kept(name: str) -> dict:
            if CASES[name].host not in here:
                pytest.skip(f"no start of host {CASES[name].host} is on record")
            assert name in records, f"the host is on record, but not its start {name}"
            return records[name]

        yield kept
        return
    wanted = []
    for item in request.session.items:
        for mark in item.iter_markers("cases"):
            wanted += [name for name in mark.args if name not in wanted]
    ports = itertools.count(31000, 20)
    pool = concurrent.futures.ThreadPoolExecutor(int(os.environ.get("E2E_AT_ONCE", "3")))
    futures = {
        name: pool.submit(runs.run, CASES[name], next(ports))
        for name in wanted
        if CASES[name].host in here
    }

    def get(name: str) -> dict:
        if CASES[name].host not in here:
            pytest.skip(f"host {CASES[name].host} is not here")
        if name not in futures:
            futures[name] = pool.submit(runs.run, CASES[name], next(ports))
        return futures[name].result()

    yield get
    pool.shutdown(cancel_futures=True)
