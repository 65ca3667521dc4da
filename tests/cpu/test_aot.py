"""What the compiler makes of the kernels for SM120: gates, recorded resources, direct weights."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="compiles with Triton")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the interpreter shuts the compiler out", allow_module_level=True)

from sglang_kt_sm120 import aot, heuristic

VARIANTS = {
    name: value for name, value in vars(heuristic).items() if isinstance(value, heuristic.Config)
}


@pytest.fixture(scope="module")
def records():
    """Every variant compiled for sm_120a, by name."""
    return {name: aot.measure(variant, "sm_120a") for name, variant in VARIANTS.items()}


def test_every_gate_holds(records):
    assert {name: r["failures"] for name, r in records.items() if r["failures"]} == {}


def test_recorded_resources_are_what_the_compiler_uses(records):
    """The wave formula lives on these numbers; a few registers may move between Triton versions,
    the programs an SM holds may not."""
    for name, variant in VARIANTS.items():
        if variant in heuristic.RESOURCES:
            recorded = heuristic.programs_per_sm(variant, aot.SM12X)
            assert records[name]["programs_per_sm"] == recorded, name


def test_weights_reach_the_mma_without_shuffles_or_shared_memory():
    """Shuffles belong to the quantiser alone: a wider tile must not add any."""
    tile = replace(heuristic.WIDE8, num_warps=4)
    narrow = aot.measure(replace(tile, block_n=64), "sm_120a")
    wide = aot.measure(tile, "sm_120a")
    assert wide["shuffles"] == narrow["shuffles"]
    assert wide["mma"]["QMMA"] == 2 * narrow["mma"]["QMMA"]
    # Shared memory: the activation's exchange and the output's transposition, no weights.
    assert wide["shared_bytes"] == 4 * 8 * 128


def test_weight_loads_come_before_the_dependency_wait():
    """16 bytes a lane, all of the first step requested before the wait."""
    compiled = aot.compile_config(heuristic.NARROW8, "sm_120a")
    text = aot.disassemble(compiled.asm["cubin"])
    if text is None:
        pytest.skip("this Triton's nvdisasm does not read sm_120a")
    before = text.split("ACQBULK")[0]
    loads = before.count("LDG.E.EF.128")
    # [128 rows, 128 bytes] x 4 K blocks over 256 threads, 16 bytes each.
    assert loads == 128 * 128 * 4 // (256 * 16)


@pytest.mark.parametrize("variant", ["LARGE", "MEDIUM"])
def test_unit_scaled_prefill_is_block_scaled_mma_or_a_failed_gate(variant):
    """Triton before 3.6 lowers dot_scaled to f16 without a word."""
    record = aot.measure(replace(VARIANTS[variant], unit_scaled=True), "sm_120a")
    if record["mma"].get("QMMA.SF"):
        assert record["failures"] == []
        assert record["mma"]["QMMA.SF"] == 64
    else:
        assert any("dot_scaled" in failure for failure in record["failures"])


def test_gb10_is_native_under_the_sm120_lowering():
    if not aot.assembler_knows("sm_121a"):
        records = aot.report([heuristic.WIDE8], "sm_121a")
        assert len(records) == 1
        assert "sm_121a" in records[0]["unsupported"]
        return
    record = aot.measure(heuristic.WIDE8, "sm_121a")
    assert record["failures"] == []


def test_a_spilling_variant_is_caught():
    """The gates can fail: 40 registers cannot hold the tile."""
    record = aot.measure(replace(heuristic.WIDE8, registers=40), "sm_120a")
    assert any("spills" in failure for failure in record["failures"])


def test_importing_the_package_does_not_import_triton():
    code = "import sys, sglang_kt_sm120, sglang_kt_sm120.heuristic; print('triton' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "False"
