"""`make patches-check`: every patch applied to its release, and the patched trees run.

    python -m tests.hosts.patches_check [WORD ...] [--no-compile]

With words, only patches whose name holds one of them. For each patch of sglang the real FP8 modules
of the patched tree go through contract.py on the CPU, first without the plugin, then with it, and
once with the plugin switched off, and the patch's own unit test runs in it. CUDA sources are
compiled for sm_120a where nvcc is here.
KTransformers' patches run `kt doctor` of the patched CLI against a made-up nvidia-smi, and build
`kt run`'s command line. Large wheels are fetched once, into .hosts/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sglang_kt_sm120.patches import Patch
from tests.hosts import client, lab, patched, probe, releases

CONTRACT = lab.HERE / "contract.py"
OWN_TEST = lab.HERE / "own_test.py"
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.patches_check")
    parser.add_argument("word", nargs="*", help="only patches whose name holds one of these")
    parser.add_argument("--no-compile", action="store_true", help="leave CUDA sources out")
    chosen = parser.parse_args(arguments)
    chosen_patches = [
        patch
        for patch in patched.all_patches()
        if not chosen.word or any(word in patch.name for word in chosen.word)
    ]
    failed = 0
    for number, patch in enumerate(chosen_patches, 1):
        print(f"[{number}/{len(chosen_patches)}] {patch.name}", flush=True)
        try:
            for good, text in check(patch, compile_cuda=not chosen.no_compile):
                word = "FAIL" if not good else "--  " if "not compiled" in text else "ok  "
                print(f"    {word} {text}", flush=True)
                failed += not good
        except (RuntimeError, OSError) as error:
            print(f"    FAIL {error}", flush=True)
            failed += 1
    print(f"{failed} failed" if failed else f"all {len(chosen_patches)} patches are good")
    return 1 if failed else 0


def check(patch: Patch, compile_cuda: bool) -> Iterator[Finding]:
    """Apply one patch to its release, run the result, and yield what was found."""
    name, version = patched.release(patch)
    source = patched.tree(name, version, fetch=True)
    package = {"kt-kernel": "kt_kernel", "flashinfer-python": "flashinfer"}.get(name, "sglang")
    tree = patched.patched(patch, source, package)
    yield True, f"applies to {name} {version}"
    if package == "sglang":
        yield from _contract(patch, releases.Release(name, version), tree)
    elif package == "kt_kernel":
        yield from _kt(patch, tree)
    else:
        yield from _flashinfer(patch, tree)
    cuda = [file for file in patch.files if file.endswith((".cu", ".cuh"))]
    if cuda and compile_cuda:
        yield from _compile(patch, tree, cuda)


# ---------------------------------------------------------------- sglang


def _contract(patch: Patch, release: releases.Release, tree: Path) -> Iterator[Finding]:
    host = releases.build(release, lambda *a: None)
    layers = releases._site(host.root).joinpath("layers.pth").read_text().splitlines()
    python = releases._venv(lab.ROOT / "patched" / f"venv-{tree.name}", [tree, *layers])
    python = python / "bin" / "python"
    plugin = str(lab.plugin(lambda *a: None))

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


# ---------------------------------------------------------------- KTransformers

SMI = """#!/bin/sh
case "$*" in
*compute_cap*) echo 12.0 ;;
*index,name*) echo "0, NVIDIA RTX PRO 6000 Blackwell, 97887" ;;
*) echo "CUDA Version: 13.0" ;;
esac
"""
DOCTOR = """
import kt_kernel.cli.utils.sglang_checker as checker
checker.check_sglang_kt_kernel_support = lambda **options: {"supported": True}
from kt_kernel.cli.commands.doctor import doctor
doctor(verbose=True)
"""
RUN = """
import inspect
from pathlib import Path
from kt_kernel.cli.commands import run
names = inspect.signature(run._build_sglang_command).parameters
arguments = dict.fromkeys(names, 1) | dict(model_path=Path("/model"), weights_path=None, host="h",
    kt_method="FP8", kt_numa_nodes=None, tool_call_parser=None, reasoning_parser=None, settings={},
    attention_backend="triton", extra_model_params=None, extra_cli_args=None,
    served_model_name=None)
print("COMMAND", *run._build_sglang_command(**arguments))
"""


def _kt(patch: Patch, tree: Path) -> Iterator[Finding]:
    """`kt doctor` says what fits in both languages, or `kt run` passes the flag where it must."""
    (tree / "kt_kernel" / "__init__.py").touch()
    old = patched.tree("sglang-kt", "0.5.2.post1", fetch=True)
    new = patched.tree("sglang-kt", "0.7.2", fetch=True)
    for host, is_old in ((old, True), (new, False)):
        which = "sglang-kt 0.5.2.post1" if is_old else "sglang-kt 0.7.2"
        if "doctor" in patch.path.stem:
            for language, row, mark in (("en", "FP8 backend", "Warning"), ("zh", "FP8", "警告")):
                output = _cli(tree, host, DOCTOR, language)
                line = next((line for line in output.splitlines() if row in line), "no FP8 row")
                good = row in line and (mark in line) == is_old
                yield good, f"kt doctor ({language}), {which}: {line.strip()[:90]}"
        else:
            output = _cli(tree, host, RUN, "en")
            passed = "--fp8-gemm-backend triton" in output
            good = "COMMAND" in output and passed == is_old
            yield good, f"kt run, {which}: {'triton' if passed else 'no flag'}"


def _cli(tree: Path, host: Path, code: str, language: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        smi = Path(folder) / "nvidia-smi"
        smi.write_text(SMI)
        smi.chmod(0o755)
        (Path(folder) / "sglang").symlink_to(host / "sglang")
        paths = os.pathsep.join(map(str, (tree, folder, lab.ROOT / "common")))
        variables = {"PYTHONPATH": paths, "HOME": folder, "KT_LANG": language, "COLUMNS": "220"}
        variables |= {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONUTF8": "1"}
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=client.environment(**variables),
            capture_output=True,
            text=True,
        )
    return result.stdout + result.stderr


# ---------------------------------------------------------------- FlashInfer and CUDA


def _flashinfer(patch: Patch, tree: Path) -> Iterator[Finding]:
    if "flashinfer/utils.py" not in patch.files:
        return
    source = (tree / "flashinfer" / "utils.py").read_text()
    compile(source, "utils.py", "exec")
    yield "supported here: " in source, "utils.py compiles (its test ran by hand: see Verified)"


def _compile(patch: Patch, tree: Path, files: list[str]) -> Iterator[Finding]:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        yield True, "not compiled: no nvcc here"
        return
    flashinfer = patched.tree("flashinfer-python", "0.7.2", fetch=True) / "flashinfer" / "data"
    includes = [flashinfer / "cutlass" / "include", flashinfer / "cutlass/tools/util/include",
                lab.ROOT / "common" / "tvm_ffi" / "include"]  # fmt: skip
    defines = ["-DNDEBUG"]
    if (tree / "sglang").is_dir():
        whole = lab.install("sglang-kt-0.7.2", lambda *a: None).site  # its headers too
        includes.insert(0, whole / "sglang" / "jit_kernel" / "include")
        standard = "c++20"
        entry = tree / "sglang/jit_kernel/csrc/gemm/fp8_blockwise/fp8_blockwise_scaled_mm_entry.cuh"
        sources = {"entry": f'#include <sgl_kernel/tensor.h>\n#include "{entry}"\n'
                   "auto* entry = &fp8_blockwise_scaled_mm;\n"}  # fmt: skip
    else:
        data = tree / "flashinfer" / "data"
        includes = [data / "csrc", data / "include", flashinfer / "spdlog" / "include", *includes]
        formats = ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")
        defines += [f"-DFLASHINFER_ENABLE_{name}" for name in formats]
        standard = "c++17"
        sources = {Path(name).stem: (data / name).read_text() for name in files}
    for name, text in sources.items():
        arch = "100a" if name.endswith("sm100") else "120a"
        with tempfile.TemporaryDirectory() as folder:
            unit = Path(folder) / f"{name}.cu"
            unit.write_text(text)
            command = [nvcc, f"-std={standard}", "-O1", "--expt-relaxed-constexpr", "-w", *defines,
                       *(f"-I{path}" for path in includes), "-c", unit, "-o", Path(folder) / "o",
                       f"-gencode=arch=compute_{arch},code=sm_{arch}"]  # fmt: skip
            result = subprocess.run(command, capture_output=True, text=True)
        if "curand_kernel.h: No such file" in result.stderr:
            yield True, f"{name} not compiled: this CUDA toolkit lacks curand_kernel.h"
            continue
        yield not result.returncode, f"{name} for sm_{arch}: {result.stderr[:300] or 'compiles'}"


if __name__ == "__main__":
    os.chdir(lab.PROJECT)
    sys.exit(main())
