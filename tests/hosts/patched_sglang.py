"""A patched sglang's FP8 modules through contract.py: without the plugin, with it, switched off."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sglang_kt_sm120.patches import Patch
from tests.hosts import client, lab, patched, probe, releases

OWN_TEST = lab.HERE / "own_test.py"
CONTRACT = lab.HERE / "contract.py"
CUTLASS = "cutlass_w8a8_block_fp8_linear_with_fallback"
DEEP_GEMM = "deepgemm_w8a8_block_fp8_linear_with_fallback"
FLASHINFER = "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback"
TRITON = "triton_w8a8_block_fp8_linear"
BLACKWELL = ((12, 0), (12, 1))
#: What `auto` answers without the plugin: (capability, DeepGEMM there) -> function, by patch.
AUTO = {
    "local": {
        ((12, 0), False): CUTLASS, ((12, 0), True): CUTLASS,
        ((12, 1), False): TRITON, ((12, 1), True): TRITON,
        ((9, 0), False): CUTLASS, ((9, 0), True): DEEP_GEMM,
        ((10, 0), False): FLASHINFER, ((10, 0), True): DEEP_GEMM,
    },
    "send": {
        ((12, 0), False): CUTLASS, ((12, 0), True): CUTLASS,
        ((12, 1), False): CUTLASS, ((12, 1), True): CUTLASS,
        ((10, 0), False): FLASHINFER, ((10, 0), True): DEEP_GEMM,
    },
}  # fmt: skip
#: e4m3 codes and fp32 sums: what is left is one rounding to bf16.
TOLERANCE = 0.01


Finding = tuple[bool, str]
#: The plugin's files that took part, by patch: what a record of the check depends on.
plugin_files: dict[str, set[str]] = {}


def findings(patch: Patch, tree: Path, plugin: str) -> Iterator[Finding]:
    """Play the contract on `tree`, a host with `patch` applied, and run the patch's own test."""
    release = releases.Release(*patched.release(patch))
    host = releases.build(release, lambda *a: None)
    layers = releases._site(host.root).joinpath("layers.pth").read_text().splitlines()
    python = releases._venv(lab.ROOT / "patched" / f"venv-{tree.name}", [tree, *layers])
    python = python / "bin" / "python"
    kind = patch.path.parents[1].name
    auto = [(*key, answer) for key, answer in AUTO[kind].items()]
    scenarios = [
        {"capability": cap, "deep_gemm": "recipe" if deep else None, "asks": [{"load": False}]}
        for cap, deep, _ in auto
    ]
    with_us = {"plugin": plugin, "asks": [{}]}
    scenarios += [{"capability": cap, **_believing(with_us, cap)} for cap in BLACKWELL]
    off = {"SGLANG_KT_SM120_ENABLE": "0"}
    scenarios += [
        {"capability": (12, 0), **with_us, "env": off, "asks": [{"load": False}]},
        {"capability": (10, 0), **_believing(with_us, (10, 0)), "asks": [{"load": False}]},
    ]
    extra = _special(patch, plugin)
    answers = _play(python, [*scenarios, *(scenario for scenario, _ in extra)])
    plugin_files[patch.name] = {f for answer in answers for f in answer.get("plugin_files", ())}

    for (cap, deep, expected), answer in zip(auto, answers, strict=False):
        got = answer["asks"][0].get("got", answer["asks"][0].get("error"))
        what = f"auto on {_dotted(cap)} {'with' if deep else 'without'} DeepGEMM"
        right = got == expected and Path(answer["file"]).is_relative_to(tree)
        yield right, f"{what}: {got}"
    answers = answers[len(auto) :]
    for cap, answer in zip(BLACKWELL, answers, strict=False):
        ask = answer["asks"][0]
        error = ask.get("output", {}).get("quantised")
        good = ask.get("ours") and error is not None and error < TOLERANCE
        seen = f"ours, off by {error}" if good else f"{ask} {answer['log']}"
        yield bool(good), f"auto on {_dotted(cap)} with the plugin: {seen}"
    yield not answers[2]["wrapped"] and not answers[2]["asks"][0]["ours"], "plugin off: stock"
    yield answers[3]["asks"][0]["same"], "10.0 with the plugin: sglang's own function"
    for (_, judge), answer in zip(extra, answers[4:], strict=True):
        yield judge(answer)
    yield from _own_test(patch, python)


def _own_test(patch: Patch, python: Path) -> Iterator[Finding]:
    """Run the unit test that the patch brings; nothing where it brings none."""
    for name, text in _new_tests(patch).items():
        with tempfile.TemporaryDirectory() as folder:
            test = Path(folder) / Path(name).name
            test.write_text(text)
            command = [python, OWN_TEST, test]
            environment = client.environment()
            result = subprocess.run(command, env=environment, capture_output=True, text=True)
        ran = re.search(r"RAN (\d+) SKIPPED 0", result.stderr)
        good = not result.returncode and ran is not None and int(ran[1]) > 0
        what = f"{ran[1]} passed" if good else result.stderr[-1500:]
        yield good, f"its own {Path(name).name}: {what}"


def _new_tests(patch: Patch) -> dict[str, str]:
    """Return the test files that the patch adds, with their text."""
    found = {}
    for part in re.split(r"^diff --git ", patch.diff, flags=re.MULTILINE)[1:]:
        name = re.search(r"^\+\+\+ b/(test/.*\.py)$", part, re.MULTILINE)
        if name and "\nnew file mode " in part:
            lines = part[name.end() :].splitlines()[2:]
            found[name[1]] = "".join(f"{line[1:]}\n" for line in lines if line.startswith("+"))
    return found


def _believing(scenario: dict, capability: tuple[int, int]) -> dict:
    """Let the plugin believe in the same capability as the host."""
    variables = {"SGLANG_KT_SM120_TEST_CAPABILITY": _dotted(capability)}
    return scenario | {"env": scenario.get("env", {}) | variables}


def _special(patch: Patch, plugin: str) -> list[tuple[dict, object]]:
    """Scenarios that only this patch changes, each with its judge."""
    found: list[tuple[dict, object]] = []
    if patch.path.stem == "0001-trtllm-needs-sm100":
        trtllm = {"backend": "flashinfer_trtllm", "load": False}
        for with_us in ({}, _believing({"plugin": plugin}, (12, 0))):
            who = "with the plugin" if with_us else "without"
            by_flag = {"capability": (12, 0), **with_us, "asks": [trtllm]}
            variable = {"SGLANG_ENABLE_FLASHINFER_FP8_GEMM": "1"} | with_us.get("env", {})
            by_variable = {"capability": (12, 0), **with_us, "env": variable}
            by_variable["asks"] = [{"load": False}]
            found.append((by_flag, _refused(f"trtllm by flag on 12.0 is refused, {who}")))
            found.append((by_variable, _refused(f"trtllm by variable on 12.0 is refused, {who}")))
        found.append(({"capability": (10, 0), "asks": [trtllm]}, _answers(FLASHINFER, "10.0")))
    return found


def _refused(text: str):
    def judge(answer: dict) -> Finding:
        message = answer["asks"][0].get("error", {}).get("message", "")
        return "--fp8-gemm-backend=triton" in message, text

    return judge


def _answers(expected: str, text: str):
    def judge(answer: dict) -> Finding:
        got = answer["asks"][0].get("got", answer["asks"][0].get("error"))
        return got == expected, f"{text}: {got}"

    return judge


#: sglang 0.5.23's LinearBase has an attribute that contract.py's plain layer lacks.
PLAY = """
import runpy, sys, torch
torch.nn.Module.deepgemm_mxfp8_input = False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _play(python: Path, scenarios: list[dict]) -> list[dict]:
    result = subprocess.run(
        [python, "-c", PLAY, CONTRACT, "--serve"],
        input="".join(json.dumps(scenario) + "\n" for scenario in scenarios),
        env=client.environment(),
        capture_output=True,
        text=True,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith(probe.MARK)]
    answers = [json.loads(line.removeprefix(probe.MARK)) for line in lines]
    if len(answers) != len(scenarios) or any("died" in answer for answer in answers):
        raise RuntimeError(f"the patched host died\n{result.stderr[-3000:]}")
    return answers


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
