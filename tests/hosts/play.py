"""Playing the contract (contract.py) on released hosts: which scenarios, in which processes.

One process per set of pinned packages stays up and forks a child for every scenario; the release
under test is put first on the child's path. So releases with the same pins share the seconds that
torch, FlashInfer and transformers take to import, and nothing of sglang is ever shared.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from tests.hosts import client, lab, releases
from tests.hosts.probe import MARK

CONTRACT = Path(__file__).with_name("contract.py")
OFF = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
VARIABLES = ("SGLANG_ENABLE_FLASHINFER_FP8_GEMM", "SGLANG_SUPPORT_CUTLASS_BLOCK_FP8")
#: sglang 0.5.5's name of the first one; its successors accept both.
OLD_VARIABLE = "SGLANG_ENABLE_FLASHINFER_GEMM"
ON = {"deep_gemm": "recipe"}
DEEP_GEMM = {"on": ON, "off": {"env": OFF}, "absent": {}}
COMPRESSED = {"method": "compressed-tensors"}


def scenarios(release: releases.Release, full: bool) -> dict[str, dict]:
    """Return what is played on `release`, by name; those with "plugin" have it installed."""
    crash = {"load": "crash"}
    not_ours = [{"block": None}, {"block": [64, 128]}, {"block": [128, 64]}]
    played = {"stock, 12.0, on": {**ON, "asks": [crash]}}
    for capability in ("12.0", "12.1"):
        for state, how in DEEP_GEMM.items():
            if full or (capability, state) in (("12.0", "off"), ("12.0", "on"), ("12.1", "absent")):
                requant = state == "on" and release.version.startswith("0.5.5")
                asks = [{"requant": requant}, COMPRESSED]
                if (capability, state) == ("12.1", "on"):
                    how = how | {"deep_gemm": "architecture"}  # its other way to refuse
                if (capability, state) == ("12.0", "off"):
                    asks += not_ours
                if full or (capability, state) == ("12.0", "off"):
                    asks.append("every backend")
                played[f"plugin, {capability}, {state}"] = {**how, "asks": asks}
    deterministic = {"enable_deterministic_inference": True}
    played["plugin, 12.1, absent"]["arguments"] = deterministic
    for variable in _variables(release)[: None if full else 1]:
        played[f"plugin, 12.0, {variable}"] = {"env": OFF | {variable: "1"}}
    off = OFF | {"SGLANG_KT_SM120_ENABLE": "0"}
    played["plugin, 12.0, switched off"] = {"env": off, "asks": [crash, *not_ours, "every backend"]}
    elsewhere = [{"load": False}, {"backend": "triton", "load": False}]
    played["plugin, 9.0, on"] = {**ON, "asks": elsewhere}
    if full:
        for capability in ("8.9", "10.0"):
            played[f"plugin, {capability}, on"] = played["plugin, 9.0, on"]
        played["plugin, 12.0, not initialised"] = {**ON, "initialise": False}
        triton = {"env": OFF | {"USE_TRITON_W8A8_FP8_KERNEL": "1"}}
        played["plugin, 12.0, USE_TRITON_W8A8_FP8_KERNEL"] = triton
    return played


def _variables(release: releases.Release) -> tuple[str, ...]:
    if release.name == "sglang" and release.version.startswith("0.5.5"):
        return OLD_VARIABLE, VARIABLES[1]
    return VARIABLES


class Stage(client.Probe):
    """The process of one set of pins."""

    def __init__(self, host: releases.Host, plugin: Path):
        self.pins, self.plugin = host.pins, plugin
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)
        self.process = subprocess.Popen(
            [host.python, CONTRACT, "--serve"],
            env=client.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
        )

    def play(self, host: releases.Host, name: str, scenario: dict) -> dict:
        """Play one scenario on `host`; {"died": the end of its stderr} where it did not answer."""
        kind, capability, _ = name.split(", ")
        scenario = {"path": [str(host.own)], "capability": _pair(capability)} | scenario
        if kind == "plugin":
            env = {"SGLANG_KT_SM120_TEST_CAPABILITY": capability} | scenario.get("env", {})
            scenario |= {"plugin": str(self.plugin), "env": env}
        return self.try_asking(**scenario)

    def try_asking(self, **scenario) -> dict:
        try:
            return self.ask(**scenario)
        except client.ProbeError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            return {"died": "\n".join(lines[-6:])}


def _pair(capability: str) -> list[int]:
    return [int(part) for part in capability.split(".")]


def loader(host: releases.Host, plugin: Path) -> dict[str, list[dict]]:
    """Play sglang's own plugin loader in processes that Python's "spawn" started.

    Under "hook" the plugin is installed, start-up hook and all; under "loader" only its package and
    metadata are there, so that nothing but sglang's loader can bring it in.
    """
    return {
        way: _spawned(releases.with_plugin(host, plugin, hook=way == "hook"), _loading())
        for way in ("hook", "loader")
    }


def loader_alone(host: releases.Host, stage: Stage) -> dict[str, list[dict]]:
    """As `loader`, the second half, in forks of a process that is up already."""
    ask = {"path": [str(host.own), str(stage.plugin)], "capability": [12, 0]}
    return {"loader": [stage.try_asking(**ask, **scenario) for scenario in _loading()]}


def _loading() -> list[dict]:
    """Scenarios without an allow-list, with one that names us, one that does not; no loader."""
    allowed = ({}, {"SGLANG_PLUGINS": "other,kt_sm120"}, {"SGLANG_PLUGINS": "other"})
    env = OFF | {"SGLANG_KT_SM120_TEST_CAPABILITY": "12.0"}
    asks = [{"load": False}]
    played = [{"loader": True, "env": env | names, "asks": asks} for names in allowed]
    return [*played, {"env": env, "asks": asks}]  # sglang.bench_one_batch never calls the loader


def _spawned(host: releases.Host, scenarios: list[dict]) -> list[dict]:
    command = [host.python, CONTRACT, "--spawn", json.dumps(scenarios)]
    result = subprocess.run(command, env=client.environment(), capture_output=True, text=True)
    answers = [line for line in result.stdout.splitlines() if line.startswith(MARK)]
    if len(answers) != len(scenarios):
        raise lab.LabError(f"{host.release}: the spawned process died\n{result.stderr[-3000:]}")
    return [json.loads(answer.removeprefix(MARK)) for answer in answers]
