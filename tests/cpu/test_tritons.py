"""`aot` with every Triton that a host may bring, each in a process of its own.

The installed one is judged in test_aot.py and test_cli.py, with fp16 too; here each compiles every
variant that selection returns with it, for bf16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="compiles with Triton")

from sglang_kt_sm120 import aot, heuristic
from tests.hosts import tritons

PROJECT = Path(__file__).parents[2]
#: What is known of released versions. Of the newest nothing is expected but to pass.
FACTS = {
    "3.4.0": {"multiplies FP8 as f16", "no block-scaled FP8", "refuses 8-token", "does not know"},
    "3.5.1": {"no block-scaled FP8", "does not know"},
    "3.6.0": set(),
}


@pytest.mark.parametrize("version", [*tritons.RELEASED, "newest"])
def test_every_variant_passes_its_gates(version):
    known = FACTS.get(version)
    version = tritons.newest() if version == "newest" else version
    folder = tritons.install(version)
    paths = {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
    result = subprocess.run(
        [sys.executable, "-m", "sglang_kt_sm120", "aot", "--dtype", "bf16", "--json"],
        cwd=PROJECT,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    answer = json.loads(result.stdout)
    failures = {
        f"{k['arch']} {k['name']}": k["failures"] for k in answer["kernels"] if k["failures"]
    }
    assert failures == {}
    assert [s for s in answer["schedules"] if s["failures"]] == []
    assert (result.returncode, answer["ok"]) == (0, True), result.stderr[-2000:]
    assert {kernel["triton"] for kernel in answer["kernels"]} == {version}
    assert {kernel["config"].get("kernel") for kernel in answer["kernels"]} >= {
        "direct", "pipelined", "tiled",
    }  # fmt: skip
    for kernel in answer["kernels"]:  # the schedules rest on these, whatever the compiler
        config = heuristic.Config(**kernel["config"]) if kernel["config"] else None
        if config in heuristic.RESOURCES:
            expected = heuristic.programs_per_sm(config, aot.SM12X)
            assert kernel["programs_per_sm"] == expected, kernel
    if known is not None:
        assert len(answer["facts"]) == len(known), answer["facts"]
        assert all(any(text in fact for fact in answer["facts"]) for text in known)
    if known == set():  # both architectures, and FP8 instructions on both
        fp8 = {k["arch"] for k in answer["kernels"] if k["mma"].keys() & {"QMMA", "QMMA.SF"}}
        assert fp8 == {"sm_120a", "sm_121a"}


def test_a_triton_without_8_token_tiles_serves_decode_with_16(tmp_path):
    """Compiled by the command that a Docker build runs, the way that serving goes."""
    folder = tritons.install("3.4.0")
    paths = {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "sglang_kt_sm120", "warm", "--gpu", "RTX PRO 6000", "--json"]
    result = subprocess.run(
        [*command, "--shape", "2112,256"],
        cwd=PROJECT,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert min(kernel["config"]["block_m"] for kernel in json.loads(result.stdout)["kernels"]) == 16
    assert "multiplies in f16" in result.stderr
    assert list(tmp_path.rglob("_direct_kernel.cubin"))
