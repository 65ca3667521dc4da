"""Asking a real host: `Probe` keeps one process of it and plays each scenario in a fork."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from tests.hosts.lab import Host
from tests.hosts.probe import MARK

PROBE = Path(__file__).with_name("probe.py")
#: Variables of the person who runs the tests must not steer a host.
STEERING = ("SGLANG_", "SGL_", "FLASHINFER_", "USE_TRITON_", "TRITON_INTERPRET", "PYTHONPATH")


class ProbeError(RuntimeError):
    """The host's process died before it answered; the message ends with its stderr."""


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without what steers a host, plus `variables`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(STEERING)}
    ours = {"TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return kept | ours | variables


def once(python: Path, scenario: dict) -> dict:
    """Play one scenario in a fresh interpreter, so that its start-up hook is part of the run."""
    result = subprocess.run(
        [python, PROBE, json.dumps(scenario)],
        env=environment(**scenario.get("env", {})),
        capture_output=True,
        text=True,
    )
    return _answer(result.stdout, result.stderr)


class Probe:
    """A host's process that answers scenarios (see probe.py); a context manager."""

    def __init__(self, host: Host):
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)
        self.process = subprocess.Popen(
            [host.python, PROBE, "--serve"],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
        )

    def ask(self, **scenario) -> dict:
        """Play one scenario and return what was observed."""
        self.process.stdin.write(json.dumps(scenario) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        self.stderr.seek(0)
        return _answer(line, self.stderr.read())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.stderr.close()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _answer(stdout: str, stderr: str) -> dict:
    line = next((line for line in stdout.splitlines() if line.startswith(MARK)), None)
    answer = json.loads(line.removeprefix(MARK)) if line else {"died": "without an answer"}
    if "died" in answer:
        raise ProbeError(f"the host's process died ({answer['died']})\n{stderr[-4000:]}")
    return answer
