"""The tuner without a GPU: a clock, a stopwatch and a compiler that are made up."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import time
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from sglang_kt_sm120 import cli, devices, env, heuristic, limits, select, shapes, system, tune
from sglang_kt_sm120.configs import store, table
from sglang_kt_sm120.tune import engine, results, sglang_files, space
from sglang_kt_sm120.tune.engine import Contender, Timing

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
DEVICE = devices.describe(RTX)
SHAPES = [shapes.Linear("narrow", 2112, 7168), shapes.Linear("wide", 4096, 7168)]
NEED = heuristic.Resources(100, 4096)
CUTLASS = Contender("cutlass", limits.Cutlass("sglang_jit"))
runner = CliRunner()


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv(env.CONFIG_DIR.name, str(tmp_path / "user"))
    monkeypatch.setattr(store, "SHIPPED", ())
    monkeypatch.setattr(limits, "versions", lambda: {"sglang_jit": "sglang-kt 0.7.2"})
    store.forget()
    yield tmp_path / "user"
    store.forget()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Builds:
    """Compiles nothing; refuses what `gate` says."""

    waited = 0.0

    def __init__(self, gate=lambda variant: None):
        self.gate = gate

    def ask(self, variants, n):
        assert all(variant == variant.variant() for variant in variants)

    def need(self, variant, n):
        return self.gate(variant) or NEED


class Bench:
    """`cost(contender, shape, m, fresh)` in us, a text for what is wrong, or an exception."""

    def __init__(self, cost, clock=None, others=(), host_default=None):
        self.cost, self.clock, self.others_ = cost, clock or Clock(), list(others)
        self.host_default = host_default  # in prefill
        self.calls: list[tuple] = []
        self.cases: set[tuple] = set()
        self.waited = 0.0

    def time(self, shape, m, contenders, *, rounds, graph_us, fresh=False):
        found = []
        self.cases.add((shape.n, shape.k, m))
        for contender in contenders:
            self.clock.now += 0.02
            self.calls.append((shape.n, m, contender, rounds, fresh))
            cost = self.cost(contender, shape, m, fresh)
            if isinstance(cost, BaseException):
                raise cost
            wrong = isinstance(cost, str)
            found.append(Timing(None, 0.5, cost) if wrong else Timing(cost, 1.6e-3))
        return found

    def defaults(self, shape, m):
        ours = Contender(
            "triton", heuristic.config_for(heuristic.Case(m, shape.n, shape.k), DEVICE)
        )
        return [self.host_default, ours] if self.host_default and m > 64 else [ours]

    def others(self, shape, m):
        return self.others_ if shape.n % 128 == 0 else []


def plant(*best, gain: float = 0.2, **exceptions):
    """Everything costs 100 us but for configurations with all these fields, which cost less."""
    wanted = dict(best)

    def cost(contender, shape, m, fresh):
        if contender.backend != "triton":
            return exceptions.get("cutlass", 100.0)
        fields = dataclasses.asdict(contender.config)
        hit = all(fields[name] == value for name, value in wanted.items())
        return 100.0 * (1 - gain) if hit else 100.0

    return cost


def search(bench, *, ms=(4,), layers=SHAPES[:1], cases=None, builds=None, **options):
    cases = {} if cases is None else cases
    options = {"budget": 1e6, "clock": bench.clock, **options}
    tuner = engine.Tuner(DEVICE, bench, builds or Builds(), **options)
    return tuner.run(layers, ms, cases), cases


def test_it_finds_the_best_and_the_server_takes_it(places):
    """From search to table to the choice that a server makes."""
    bench = Bench(plant(("kernel", "direct"), ("block_n", 64), ("num_warps", 4), ("unroll", 4)))
    outcome, cases = search(bench)
    assert outcome == engine.Outcome()
    (case,) = cases.values()
    config = table.config_from(case["config"])
    assert (config.kernel, config.block_n, config.num_warps, config.unroll) == ("direct", 64, 4, 4)
    assert (case["old_us"], case["us"], case["best_us"], case["effort"]) == (100, 80, 80, "full")
    head = results.header(DEVICE, "bfloat16", stand_in=False)
    now = datetime(2026, 1, 2)
    results.write_table(results.make_table(head, cases.values(), {}, now), store.user_file(RTX))
    choice = select.choose(select.Problem(3, 2112, 7168), DEVICE)
    assert (choice.evidence, choice.config) == ("user table", config)
    assert select.choose(select.Problem(5, 2112, 7168), DEVICE).evidence == "heuristic"
    written = json.loads(store.user_file(RTX).read_text())
    assert written["date"] == "2026-01-02"
    assert "dtype" not in written
    ratio = engine.distance(cases.values())
    assert (ratio["mean"], ratio["worst"], ratio["cases"]) == (1.25, 1.25, 1)


def test_a_second_look_goes_where_the_coarse_one_does_not(places):
    """One step from a good one, and one more from there."""

    def cost(contender, shape, m, fresh):
        c = contender.config
        return 100.0 - 20 * (c.registers == 96) - 20 * (c.registers == 96 and c.chunk == 16)

    _, cases = search(Bench(cost))
    config = next(iter(cases.values()))["config"]
    assert (config["chunk"], config["registers"]) == (16, 96)
    coarse = [config for rows in (8, 16) for config in space.variants(rows)]
    assert not {96, 16} & ({c.registers for c in coarse} | {c.chunk for c in coarse})


@pytest.mark.parametrize(("gain", "taken"), [(0.019, False), (0.021, True)])
def test_less_than_two_percent_changes_nothing(places, gain, taken):
    _, cases = search(Bench(plant(("unroll", 1), ("block_n", 64), gain=gain)))
    (case,) = cases.values()
    assert (case["backend"] is not None) == taken
    assert case["us"] == (100 * (1 - gain) if taken else 100)
    assert case["best_us"] == pytest.approx(100 * (1 - gain))


def test_a_win_that_fresh_data_do_not_confirm_is_none(places):
    quick = plant(("unroll", 1), ("block_n", 64))
    _, cases = search(Bench(lambda c, s, m, fresh: 100.0 if fresh else quick(c, s, m, fresh)))
    (case,) = cases.values()
    assert (case["backend"], case["us"], case["best_us"]) == (None, 100, 100)


def test_what_is_wrong_is_neither_timed_nor_written(places):
    """The fastest is wrong: at first sight, or only on fresh data."""
    best = plant(("unroll", 1), ("block_n", 64))

    def wrong(contender, shape, m, fresh):
        bad = contender.config.unroll == 1 and contender.config.block_n == 64
        return "wrong result, not timed" if bad else best(contender, shape, m, fresh)

    _, cases = search(Bench(wrong))
    config = next(iter(cases.values()))["config"]
    assert config is None or not (config["unroll"] == 1 and config["block_n"] == 64)

    def later(contender, shape, m, fresh):
        cost = best(contender, shape, m, fresh)
        return "wrong after timed replays" if fresh and cost < 100 else cost

    _, cases = search(Bench(later))
    assert next(iter(cases.values()))["backend"] is None


def test_an_old_one_that_is_wrong_is_reported_and_nothing_written(places):
    outcome, cases = search(Bench(lambda *_: "wrong result, not timed"))
    assert cases == {}
    assert outcome.failures == ["N=2112 K=7168 M=4: triton: wrong result, not timed"]


def test_a_case_that_fails_does_not_end_the_run(places):
    usual = plant(("unroll", 1))

    def cost(contender, shape, m, fresh):
        full = shape.n == 2112
        return torch.OutOfMemoryError("CUDA out of memory") if full else usual(contender, *[0] * 3)

    outcome, cases = search(Bench(cost), layers=SHAPES)
    assert list(cases) == ["4096,7168,4"]
    assert outcome.failures == ["N=2112 K=7168 M=4: OutOfMemoryError: CUDA out of memory"]


def test_what_fails_a_gate_is_never_timed(places):
    builds = Builds(lambda v: "spills registers" if v.num_warps == 8 else None)
    bench = Bench(plant(("num_warps", 8), ("block_n", 128)))
    _, cases = search(bench, builds=builds)
    (old,) = bench.defaults(SHAPES[0], 4)
    timed = {contender for _, _, contender, _, _ in bench.calls} - {old}
    assert timed
    assert not any(contender.config.num_warps == 8 for contender in timed)
    assert next(iter(cases.values()))["pruned"]["spills registers"] > 5


def test_contenders_are_timed_beside_the_old_one_and_the_last_round_is_the_longest(places):
    bench = Bench(plant(("unroll", 1)))
    search(bench)
    rounds = [call[3] for call in bench.calls]
    assert rounds == sorted(rounds)
    (old,) = bench.defaults(SHAPES[0], 4)
    at = [index for index, call in enumerate(bench.calls) if call[2] == old]
    assert max(b - a for a, b in itertools.pairwise(at)) <= engine.BATCH + 1
    assert {call[4] for call in bench.calls if call[3] == engine.CONFIRM["rounds"]} == {True}


def test_time_ends_a_run_and_the_next_goes_on(places):
    ms, saved = (1, 4, 16), []
    cases: dict[str, dict] = {}
    first = Bench(plant(("unroll", 1)))
    tuner = engine.Tuner(DEVICE, first, Builds(), budget=10.0, clock=first.clock)
    outcome = tuner.run(SHAPES, ms, cases, lambda: saved.append(len(cases)))
    assert outcome.ended == "budget"
    done = {name for name, case in cases.items() if case["effort"] == "full"}
    assert 0 < len(done) < 6
    assert saved == list(range(1, len(cases) + 1))
    assert first.clock.now < 10.0 + 4  # the last case ends with its final rounds
    kept = {name: cases[name] for name in done}
    second = Bench(plant(("unroll", 1)))
    outcome, _ = search(second, ms=ms, layers=SHAPES, cases=cases)
    assert outcome.ended == "done"
    assert len(cases) == 6
    assert all(cases[name] == case for name, case in kept.items())
    assert not {engine.key(n, 7168, m) for n, m, *_ in second.calls} & done
    third = Bench(plant(("unroll", 1)))
    search(third, ms=ms, layers=SHAPES, cases=cases)
    assert third.calls == []


def test_a_search_that_the_clock_cut_short_is_done_again(places):
    bench = Bench(plant(("unroll", 1)))
    outcome, cases = search(bench, budget=1.0)
    assert (outcome.ended, [case["effort"] for case in cases.values()]) == ("budget", ["cut"])
    tried = cases["2112,7168,4"]["tried"]
    search(Bench(plant(("unroll", 1))), cases=cases)
    assert cases["2112,7168,4"]["effort"] == "full"
    assert cases["2112,7168,4"]["tried"] > tried


def test_a_case_has_its_share_of_the_time_and_compiling_is_not_counted(places):
    bench = Bench(plant(("unroll", 1)))
    search(bench)
    assert bench.clock.now < engine.CASE_SECONDS + 2

    class Slow(Builds):
        def need(self, variant, n):
            bench.clock.now += 30.0
            self.waited += 30.0
            return NEED

    bench = Bench(plant(("unroll", 1)))
    _, cases = search(bench, builds=Slow())
    assert next(iter(cases.values()))["tried"] > 2 * engine.BATCH


def test_the_hosts_own_builds_count_against_no_budget(places):
    """A first run builds the host's kernels for minutes: all of its cases are still timed."""

    class Building(Bench):
        seconds = 400.0

        def defaults(self, shape, m):
            self.clock.now += self.seconds
            self.waited += self.seconds
            self.seconds = 0.0
            return super().defaults(shape, m)

    bench = Building(plant(("unroll", 1)), others=[CUTLASS])
    options = {"layers": SHAPES, "ms": tune.QUICK_MS, "quick": True, "budget": tune.QUICK_BUDGET}
    outcome, cases = search(bench, **options)
    assert (outcome.ended, len(cases)) == ("done", 12)
    assert all(case["seconds"] < 60 for case in cases.values())
    later = Building(plant(("unroll", 1)))
    later.others = lambda shape, m, usual=later.defaults: usual(shape, m) and []
    later.defaults = functools.partial(Bench.defaults, later)
    _, cases = search(later, budget=60.0)  # built when the case has begun
    assert [case["effort"] for case in cases.values()] == ["full"]
    second = Building(plant(("unroll", 1)))
    second.waited, second.seconds = 1000.0, 0.0  # before the run
    outcome, cases = search(second, ms=(1, 4, 8, 16, 64), budget=10.0)
    assert (outcome.ended, len(cases) < 5) == ("budget", True)


def test_ctrl_c_keeps_what_is_done(places):
    bench = Bench(plant(("unroll", 1)))
    usual = bench.cost
    bench.cost = lambda c, s, m, f: KeyboardInterrupt() if s.n == 4096 else usual(c, s, m, f)
    outcome, cases = search(bench, layers=SHAPES, ms=(4, 8))
    assert outcome.ended == "interrupted"
    assert list(cases) == ["2112,7168,4"]


def test_ctrl_c_keeps_what_is_done_whenever_it_comes(places):
    """While it looks ahead, while the state is saved, and between two cases."""
    usual = Bench(plant(("unroll", 1)))

    def run(bench, save=lambda: None, builds=None):
        cases: dict[str, dict] = {}
        tuner = engine.Tuner(DEVICE, bench, builds or Builds(), budget=1e6, clock=bench.clock)
        return tuner.run(SHAPES, (4, 8), cases, save), list(cases)

    def stop(*_):
        raise KeyboardInterrupt

    early = Bench(usual.cost)
    early.defaults = stop
    assert run(early) == (engine.Outcome("interrupted"), [])
    outcome, done = run(Bench(usual.cost), save=stop)
    assert (outcome.ended, done) == ("interrupted", ["2112,7168,4"])
    waiting = Builds()
    waiting.ask = stop
    assert run(Bench(usual.cost), builds=waiting) == (engine.Outcome("interrupted"), [])


def test_a_default_that_fails_costs_its_own_cases_only(places):
    bench = Bench(plant(("unroll", 1)))
    usual = bench.defaults

    def defaults(shape, m):
        if shape.n == 2112:
            raise RuntimeError("nothing can serve it")
        return usual(shape, m)

    bench.defaults = defaults
    outcome, cases = search(bench, layers=SHAPES, ms=(4, 8))
    assert list(cases) == ["4096,7168,4", "4096,7168,8"]
    assert outcome.failures == [
        f"N=2112 K=7168 M={m}: RuntimeError: nothing can serve it" for m in (4, 8)
    ]


def test_a_state_that_cannot_be_saved_ends_nothing_and_is_said_once(places):
    def full():
        raise OSError("No space left on device")

    bench = Bench(plant(("unroll", 1)))
    cases: dict[str, dict] = {}
    tuner = engine.Tuner(DEVICE, bench, Builds(), budget=1e6, clock=bench.clock)
    outcome = tuner.run(SHAPES, (4, 8), cases, full)
    assert (outcome.ended, len(cases), len(outcome.failures)) == ("done", 4, 1)
    assert "No space left" in outcome.failures[0]


@pytest.mark.parametrize("m", [4, 128])
def test_the_hosts_cutlass_is_taken_where_it_wins(places, m):
    bench = Bench(plant(gain=0.0, cutlass=90.0), others=[CUTLASS])
    _, cases = search(bench, layers=SHAPES, ms=(m,))
    narrow, wide = cases[f"2112,7168,{m}"], cases[f"4096,7168,{m}"]
    assert narrow["backend"] is None
    assert (wide["backend"], wide["config"]) == ("cutlass", {"kernel": "sglang_jit"})
    assert (wide["us"], wide["over_us"]) == (90, 100)


@pytest.mark.parametrize(
    ("by_default", "cutlass", "gain", "row"),
    [("cutlass", 100.0, 0.0, None), ("cutlass", 99.0, 0.0, None), ("cutlass", 101.0, 0.0, None),
     ("cutlass", 97.0, 0.0, "cutlass"), ("cutlass", 80.5, 0.2, "cutlass"),
     ("cutlass", 90.0, 0.11, "cutlass"), ("cutlass", 120.0, 0.0, "heuristic"),
     ("cutlass", 120.0, 0.01, "heuristic"), ("cutlass", 120.0, 0.2, "tuned"),
     ("cutlass", 100.0, 0.019, None), ("cutlass", 100.0, 0.021, "tuned"),
     ("ours", 120.0, 0.0, None), ("ours", 101.0, 0.0, None), ("ours", 99.0, 0.01, None),
     ("ours", 81.0, 0.2, "tuned"), ("ours", 78.0, 0.2, "cutlass"), ("ours", "wrong", 0.0, None)],
)  # fmt: skip
def test_in_prefill_a_row_beats_what_serves_or_names_it(places, by_default, cutlass, gain, row):
    """Ours as it is costs 100 us. Where CUTLASS is the default, ours may be asked for by flag."""
    default = CUTLASS if by_default == "cutlass" else None
    bench = Bench(
        plant(("group_m", 4), gain=gain, cutlass=cutlass), others=[CUTLASS], host_default=default
    )
    _, cases = search(bench, layers=SHAPES[1:], ms=(4096,))
    (case,) = cases.values()
    heuristics = dataclasses.asdict(bench.defaults(SHAPES[1], 4096)[-1].config)
    expected = {
        None: lambda: (case["backend"], case["config"]) == (None, None),
        "cutlass": lambda: (
            (case["backend"], case["config"]) == ("cutlass", {"kernel": "sglang_jit"})
        ),
        "heuristic": lambda: (case["backend"], case["config"]) == ("triton", heuristics),
        "tuned": lambda: case["backend"] == "triton" and case["config"]["group_m"] == 4,
    }
    assert expected[row]()
    assert row is None or case["us"] <= 0.98 * case["over_us"]


def test_a_kernel_that_serves_nobody_is_nothing_to_beat(places):
    """The slow one of two CUTLASS kernels is no default: the fast one, 1 % better, is no win."""
    slow = Contender("cutlass", limits.Cutlass("flashinfer"))
    cost = lambda c, *_: {CUTLASS: 99.0, slow: 300.0}.get(c, 100.0)  # noqa: E731
    for default in (None, CUTLASS):
        bench = Bench(cost, others=[CUTLASS, slow], host_default=default)
        _, cases = search(bench, layers=SHAPES[1:], ms=(4096,))
        (case,) = cases.values()
        assert (case["backend"], case["over_us"]) == (None, 100)


def test_quick_tries_little_and_a_full_run_does_it_again(places):
    clock = Clock()
    quick = Bench(plant(("unroll", 1)), clock, others=[CUTLASS])
    _, cases = search(quick, layers=SHAPES, ms=tune.QUICK_MS, quick=True, budget=tune.QUICK_BUDGET)
    assert len(cases) == 12
    assert max(case["tried"] for case in cases.values()) <= 2 + engine.QUICK_VARIANTS + 12
    assert any(call[2] == CUTLASS for call in quick.calls)
    full = Bench(plant(("unroll", 1)), others=[CUTLASS])
    search(full, layers=SHAPES, ms=(4,), cases=cases)
    assert cases["2112,7168,4"]["effort"] == "full"
    again = Bench(plant())
    search(again, layers=SHAPES, ms=tune.QUICK_MS, cases=cases, quick=True)
    assert again.calls == []


def test_events_say_where_a_run_stands(places):
    events = []
    bench = Bench(plant(("unroll", 2)))
    notify = lambda event: events.append(dataclasses.replace(event))  # noqa: E731
    search(bench, layers=SHAPES, ms=(4, 8), notify=notify)
    assert {event.step for event in events} == {"coarse", "near", "fine", "confirm"}
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert {event.done for event in events} == {0, 1, 2, 3}
    assert all(event.total == 4 for event in events)
    for case in range(4):  # each case's search goes on to its end, by its time
        parts = [event.part for event in events if event.done == case]
        assert parts == sorted(parts)
        assert (parts[0], parts[-1]) == (0, 1)
        assert len(set(parts)) > 4
    assert [event.left for event in events] == sorted((e.left for e in events), reverse=True)
    assert 1e6 - 60 < events[-1].left < events[0].left < 1e6 + 1
    assert events[-1].ratio == pytest.approx(0.8)
    assert "direct" in events[-1].best


def test_the_ms_of_a_run():
    assert sorted(tune.MS) == [
        1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192,
    ]  # fmt: skip
    assert sorted(tune.QUICK_MS) == [1, 4, 16, 64, 1024, 4096]


@pytest.mark.parametrize("m", tune.MS)
def test_every_candidate_is_one_that_a_table_takes(m):
    for layer in shapes.unique(shapes.SHAPE_SETS["deepseek-r1"]):
        found = []
        for variant in space.variants(table.row_class(m), "block_scale"):
            assert variant == variant.variant()
            found += space.schedules(variant, m, layer.n, layer.k, DEVICE, NEED)
        assert len(found) > 30
        for config in found:
            table.check(config, m, layer.k)
            for near in space.neighbours(config, layer.k):
                table.check(near, m, layer.k)
                assert near != config


def test_the_bound_on_shared_memory_is_below_what_the_compiler_takes():
    for variant, need in heuristic.RESOURCES.items():
        assert table.shared_bytes(variant) <= need.shared_bytes
        if variant.kernel == "pipelined":
            assert table.shared_bytes(variant) >= 0.9 * need.shared_bytes


def as_recorded(need: heuristic.Resources, variant: heuristic.Config) -> bool:
    """Whether an SM holds as many programs as by the recorded numbers, which differ by Triton."""
    held = heuristic.resident(need, variant.num_warps, DEVICE)
    return held == heuristic.programs_per_sm(variant, DEVICE)


def test_a_variant_is_compiled_and_judged_for_a_card_that_is_not_here():
    pytest.importorskip("triton")
    from sglang_kt_sm120 import aot
    from sglang_kt_sm120.tune import compiling

    good = heuristic.NARROW8
    look = compiling.compile_one(good, 2112, (12, 0), None, True, "bfloat16")
    assert as_recorded(compiling.judge(look, DEVICE), good)
    measured = aot.measure(good, "sm_120a")
    assert [look[key] for key in ("registers", "spills", "shared_bytes")] == [
        measured[key] for key in ("registers", "spills", "shared_bytes")
    ]
    large = heuristic.Config("tiled", 128, 128, num_warps=8, num_stages=6)
    look = compiling.compile_one(large, 2112, (12, 0), None, True, "bfloat16")
    assert look["shared_bytes"] >= table.shared_bytes(large) > DEVICE.shared_bytes
    assert compiling.judge(look, DEVICE) == "too much shared memory"
    for change, reason in (
        ({"spills": 8, "shared_bytes": 0}, "spills registers"),
        ({"shared_bytes": 0, "mma": {"HMMA": 4}}, "no native FP8 mma"),
        ({"shared_bytes": 0, "mma": {}}, "no native FP8 mma"),
        ({"error": "CompilationError"}, "does not compile"),
    ):
        assert compiling.judge({**look, **change}, DEVICE) == reason
    broken = dataclasses.replace(good, block_n=48)
    assert "error" in compiling.compile_one(broken, 2112, (12, 0), None, True, "bfloat16")


def test_processes_compile_ahead_and_are_asked_once():
    pytest.importorskip("triton")
    from sglang_kt_sm120.tune import compiling

    builds = compiling.Compilers(DEVICE, (12, 0), lambda variant: None, True, "bfloat16", jobs=1)
    try:
        builds.ask([heuristic.NARROW8, heuristic.NARROW8], 2112)
        builds.ask([heuristic.NARROW8], 4096)
        assert as_recorded(builds.need(heuristic.NARROW8, 2112), heuristic.NARROW8)
        assert builds.progress() == (1, 1)
        assert builds.waited > 0
        before = builds.waited
        builds.need(heuristic.NARROW8, 4096)
        assert builds.waited == before
        with pytest.raises(BrokenProcessPool):  # one of them dies, say for lack of memory
            builds._pool.submit(os._exit, 1).result()
        other = dataclasses.replace(heuristic.NARROW8, registers=0)
        with pytest.raises(RuntimeError, match="fewer --jobs"):
            builds.need(other, 2112)
        assert isinstance(builds.need(other, 2112), heuristic.Resources)
    finally:
        builds.close()


def finished(places) -> dict:
    bench = Bench(plant(("unroll", 1), cutlass=50.0), others=[CUTLASS])
    _, cases = search(bench, layers=SHAPES, ms=(4, 4096))
    head = results.header(DEVICE, "bfloat16", stand_in=False)
    facts = {"power_limit": "600.00 W", "driver": "580.1", "host": {"sglang-kt": "0.7.2"}}
    return results.make_table(head, cases.values(), facts)


def test_what_is_shared_passes_the_gate_for_pull_requests(places, tmp_path, monkeypatch):
    import tests.cpu.test_store as gate

    data = results.shared(finished(places), "a card owner")
    folder = tmp_path / "community"
    store.save(folder / "rtx-pro-6000-server.json", data)
    gate.test_every_table_in_the_wheel_is_valid(folder)
    monkeypatch.setattr(store, "SHIPPED", (folder,))
    store.forget()
    text = runner.invoke(
        cli.app, ["explain", "--shape", "2112,7168", "--m", "4", "--gpu", RTX], terminal_width=200
    ).stdout
    assert "device table: " in text
    assert f"tuned on {RTX}, shared by a card owner" in text
    workstation = RTX.replace("Server", "Workstation")
    arguments = ["explain", "--shape", "2112,7168", "--m", "4", "--gpu", workstation, "--json"]
    (row,) = json.loads(runner.invoke(cli.app, arguments).stdout)["rows"]
    assert (row["source"], "a card owner" in row["table"]) == ("class table", True)
    for card, changes in (
        ("NVIDIA GeForce RTX 5080", {"sm_count": 84}),
        ("NVIDIA RTX PRO 4500 Blackwell", {"sm_count": 82}),
    ):  # cards of which nothing is known here
        gpu = {**data["gpu"], "name": card, "bandwidth_gbs": 0.0, **changes}
        store.save(folder / "rtx-pro-6000-server.json", {**data, "gpu": gpu})
        gate.test_every_table_in_the_wheel_is_valid(folder)
    for spoil in (
        {"gpu": {**gpu, "bandwidth_gbs": 960.0}},
        {"gpu": {**gpu, "capability": "9.0"}},
        {"gpu": {**gpu, "sm_count": 0}},
        {"environment": {**data["environment"], "host": "no sglang installed"}},
        {"shared_by": ""},
        {"method": {"stand_in": True}},
        {"environment": {**data["environment"], "driver": ""}},
        {"gpu": {**data["gpu"], "sm_count": 100}},
    ):
        store.save(folder / "rtx-pro-6000-server.json", {**data, **spoil})
        with pytest.raises(AssertionError):
            gate.test_every_table_in_the_wheel_is_valid(folder)
    wrong = json.loads(json.dumps(data))
    next(r for s in wrong["shapes"] for r in s["rows"] if r["backend"])["error"] = 0.02
    store.save(folder / "rtx-pro-6000-server.json", wrong)
    with pytest.raises(AssertionError):
        gate.test_every_table_in_the_wheel_is_valid(folder)


def test_a_stand_ins_result_and_an_empty_one_are_not_shared(places):
    data = finished(places)
    with pytest.raises(table.BadTable, match="no SM12x"):
        results.shared({**data, "method": {"stand_in": True}}, "x")
    for credit in ("a\nb", "\x1b[31mred", "\u202eem", "x" * 200):
        with pytest.raises(table.BadTable, match="shared_by"):
            results.shared(data, credit)
    for host in ("no sglang installed", {}, None):
        environment = {**data["environment"], "host": host}
        with pytest.raises(table.BadTable, match="no sglang is installed"):
            results.shared({**data, "environment": environment}, "x")
    assert results.shared(data, " x ")["shared_by"] == "x"
    assert results.shared(data, " ")["shared_by"] == "anonymous"
    with pytest.raises(table.BadTable, match="nothing to share"):
        results.shared({**data, "shapes": []}, "x")


# ---------------------------------------------------------------- sglang's own files


def test_sglangs_files_have_its_name_and_its_six_keys(places, tmp_path):
    best = sglang_files.Stock((16, 64, 128, 1, 4, 5))

    def measure(shape, m, contenders, *, rounds, graph_us, fresh=False):
        us = [80.0 if c.config == best and m == 4 else 100.0 for c in contenders]
        return [Timing(value, 1e-3) for value in us]

    cases: dict[str, dict] = {}
    outcome = sglang_files.search(measure, SHAPES[:1], (4, 64), cases, budget=1e6)
    assert (outcome.ended, len(cases)) == ("done", 2)
    (file,) = sglang_files.write(tmp_path, cases.values(), "NVIDIA GeForce RTX 5090")
    assert file.name == (
        "N=2112,K=7168,device_name=NVIDIA_GeForce_RTX_5090,dtype=fp8_w8a8,"
        "block_shape=[128, 128].json"
    )
    written = json.loads(file.read_text())
    assert written == {"4": best.as_dict(), "64": sglang_files.DEFAULT}
    assert set(written["4"]) == set(sglang_files.KEYS)
    assert sglang_files.search(measure, SHAPES[:1], (4, 64), cases, budget=0).ended == "done"


def test_a_search_of_stock_that_the_clock_cut_short_is_done_again():
    clock, events = Clock(), []

    def measure(shape, m, contenders, *, rounds, graph_us, fresh=False):
        clock.now += len(contenders)
        return [Timing(100.0, 1e-3) for _ in contenders]

    def run(budget):
        events.clear()
        notify = lambda event: events.append(dataclasses.replace(event))  # noqa: E731
        return sglang_files.search(
            measure, SHAPES[:1], (4,), cases, budget=budget, clock=clock, notify=notify
        )

    cases: dict[str, dict] = {}
    assert run(20.0).ended == "budget"
    assert [case["effort"] for case in cases.values()] == ["cut"]
    assert events[-1].part < 1
    assert run(1e6).ended == "done"
    assert [case["effort"] for case in cases.values()] == ["full"]
    assert [event.part for event in events] == sorted({event.part for event in events})
    assert events[-1].part == 1
    before = clock.now
    assert (run(1e6).ended, clock.now) == ("done", before)


def test_a_failing_case_of_stock_and_ctrl_c_keep_what_is_done():
    def measure(shape, m, contenders, *, rounds, graph_us, fresh=False):
        if m == 4 and shape.n == 2112:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [Timing(100.0, 1e-3) for _ in contenders]

    def raising(error):
        def save():
            raise error

        return save

    def run(save):
        cases: dict[str, dict] = {}
        outcome = sglang_files.search(measure, SHAPES, (4, 64), cases, budget=1e6, save=save)
        return outcome, list(cases)

    failed = "N=2112 K=7168 M=4: OutOfMemoryError: CUDA out of memory"
    every = ["stock:4096,7168,4", "stock:2112,7168,64", "stock:4096,7168,64"]
    assert run(lambda: None) == (engine.Outcome("done", [failed]), every)
    outcome, done = run(raising(OSError("No space left on device")))
    assert (outcome.ended, done, len(outcome.failures)) == ("done", every, 2)
    assert run(raising(KeyboardInterrupt())) == (
        engine.Outcome("interrupted", [failed]), every[:1],
    )  # fmt: skip


def test_stock_is_launched_with_the_configuration_that_is_tried():
    seen = []
    module = {
        "get_w8a8_block_fp8_configs": lambda *a: None,
        "seen": seen,
    }
    code = (
        "def w8a8_block_fp8_matmul_triton(N, K):\n"
        "    configs = get_w8a8_block_fp8_configs(N, K, 128, 128)\n"
        "    seen.append(configs[min(configs, key=lambda x: abs(x - 4))] if configs else None)\n"
        "def triton_w8a8_block_fp8_linear(N, K):\n"
        "    return w8a8_block_fp8_matmul_triton(N, K)\n"
    )
    exec(code, module)
    linear, config = module["triton_w8a8_block_fp8_linear"], sglang_files.DEFAULT
    with sglang_files.launched_with(linear, config):
        linear(2112, 7168)
    linear(2112, 7168)
    assert seen == [config, None]
    del module["get_w8a8_block_fp8_configs"]
    with (
        pytest.raises(RuntimeError, match="nothing to tune"),
        sglang_files.launched_with(linear, config),
    ):
        pass


def test_no_configuration_for_stock_exceeds_the_card():
    for m in tune.MS:
        listed = sglang_files.grid(m)
        assert len(set(listed)) == len(listed) > 20
        for config in listed:
            block_m, block_n, block_k, _, _, stages = config.values
            assert (stages - 1) * (block_m + block_n) * block_k <= 101376


# ---------------------------------------------------------------- on a GPU that is not here


@pytest.mark.parametrize(("real", "stand_in"), [((12, 0), False), ((9, 0), True)])
def test_what_is_timed_is_what_is_served(monkeypatch, real, stand_in):
    """The stopwatch gets our kernels as serving launches them, on the operands of bench."""
    pytest.importorskip("triton")
    from sglang_kt_sm120 import bench as timing
    from sglang_kt_sm120 import op
    from sglang_kt_sm120.backends import cutlass
    from sglang_kt_sm120.backends import triton as backend
    from sglang_kt_sm120.tune import gpu

    seen, planned = [], []

    def make_cases(listed, rows, where, dtype):
        (layer,), (m,) = listed, rows
        x = torch.randn(m, layer.k).to(dtype)
        yield timing.Case(layer.name, m, layer.n, layer.k, x, [], [], torch.zeros(1))

    def time_case(case, candidates, *, rounds, graph_us):
        seen.append((case, rounds, graph_us))
        for candidate in candidates:
            candidate.prepare(case)
        return [timing.Record("x", case.n, case.k, case.m, c.name, us=5.0) for c in candidates]

    given = dataclasses.replace(DEVICE, capability=real)
    monkeypatch.setattr(devices, "device", lambda index: given)
    monkeypatch.setattr(devices, "_real_capability", lambda index: real)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: real)
    monkeypatch.setattr(op, "counters_for", lambda n, k, where: torch.ones(8, 640))
    known = limits.Known(("sglang_jit",), host_default="sglang_jit")
    proofs = []
    monkeypatch.setattr(
        op, "prove_cutlass", lambda *a, every: proofs.append(a) or time.sleep(0.05) or known
    )
    built = cutlass.libraries.is_installed
    monkeypatch.setattr(
        cutlass.libraries, "is_installed", lambda name: name == "sglang_jit" or built(name)
    )
    monkeypatch.setattr(timing, "make_cases", make_cases)
    monkeypatch.setattr(timing, "time_case", time_case)
    monkeypatch.setattr(backend, "plan", lambda config, n, k, **o: planned.append((config, o)))
    said: list[str] = []
    bench = gpu.GpuBench(0, torch.bfloat16, said.append)
    assert gpu.is_stand_in(0) == stand_in
    (old,) = bench.defaults(SHAPES[1], 4)
    assert old.config == heuristic.config_for(heuristic.Case(4, 4096, 7168), given)
    assert bench.others(SHAPES[1], 4) == ([] if stand_in else [CUTLASS])
    ours = Contender("triton", heuristic.config_for(heuristic.Case(4096, 4096, 7168), given))
    assert bench.defaults(SHAPES[1], 4096) == ([ours] if stand_in else [CUTLASS, ours])
    assert len(proofs) == len(said) == (0 if stand_in else 1)
    assert (0.05 <= bench.waited < 5) is not stand_in  # the probes' time, for the budget
    bench.others(shapes.Linear("another", 7168, 2048), 4)
    assert len(proofs) == (0 if stand_in else 2)
    assert len(said) == (0 if stand_in else 1)
    for m, arch in ((4, "sm120"), (16, "sm120"), (64, None), (1024, None)):
        old = bench.defaults(SHAPES[1], m)[-1]
        (timed,) = bench.time(SHAPES[1], m, [old], rounds=3, graph_us=500.0)
        assert timed == Timing(5.0, None, "")
        expected = {"arch": arch if stand_in else None, "pdl": True}
        assert planned[-1] == (old.config, expected)
        if m <= 64:  # what is compiled ahead is what is launched
            assert gpu.arch_of_variant(0, old.config) == expected["arch"]
        assert seen[-1][0].counters.numel() == 640
        assert seen[-1][0].every == (1 if m <= 512 else 17)
    bench.time(SHAPES[1], 1024, [old], rounds=3, graph_us=500.0)
    assert seen[-1][0] is seen[-2][0]  # the same operands
    bench.time(SHAPES[1], 1024, [old], rounds=3, graph_us=500.0, fresh=True)
    assert seen[-1][0] is not seen[-2][0]


# ---------------------------------------------------------------- the command


@pytest.fixture
def card(monkeypatch):
    """A made-up RTX PRO 6000 for the command: everything that would touch a GPU is replaced."""
    pytest.importorskip("triton")
    from sglang_kt_sm120 import bench as timing
    from sglang_kt_sm120.tune import compiling, gpu

    made = SimpleNamespace(bench=Bench(plant(("block_n", 32), cutlass=50.0), others=[CUTLASS]))
    made.bench.device, made.bench.index, made.bench.pdl = DEVICE, 0, True
    made.stand_in = False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(gpu, "is_stand_in", lambda index: made.stand_in)
    monkeypatch.setattr(gpu, "real_capability", lambda index: (12, 0))
    monkeypatch.setattr(gpu, "GpuBench", lambda index, dtype, say: made.bench)
    monkeypatch.setattr(system, "versions", lambda: {"sglang-kt": "0.7.2"})
    monkeypatch.setattr(timing, "environment", lambda: {"gpu": RTX, "triton": "3.6.0"})

    class Compilers(Builds):
        def __init__(self, *arguments):
            super().__init__()

        def progress(self):
            return 1, 2

        def close(self):
            pass

    monkeypatch.setattr(compiling, "Compilers", Compilers)
    return made


def command(*arguments: str, code: int = 0):
    result = runner.invoke(cli.app, ["tune", *arguments], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result


def test_the_command_writes_table_picture_and_summary(card, places, tmp_path):
    share = tmp_path / "mine.json"
    arguments = ("--set", "deepseek-r1", "--m", "1,4")
    given = ("--share", str(share), "--credit", "me", "--json")
    answer = json.loads(command(*arguments, *given).stdout)
    assert (answer["schema"], answer["ok"], answer["ended"]) == (1, True, "done")
    assert len(answer["cases"]) == answer["of"] == 16
    assert answer["distance"]["mean"] == pytest.approx(1.25)
    assert answer["environment"]["triton"] == "3.6.0"
    assert answer["table"] == str(store.user_file(RTX))
    assert json.loads(share.read_text())["shared_by"] == "me"
    assert (places / "nvidia-rtx-pro-6000-blackwell-server-edition.png").read_bytes()[1:4] == b"PNG"
    shown = command(*arguments)  # goes on: nothing is left to do
    assert "going on after 16 finished cases" in " ".join(shown.stderr.split())
    assert "2112,7168" in shown.stdout
    summary = " ".join(shown.stdout.split())
    assert "25.0% from the best found (geometric mean of 16 cases), 25.0% at worst" in summary
    assert "20.0%" in shown.stdout
    assert len(card.bench.cases) == 16
    before = len(card.bench.calls)
    command(*arguments, "--fresh", "--json")
    assert len(card.bench.calls) == 2 * before


def test_the_command_goes_on_after_time_was_up_and_after_ctrl_c(card, places):
    arguments = ("--set", "deepseek-r1", "--m", "1,4")
    clocked = functools.partial(engine.Tuner, clock=card.bench.clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "Tuner", clocked)
        first = command(*arguments, "--budget", "20s")
    assert "of 16 cases done (the time is up): run the same command again" in first.stdout
    assert store.user_file(RTX).exists()
    usual = card.bench.cost
    card.bench.cost = lambda c, s, m, f: KeyboardInterrupt() if m == 4 else usual(c, s, m, f)
    answer = json.loads(command(*arguments, "--json", code=1).stdout)
    assert (answer["ok"], answer["ended"], len(answer["cases"])) == (False, "interrupted", 8)
    card.bench.cost = usual
    assert json.loads(command(*arguments, "--json").stdout)["ended"] == "done"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("No space left on device")])
def test_what_is_finished_reaches_the_table_though_its_state_is_not_saved(
    card, places, monkeypatch, error
):
    def save(*_):
        raise error

    monkeypatch.setattr(results, "save_state", save)
    answer = json.loads(command("--shape", "2112,7168", "--m", "4", "--json", code=1).stdout)
    assert [case["m"] for case in answer["cases"]] == [4]
    (shape,) = json.loads(store.user_file(RTX).read_text())["shapes"]
    assert [row["m"] for row in shape["rows"]] == [4]


def test_the_summary_says_who_serves_from_now_on(card, places):
    card.bench.others_ = [CUTLASS]
    card.bench.host_default = CUTLASS
    for cutlass, said in ((80.0, "cutlass sglang_jit: kept, over ours"), (101.0, "kept")):
        card.bench.cost = plant(gain=0.0, cutlass=cutlass)
        shown = command("--shape", "4096,7168", "--m", "4096", "--fresh").stdout
        (line,) = (line for line in shown.splitlines() if "4096,7168" in line)
        assert line.split("  ")[-1].strip() == said, line


def test_the_command_says_what_is_wrong(card, places, monkeypatch, tmp_path):
    card.bench.cost = lambda *_: "wrong result, not timed"
    result = command("--shape", "2112,7168", "--m", "4", code=1)
    assert "not tuned: N=2112 K=7168 M=4" in " ".join(result.stderr.split())
    card.bench.cost = lambda *_: torch.OutOfMemoryError("CUDA out of memory")
    assert "Stop it first" in command("--shape", "2112,7168", "--m", "4", code=1).stderr
    assert not store.user_file(RTX).exists()
    monkeypatch.setenv(env.BACKEND.name, "triton")
    assert "unset it to tune" in " ".join(command(code=1).stderr.split())
    monkeypatch.delenv(env.BACKEND.name)
    text = " ".join(command("--export-sglang", str(tmp_path), code=1).stderr.split())
    assert "no sglang imports here" in text


def test_sglangs_files_are_of_what_was_asked_for(card, places, tmp_path, monkeypatch):
    """The state holds another layer, and another M of this one, from earlier runs."""
    from sglang_kt_sm120 import host

    monkeypatch.setattr(host, "linear_functions", lambda: {"stock": (None, "fp32")})
    card.bench.cost = lambda *_: 100.0

    def export(shape, m):
        arguments = ("--shape", shape, "--m", m, "--export-sglang", str(tmp_path), "--json")
        return json.loads(command(*arguments).stdout)

    export("4096,7168", "4")
    export("2112,7168", "64")
    for file in tmp_path.glob("N=*.json"):
        file.unlink()
    answer = export("2112,7168", "4")
    assert [(case["n"], case["m"]) for case in answer["cases"]] == [(2112, 4)]
    assert answer["of"] == 1
    (file,) = answer["files"]
    assert [str(path) for path in tmp_path.glob("N=*.json")] == [file]
    assert json.loads(Path(file).read_text()).keys() == {"4", "64"}  # what a layer's file may hold


def test_rows_above_64_are_timed_at_the_m_that_decides_them(card, places):
    result = command("--shape", "2112,7168", "--m", "4,100,128,700", "--json")
    assert [case["m"] for case in json.loads(result.stdout)["cases"]] == [4, 128, 704]
    assert "M=100 is decided as M=128" in " ".join(result.stderr.split())
    assert all(select.bucket(m) == m for m in (*tune.MS, *tune.QUICK_MS))


def test_a_stand_ins_table_is_marked_and_not_shared(card, places, tmp_path):
    card.stand_in = True
    arguments = ("--shape", "2112,7168", "--m", "4")
    assert "this very GPU only" in " ".join(command(*arguments).stderr.split())
    assert json.loads(store.user_file(RTX).read_text())["method"]["stand_in"] is True
    before = len(card.bench.calls)
    refused = command(*arguments, "--fresh", "--share", str(tmp_path / "x.json"), code=1)
    assert "no SM12x" in refused.stderr
    assert len(card.bench.calls) == before  # said before minutes of timing
    card.stand_in = False
    share = ("--share", str(tmp_path / "x.json"), "--credit", "a\nb")
    assert "shared_by" in command(*arguments, *share, code=1).stderr
    assert len(card.bench.calls) == before
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--budget", "soon"), ("--budget", "0s"), ("--m", "0"), ("--m", "16385"), ("--m", "x"),
        ("--dtype", "int8"), ("--share", "/no/such/folder/x.json"), ("--set", "unheard"),
        ("--jobs", "0"), ("--export-sglang", ".", "--quick"),
    ],
)  # fmt: skip
def test_usage_errors_are_2(arguments):
    command(*arguments, code=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a CUDA device")
def test_without_a_gpu_it_is_3():
    assert json.loads(command("--json", code=3).stdout)["ok"] is False
