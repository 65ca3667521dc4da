"""Real sglang-kt hosts for the tests beside this file: what they do with and without the plugin."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.hosts import client, lab

#: One xdist worker per host: its process is started once.
HOSTS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in lab.HOSTS]
OLD, NEW = lab.HOSTS

#: A layer for tests whose point is not the shape; FlashInfer's trtllm wants K of 256 or more.
SMALL = {"shape": [256, 512]}

Ask = Callable[..., dict]


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if "routing" in item.path.parts:
            item.add_marker(pytest.mark.hosts)


@pytest.fixture(scope="session")
def plugin() -> str:
    """A site folder with this project's wheel installed."""
    return str(lab.plugin())


@pytest.fixture(scope="session")
def _probes():
    probes: dict[str, client.Probe] = {}
    answers: dict[str, dict] = {}
    yield probes, answers
    for probe in probes.values():
        probe.close()


@pytest.fixture
def ask(_probes, plugin) -> Callable[[str], Ask]:
    """`ask(host)(...)` plays a scenario (probe.py) in the real host; the same one only once.

    DeepGEMM is off unless a scenario brings one. With `plugin=True` the plugin comes in by its
    start-up hook and believes in the same capability as the host.
    """
    probes, answers = _probes

    def of_host(name: str) -> Ask:
        def play(capability=(12, 0), plugin_on=False, env=None, **scenario) -> dict:
            variables = {} if "deep_gemm" in scenario else {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
            if plugin_on:
                scenario["plugin"] = plugin
                variables["SGLANG_KT_SM120_TEST_CAPABILITY"] = ".".join(map(str, capability))
            scenario |= {"capability": capability, "env": variables | (env or {})}
            key = json.dumps([name, scenario], sort_keys=True)
            if key not in answers:
                if name not in probes:
                    probes[name] = client.Probe(lab.install(name))
                answers[key] = probes[name].ask(**scenario)
            return answers[key]

        return play

    return of_host
