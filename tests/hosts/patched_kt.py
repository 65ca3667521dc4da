"""KTransformers' patches: `kt doctor` and `kt run` of the patched CLI, on a machine made up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sglang_kt_sm120.patches import Patch
from tests.hosts import client, lab, patched

Finding = tuple[bool, str]
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


def findings(patch: Patch, tree: Path) -> Iterator[Finding]:
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
