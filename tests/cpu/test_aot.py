"""What the compiler makes of the kernels for SM120: gates, recorded resources, direct weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="compiles with Triton")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the interpreter shuts the compiler out", allow_module_level=True)

from sglang_kt_sm120 import aot, heuristic, shapes
from sglang_kt_sm120.aot import gates

VARIANTS = {
    name: value for name, value in vars(heuristic).items() if isinstance(value, heuristic.Config)
}


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def records(request):
    """Every variant compiled for sm_120a, by name, for both dtypes of the activation."""
    return {
        name: aot.measure(variant, "sm_120a", dtype=request.param)
        for name, variant in VARIANTS.items()
    }


def test_every_gate_holds(records):
    assert {name: r["failures"] for name, r in records.items() if r["failures"]} == {}


def test_a_record_says_what_limits_a_variant(records):
    for name, variant in VARIANTS.items():
        record = records[name]
        assert record["spills"] == 0
        assert record["programs_per_sm"] >= 1
        if record["source"] == "sass":
            cycles = {
                key: n for key, n in record["model"]["cycles"].items() if "geforce" not in key
            }
            assert record["model"]["limit"] == max(cycles, key=cycles.get)
            tiles = variant.block_m // 8 * variant.block_n // 16  # of m16n8, in 4 steps of k32
            assert record["mma_per_k_block"] == 4 * tiles / variant.num_warps, name
        if variant.kernel != "tiled":
            assert record["bytes_in_flight"] >= 32 * 1024


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
        assert list(aot.report([heuristic.WIDE8], "sm_121a")) == []
        assert any("does not know" in fact for fact in aot.facts("sm_121a"))
        return
    record = aot.measure(heuristic.WIDE8, "sm_121a")
    assert record["failures"] == []


def test_a_spilling_variant_is_caught():
    """The gates can fail: 40 registers cannot hold the tile."""
    record = aot.measure(replace(heuristic.WIDE8, registers=40), "sm_120a")
    assert any("spills" in failure for failure in record["failures"])


def failures(config=heuristic.ROWS16, counts=(), loop=(), fp8=True, **record):
    """What the gates say of a good kernel in which this much is bad."""
    good = {
        "spills": 0, "local": 0, "shared_bytes": 4096, "mma": {"QMMA": 16},
        "model": {"non_tensor_share": 0.2}, "source": "sass",
    }  # fmt: skip
    counts, loop = Counter(dict(counts)), Counter(dict(loop))
    return gates.failures(config, good | record, counts, loop, fp8)


def test_each_gate_fails_on_a_bad_kernel():
    assert failures() == []
    bad = {
        "spills": {"spills": 8},
        "LDL": {"local": 2},
        "shared memory": {"shared_bytes": 101377},
        "no native FP8": {"mma": {}},
        "HMMA": {"mma": {"QMMA": 16, "HMMA": 1}},
        "dot_scaled": {"config": replace(heuristic.LARGE, unit_scaled=True)},
        "issue slots": {"config": heuristic.LARGE, "model": {"non_tensor_share": 0.51}},
        "no loop": {"model": {}},
        "'other'": {"counts": {"F2FP.F16.E4M3.UNPACK_B": 1}},
        "'E4M3 pack'": {"counts": {"F2FP.SATFINITE.E4M3.F32.PACK_AB": 1}},  # ROWS16 quantises not
        "'output pack'": {"counts": {"F2FP.BF16.F32.PACK_AB": 17}},  # two branches of 8
        "in the main loop": {"loop": {"F2FP.BF16.F32.PACK_AB": 1}},
    }
    for text, change in bad.items():
        found = failures(**change)
        assert any(text in failure for failure in found), (text, found)
    # Where this Triton has no FP8 instructions, f16 ones are no fault of the kernel.
    assert failures(mma={"HMMA": 32}, fp8=False) == []


def test_the_quantiser_may_convert_exactly_what_it_quantises():
    """16 tokens of 128 numbers by 4 warps are 8 conversions a K block and warp."""
    pack = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"
    assert failures(heuristic.FUSED16, {pack: 8}, {pack: 8}) == []
    assert failures(heuristic.FUSED16, {pack: 9}, {pack: 9})
    assert failures(heuristic.FUSED16, {pack: 17})


@pytest.fixture(scope="module")
def layers():
    sets = ("deepseek-r1", "qwen3.6-27b")
    return sorted({(layer.n, layer.k) for name in sets for layer in shapes.SHAPE_SETS[name]})


@pytest.mark.parametrize("flags", [{}, {"prequantised": True}, {"deterministic": True}], ids=str)
def test_every_sm_of_the_largest_card_is_busy_with_enough_in_flight(records, layers, flags):
    judged = aot.judge_schedules(layers, aot.SM12X, records.values(), **flags)
    assert {(s.n, s.k) for s in judged} == set(layers)
    assert [s for s in judged if s.failures] == []


def test_a_bad_schedule_is_caught(layers):
    """One program a tile leaves SMs idle; one shallow program an SM requests too little."""

    def judge(config, n, k, resident=4):
        (schedule,) = gates.schedules([(n, k)], lambda m, n, k: config, lambda config: resident)
        return schedule.failures

    alone = replace(heuristic.ROWS16, splits=1)
    assert "155 SMs idle" in judge(alone, 2112, 7168)[0]
    shallow = replace(heuristic.ROWS64, splits=10)
    assert "16384 bytes in flight" in judge(shallow, 2112, 7168)[0]
    deep = replace(heuristic.ROWS16, splits=12)
    assert judge(deep, 2112, 7168) == []
    # All of a small layer's share is enough: 36 programs of one K block each are all there is.
    assert judge(replace(heuristic.WIDE8, splits=1), 188 * 128, 128) == []


def test_a_conversion_of_operands_is_seen_in_a_real_kernel():
    """Lowered for sm_90a as 120 is, FP8 is emulated in f16: the gates must say so."""
    if not aot.features("sm_120a").fp8:
        pytest.skip("this Triton has no FP8 for sm_120a either")
    record = aot.measure(heuristic.ROWS16, "sm_90a")
    if record["source"] != "sass":
        pytest.skip("this Triton's nvdisasm does not read sm_90a")
    assert any("HMMA" in failure for failure in record["failures"])


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
