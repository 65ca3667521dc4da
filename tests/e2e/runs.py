"""Start one real engine or server, and record what happened as JSON.

A `Case` is one start: which host, checkpoint, flags and environment. `run` gives the record:
flags, versions, tokens with log-probabilities, what multiplied the FP8 weights in the scheduler
process, telling log lines, seconds, the exception. Records and logs are kept in the folder E2E_OUT
(default: a temporary one).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from tests.e2e import hosts, tiny_checkpoint

INSIDE = Path(__file__).resolve().parent / "inside"
sys.path.insert(0, str(INSIDE))
import questions  # noqa: E402

GRAPH_BATCH_SIZES = [1, 2, 4, 8, 12, 16, 24, 32]
#: The flags of the report that the tiny checkpoints can have, less memory for two or three at once.
REPORT_FLAGS = {
    "trust_remote_code": True,
    "attention_backend": "triton",
    "chunked_prefill_size": 32768,
    "max_running_requests": 32,
    "max_total_tokens": 32768,
    "enable_mixed_chunk": True,
    "tp_size": 1,
    "enable_p2p_check": True,
    "disable_shared_experts_fusion": True,
    "watchdog_timeout": 3000,
    "mem_fraction_static": 0.2,
}
#: No tokenizer in the checkpoints; no build of sampling kernels.
TEST_FLAGS = {
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_radix_cache": True,
    "log_level": "info",
}
TELLING = re.compile(
    r"sglang-kt-sm120|[Cc]apture .*[Gg]raph|[Pp]iecewise|prefill CUDA graph|DeepGEMM JIT"
    r"|BackendSupportedError|[Dd]eterministic|ENGINE |fired up|hit an exception"
    r"|KV Cache is allocated|Load weight end|Traceback|Error:"
)
DIED = re.compile(r"Scheduler hit an exception|Received sigquit from a child process")
SECONDS = float(os.environ.get("E2E_SECONDS", "300"))
VERSIONS = """
import json
from importlib import metadata
names = ("sglang-kt", "sglang", "sglang-kt-sm120", "sglang-kernel", "kt-kernel", "transformers",
         "transformers-kt", "flashinfer-python", "torch", "triton")
found = {}
for name in names:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
import torch
found["python"] = __import__("platform").python_version()
found["gpu"] = torch.cuda.get_device_name(0)
found["capability"] = "%d.%d" % torch.cuda.get_device_capability(0)
print(json.dumps(found))
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """One start of a host."""

    name: str
    host: str
    checkpoint: str
    backend: str = "auto"
    deep_gemm: bool = False
    plugin: bool = True
    server: bool = False  # `python -m sglang.launch_server` and HTTP, else sglang.Engine
    environment: tuple[tuple[str, str], ...] = ()
    flags: tuple[tuple[str, object], ...] = ()


def output() -> Path:
    """Return the folder of records and logs."""
    folder = Path(os.environ.get("E2E_OUT") or Path(tempfile.gettempdir(), "sm120-e2e"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def facts(python: str) -> dict:
    """Return versions and the GPU as the host's own interpreter sees them."""
    done = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, cwd=output())
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-2000:]}


@functools.cache
def checkpoint(kind: str) -> str:
    return str(tiny_checkpoint.write(kind, output() / f"tiny-{kind}"))


def arguments(case: Case, port: int) -> dict:
    """Return the ServerArgs fields of a case."""
    return {
        **REPORT_FLAGS,
        **TEST_FLAGS,
        "model_path": checkpoint(case.checkpoint),
        "served_model_name": "tiny",
        "fp8_gemm_runner_backend": case.backend,
        "port": port,
        "nccl_port": port + 1,
        **dict(case.flags),
    }


def command_line(fields: dict) -> list[str]:
    """Return the same fields as options of `sglang.launch_server`."""
    words = []
    for name, value in fields.items():
        name = {"fp8_gemm_runner_backend": "fp8_gemm_backend"}.get(name, name)
        option = "--" + name.replace("_", "-")
        words += [option] if value is True else [option, str(value)]
    return words


def environment(case: Case, folder: Path, capability: str) -> dict[str, str]:
    """Return the variables that a case sets; a real SM12x card needs no personality."""
    own = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_APPLY_CONFIG_BACKUP": "none",  # 0.7.2 replaces a DeepSeek config.json by V4's
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(INSIDE),
        "E2E_LAUNCH_LOG": str(folder),
        "SGLANG_ENABLE_JIT_DEEPGEMM": "1" if case.deep_gemm else "0",
        "SGLANG_KT_SM120_ENABLE": "1" if case.plugin else "0",
    }
    if capability not in ("12.0", "12.1"):
        own |= {"E2E_PERSONALITY": "sm120", "SGLANG_KT_SM120_TEST_CAPABILITY": "12.0"}
    return own | dict(case.environment)


def run(case: Case, port: int) -> dict:
    """Start, ask, stop; return the record and keep it beside its log."""
    python = hosts.pythons()[case.host]
    folder = output() / case.name
    folder.mkdir(exist_ok=True)
    fields = arguments(case, port)
    variables = environment(case, folder, facts(python).get("capability", ""))
    answers = folder / "answers"
    if case.server:
        command = [python, "-m", "sglang.launch_server", *command_line(fields)]
    else:
        (folder / "arguments").write_text(json.dumps(fields))
        command = [python, str(INSIDE / "run_engine.py"), str(folder / "arguments"), str(answers)]
    log = output() / f"{case.name}.log"
    start = time.time()
    with open(log, "w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,  # never the checkout: the installed wheel is what is tested
            env=os.environ | variables,
            start_new_session=True,
        )
    try:
        ended = _ask(port, process, log, answers, start) if case.server else None
        ended = ended or _wait(process, log, start)
    finally:
        _stop(process)
    text = log_text(log)
    record = {
        "case": dataclasses.asdict(case),
        "facts": facts(python),
        "environment": {k: v for k, v in variables.items() if k not in ("PYTHONPATH",)},
        "command": [word.replace(str(output()), "OUT") for word in command_line(fields)],
        "ended": ended,
        "seconds": round(time.time() - start, 1),
        **(json.loads(answers.read_text()) if answers.exists() else {"answers": []}),
        "processes": [json.loads(file.read_text()) for file in folder.glob("*.json")],
        "lines": telling(text),
        "traceback": traceback(text),
    }
    (output() / f"{case.name}.record").write_text(json.dumps(record))
    return record


def log_text(log: Path) -> str:
    """Return a log; progress bars end their lines with a carriage return."""
    return log.read_text(errors="replace").replace("\r", "\n")


def telling(text: str) -> list[str]:
    """Return the lines of a log that tests and tables look at."""
    lines = (line for line in text.splitlines() if "server_args=" not in line)
    return [line[:400] for line in lines if TELLING.search(line)][:60]


def _wait(process: subprocess.Popen, log: Path, start: float) -> str:
    """Wait for an engine: it ends by itself, or its scheduler dies and the parent lingers."""
    while process.poll() is None:
        if DIED.search(log.read_text(errors="replace")):
            time.sleep(3)  # the traceback is still being written
            return "died"
        if time.time() - start > SECONDS:
            return "timeout"
        time.sleep(1)
    return f"exit {process.returncode}"


def _ask(port: int, process, log: Path, answers: Path, start: float) -> str | None:
    """Wait until the server is ready, then POST to /generate; None where it did not get there."""
    while "fired up and ready" not in log.read_text(errors="replace"):
        if process.poll() is not None or DIED.search(log.read_text(errors="replace")):
            return None
        if time.time() - start > SECONDS:
            return "timeout"
        time.sleep(1)
    up, got = time.time() - start, []
    for batch in questions.BATCHES:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/generate",
            json.dumps(questions.http_body(batch)).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            got += json.load(reply)
    kept = [questions.tidy(answer) for answer in got]
    answers.write_text(json.dumps({"seconds_up": up, "answers": kept}))
    time.sleep(1)  # the launch log is written three times a second
    return "answered"


def _stop(process: subprocess.Popen) -> None:
    """End the whole session that was started for this case."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def traceback(text: str) -> list[str]:
    """Return the scheduler's last traceback, one line each, without the log prefix."""
    at = text.rfind("Scheduler hit an exception")
    at = text.find("Traceback", at) if at >= 0 else text.rfind("Traceback (most recent call last)")
    if at < 0:
        return []
    lines = text[at:].splitlines()
    for index, line in enumerate(lines[1:], 1):
        if line and not line.startswith(" ") and re.match(r"[\w.]+(Error|Exception|Exit)\b", line):
            return lines[: index + 2]
    return lines[:160]  # torch.compile's errors are named otherwise, and tell more below
