"""The schedule tables: every SM busy, one wave, equal parts, enough counters."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from sglang_kt_sm120 import devices, env, heuristic, select, shapes, variants

CARDS = {
    "RTX PRO 6000": SimpleNamespace(capability=(12, 0), sm_count=188, shared_bytes=101376),
    "RTX 5090": SimpleNamespace(capability=(12, 0), sm_count=170, shared_bytes=101376),
    "GB10": SimpleNamespace(capability=(12, 1), sm_count=48, shared_bytes=101376),
    "H200": SimpleNamespace(capability=(9, 0), sm_count=132, shared_bytes=232448),
}
SHAPES = sorted(
    {
        (layer.n, layer.k)
        for name in ("deepseek-r1", "qwen3.6-27b")
        for layer in shapes.SHAPE_SETS[name]
    }
)
DECODE = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64)


def choose(m, n, k, card, **flags):
    return heuristic.config_for(heuristic.Case(m, n, k, **flags), CARDS[card])


@pytest.mark.parametrize(
    ("n", "k", "m", "variant", "splits"),
    [
        (7168, 16384, 1, "WIDE8", 9),
        (36864, 7168, 8, "WIDE8", 5),  # one wave of one program a tile would end unevenly
        (34816, 5120, 4, "WIDE8", 7),
        (25600, 5120, 4, "WIDE8", 5),
        (4096, 7168, 4, "WIDE8", 14),
        (7168, 2304, 1, "WIDE8", 9),  # in steps of four K blocks, 18 are 8 + 8 + 2
        (24576, 1536, 8, "NARROW8", 1),
        (2112, 7168, 1, "NARROW8", 14),
        (7168, 2048, 8, "NARROW8", 4),
        (16384, 512, 1, "NARROW8", 1),  # one step is all of K, and half a wave
        (32768, 512, 1, "SHORT8", 1),  # the same in a full one
        (7168, 256, 1, "SHORT8", 1),
        (512, 4096, 8, "SHORT8", 16),
        (7168, 2048, 16, "NARROW16", 4),
        (4096, 7168, 16, "FUSED16", 8),
        (7168, 18432, 16, "ROWS16", 4),
    ],
)
def test_what_was_measured_is_what_is_chosen(n, k, m, variant, splits):
    """On an H200 each of these is the fastest, or within 5 % of it (docs/kernels.md, log 17)."""
    expected = dataclasses.replace(getattr(heuristic, variant), splits=splits)
    assert choose(m, n, k, "H200") == expected


def programs(config, m, n):
    tiles = -(-n // config.block_n) * -(-m // config.block_m)
    return tiles * config.splits


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("m", DECODE)
def test_every_sm_has_work_in_decode(card, m):
    for n, k in SHAPES:
        config = choose(m, n, k, card)
        assert programs(config, m, n) >= CARDS[card].sm_count, (n, k, config)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("prequantised", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_configs_are_possible(card, prequantised, deterministic):
    tails = [(16, 128), (8, 256), (576, 7168), (1, 128), (129280, 7168), (7168, 256)]
    for n, k in [*SHAPES, *tails]:
        counters = heuristic.counters_needed(n, k)
        for m in (*DECODE, 65, 129, 1000, 100_000):
            flags = {"prequantised": prequantised, "deterministic": deterministic}
            config = choose(m, n, k, card, **flags)
            steps = -(-k // (128 * config.unroll))
            assert 1 <= config.splits <= min(steps, heuristic.MAX_SPLITS)
            assert 128 % config.block_n == 0, "a tile has one weight scale row"
            assert not (prequantised and config.fused)
            if config.kernel == "direct":
                assert m <= config.block_m
                assert config.block_n % (16 * config.num_warps) == 0
            if m <= 64:
                assert -(-n // config.block_n) * -(-m // config.block_m) <= counters


@pytest.mark.parametrize(("steps", "at_most"), [(56, 19), (16, 11), (136, 16), (1, 9), (7, 0)])
def test_equal_splits(steps, at_most):
    splits = heuristic.equal_splits(steps, at_most)
    longest = -(-steps // splits)
    allowed = max(1, min(at_most, steps, heuristic.MAX_SPLITS))
    assert splits <= allowed
    assert longest == -(-steps // allowed), "fewer splits must not make the longest part longer"
    assert splits == 1 or -(-steps // (splits - 1)) > longest, "nor may one fewer do as well"


def test_a_wave_counts_registers_by_sub_partition():
    """220 registers are two warps in each quarter of an SM, not nine warps in an SM."""
    need = heuristic.Resources(220, 1024)
    assert heuristic.resident(need, 1, CARDS["H200"]) == 8


def test_a_fixed_order_depends_on_the_weight_alone():
    for n, k in SHAPES:
        splits = {
            max(config.splits, config.split_order)
            for card in CARDS
            for m in (1, 16, 17, 64, 65, 257, 5000)
            for config in [choose(m, n, k, card, deterministic=True)]
        }
        assert splits == {heuristic.fixed_splits(n, k)}


def test_geforce_prefill_can_ask_for_the_block_scaled_instruction():
    card = SimpleNamespace(**vars(CARDS["RTX 5090"]), mma="block_scale")
    assert heuristic.config_for(heuristic.Case(4096, 7168, 2048), card).unit_scaled
    assert not heuristic.config_for(heuristic.Case(4, 7168, 2048), card).unit_scaled
    assert not choose(4096, 7168, 2048, "RTX PRO 6000").unit_scaled


@pytest.mark.parametrize(
    ("asked", "gpu", "unit_scaled"),
    [
        ("auto", "NVIDIA GeForce RTX 5090", True),
        ("plain", "NVIDIA GeForce RTX 5090", False),
        ("auto", "NVIDIA RTX PRO 6000 Blackwell Server Edition", False),
        ("block_scale", "NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("block_scale", "NVIDIA GB10", True),
    ],
)
def test_the_prefill_instruction_can_be_asked_for(asked, gpu, unit_scaled, monkeypatch):
    monkeypatch.setenv(env.MMA.name, asked)
    choice = select.choose(select.Problem(4096, 7168, 2048), devices.describe(gpu))
    assert choice.config.unit_scaled is unit_scaled


@pytest.mark.parametrize("card", CARDS)
def test_large_layers_are_cut_about_as_evenly_as_four_waves_allow(card):
    """Tiles that are more than the device holds at once are no full wave."""
    device = CARDS[card]
    slots = device.sm_count * heuristic.programs_per_sm(heuristic.WIDE8, device)

    def longest(config, n, k):  # K blocks one after another in the busiest place
        waves = -(-programs(config, 1, n) // slots)
        return waves * -(-(k // 128) // config.splits)

    for n in range(3072, 70_000, 448):
        for k in (2048, 5120, 7168, 18432):
            config = choose(1, n, k, card)
            if n * k < 50_000_000 or config.variant() != heuristic.WIDE8:
                continue
            four = [
                heuristic.one_wave(heuristic.WIDE8, n, k, waves * slots)[0]
                for waves in (1, 2, 3, 4)
            ]
            best = min(longest(other, n, k) for other in four)
            assert longest(config, n, k) <= 1.3 * best, (n, k, config.splits)


def test_variants_are_met_once_each():
    card = devices.describe("NVIDIA RTX PRO 6000")
    met = variants.met(SHAPES, card)
    keys = {(item.config.variant(), item.problem.n % 16 == 0) for item in met}
    assert len(keys) == len(met) <= 16
    for item in met:  # each is what its problem gets, but for the split that is passed at run time
        if (item.problem.n, item.problem.k) in SHAPES and item.config.splits > 1:
            assert select.choose(item.problem, card).config == item.config


def test_variants_are_all_that_selection_returns():
    card = devices.describe("NVIDIA GeForce RTX 5090")
    found = {item.config.variant() for item in variants.met(SHAPES, card)}
    for n, k in SHAPES:
        for m in select.buckets(9000):
            for given in (False, True):
                for fixed in (False, True):
                    problem = select.Problem(select.bucket(m), n, k, "bfloat16", given, fixed)
                    assert select.choose(problem, card).config.variant() in found, problem


@pytest.mark.parametrize("card", ["NVIDIA RTX PRO 6000", "NVIDIA GeForce RTX 5090", "NVIDIA GB10"])
def test_a_decision_counts_the_row_tiles_that_are_launched(card):
    """129 rows are two tiles of 128: counted as one, a layer would get too many programs."""
    device = devices.describe(card)
    for n, k in SHAPES:
        for m in (65, 96, 97, 128, 129, 160, 192, 193, 257, 300, 1000):
            asked = select.bucket(m)
            config = select.choose(select.Problem(asked, n, k), device).config
            assert -(-m // config.block_m) == -(-asked // config.block_m), (m, n, k)


def test_rows_33_to_64_keep_two_programs_on_every_sm():
    """Two request 32 KiB; what fewer leave unrequested is what the gate of `aot` is about."""
    for m in (33, 64):
        for n, k in SHAPES:
            config = choose(m, n, k, "RTX PRO 6000")
            assert programs(config, m, n) >= 2 * CARDS["RTX PRO 6000"].sm_count, (n, k)


def test_without_tiles_of_8_tokens_decode_takes_16():
    card = SimpleNamespace(**vars(CARDS["RTX PRO 6000"]), tokens=16)
    for m in range(1, 65):
        for n, k in SHAPES:
            for given in (False, True):
                case = heuristic.Case(m, n, k, prequantised=given)
                assert heuristic.config_for(case, card).block_m >= 16
