"""The search itself: which contenders are timed, in what order, and when one has won.

It knows no GPU: `Bench` times and checks, `Builds` compiles, both given (contract.py). For
each (shape, M):

1. coarse: many configurations in small batches, each beside what serves today (the *old* one), a
   few rounds each; what spills, needs too much or is wrong is never timed;
2. near: one step around the best three, up to four times;
3. fine: the best few and the old one, more rounds;
4. confirm: the winner against the old one on fresh data, most rounds. Less than `MIN_GAIN` faster,
   and the old one stays.

In prefill a host may serve its own CUTLASS by default, and the same host serves our kernels where
they are asked for by flag. A table is for both, so what serves then is measured too (see
`Bench.defaults`). Where it is slower than the old one by `MIN_GAIN` and nothing beats the old one
by as much, the table names the old one; it is silent where all are as good.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sglang_kt_sm120 import heuristic
from sglang_kt_sm120.configs import store, table
from sglang_kt_sm120.tune import space
from sglang_kt_sm120.tune.contract import Bench, Builds, Contender, Event, Outcome, Timing

MIN_GAIN = 0.02  # of the old time; timings of one configuration move by 1 % within a run
BATCH = 12  # contenders timed in turn, beside the old one
FINALISTS = 4
NEAR_ROUNDS = 4
COARSE = {"rounds": 3, "graph_us": 500.0}
FINE = {"rounds": 5, "graph_us": 1500.0}
CONFIRM = {"rounds": 15, "graph_us": 2000.0}
QUICK_FINE = {"rounds": 3, "graph_us": 500.0}
QUICK_CONFIRM = {"rounds": 9, "graph_us": 1000.0}
#: Seconds that one (shape, M) may take before its search moves on to the final rounds.
CASE_SECONDS = 7.0
QUICK_SECONDS = 1.2
QUICK_VARIANTS = 4  # per class of M


def key(n: int, k: int, m: int) -> str:
    """Return the name of a case in the state file."""
    return f"{n},{k},{m}"


class Tuner:
    """Searches one case after another until all are done or the time is up.

    Args:
        device: The `select.Device` to tune.
        bench, builds: See the protocols.
        budget: Seconds for the whole run, counted from here, without `Bench.waited`.
        quick: Only ours as it is, a few variants and the host's kernels.
        clock: Monotonic seconds.
        notify: Receives an `Event` now and then.
        started: What `clock` said when the user began to wait (default: now).
    """

    def __init__(
        self, device, bench: Bench, builds: Builds, *, budget: float, quick: bool = False,
        clock: Callable[[], float] = time.monotonic,
        notify: Callable[[Event], None] = lambda event: None,
        started: float | None = None,
    ):  # fmt: skip
        self.device, self.bench, self.builds, self.quick = device, bench, builds, quick
        self.clock, self.notify = clock, notify
        self._end = (clock() if started is None else started) + budget - bench.waited
        self.seconds = QUICK_SECONDS if quick else CASE_SECONDS
        self.fine, self.confirm = (QUICK_FINE, QUICK_CONFIRM) if quick else (FINE, CONFIRM)
        #: (n, k, class of M) -> configurations by rising time, of the last M searched there.
        self.ranked: dict[tuple[int, int, int], list[heuristic.Config]] = {}

    @property
    def end(self) -> float:
        """When the budget is spent, as `clock` tells it: later by what the host's builds took."""
        return self._end + self.bench.waited

    def run(
        self, shapes: Sequence, ms: Sequence[int], cases: dict[str, dict],
        save: Callable[[], None] = lambda: None,
    ) -> Outcome:  # fmt: skip
        """Tune every (shape, M) that `cases` does not hold yet, M by M; results go into `cases`.

        `save` is called after each. KeyboardInterrupt, whenever it comes, ends the run and keeps
        what is done; a case that fails, or a state that cannot be saved, is listed in the outcome
        and ends nothing.
        """
        outcome = Outcome()
        try:
            self._run(shapes, ms, cases, save, outcome)
        except KeyboardInterrupt:
            outcome.ended = "interrupted"
        return outcome

    def _run(self, shapes, ms, cases, save, outcome: Outcome) -> None:
        todo = [(shape, m) for m in ms for shape in shapes if not self._done(cases, shape, m)]
        total = len(ms) * len(shapes)
        self._compile_ahead(todo)
        for index, (shape, m) in enumerate(todo):
            if self.clock() >= self.end:
                outcome.ended = "budget"
                break
            self.at = Event(shape, m, total - len(todo) + index, total, "coarse", 0)
            try:
                found = self._case(shape, m)
            except Exception as error:  # one case (its memory, say) must not end the run
                found = {"failure": f"{type(error).__name__}: {error}"}
            if "failure" in found:
                outcome.failures.append(f"N={shape.n} K={shape.k} M={m}: {found['failure']}")
                continue
            cases[key(shape.n, shape.k, m)] = found
            if found["effort"] == "cut":
                outcome.ended = "budget"
            keep(save, outcome)

    def _compile_ahead(self, todo: Sequence[tuple]) -> None:
        """Ask for what will be timed, the old ones first; a case that fails here says so later."""
        for shape, m in todo:
            with contextlib.suppress(Exception):
                ours = [c for c in self.bench.defaults(shape, m) if c.backend == "triton"]
                self.builds.ask([c.config.variant() for c in ours], shape.n)
        for shape, m in todo:
            with contextlib.suppress(Exception):
                self.builds.ask(self._variants(m), shape.n)

    def _done(self, cases: dict[str, dict], shape, m: int) -> bool:
        case = cases.get(key(shape.n, shape.k, m))
        return case is not None and (self.quick or case["effort"] == "full")

    def _variants(self, m: int) -> list[heuristic.Config]:
        listed = space.variants(table.row_class(m), self.device.mma)
        return listed[:QUICK_VARIANTS] if self.quick else listed

    def _say(self, step: str, tried: int, part: float, best=None, ratio=None) -> None:
        self.at.step, self.at.tried, self.at.part = step, tried, min(part, 1.0)
        self.at.left = max(self.end - self.clock(), 0.0)
        if best is not None:
            self.at.best, self.at.ratio = best.brief(), ratio
        self.notify(self.at)

    def _case(self, shape, m: int) -> dict:
        defaults, others = self.bench.defaults(shape, m), self.bench.others(shape, m)
        start = self.clock()  # the host's builds are behind
        old = defaults[0]
        waited = self.builds.waited
        times: dict[Contender, float] = {}  # over the old one's, in the same batch
        pruned: dict[str, int] = {}

        def spent() -> float:
            return self.clock() - start - (self.builds.waited - waited)

        def time_is_up() -> bool:
            return spent() >= self.seconds or self.clock() >= self.end

        def race(listed: Iterable[Contender], step: str) -> None:
            """Time what is new in `listed`, batch by batch, until the case's time is up."""
            for batch in _batches((c for c in listed if c not in times), BATCH):
                _, *rest = self._against(shape, m, old, batch, COARSE)
                for contender, ratio in zip(batch, rest, strict=True):
                    times[contender] = ratio if ratio is not None else float("inf")
                best = min(times, key=times.__getitem__)
                self._say(step, len(times), spent() / self.seconds, best, times[best])
                if time_is_up():
                    break

        self._say("coarse", 0, 0.0)
        (first,) = self._time(shape, m, [old], COARSE)
        if first.us is None:
            # What serves today is wrong or fails here: that is a finding, not a baseline.
            return {"failure": f"{old.backend}: {first.note}"}
        times[old] = 1.0
        race([*defaults, *others], "coarse")
        race(self._coarse(shape, m, pruned), "coarse")
        for _ in range(0 if self.quick else NEAR_ROUNDS):
            if not time_is_up():
                race(self._near(shape, m, times, pruned), "near")
        good = [c for c in sorted(times, key=times.__getitem__) if times[c] < float("inf")]
        self.ranked[shape.n, shape.k, table.row_class(m)] = [
            c.config for c in good if c.backend == "triton"
        ]
        return self._decide(shape, m, defaults, good, times, pruned, start)

    def _coarse(self, shape, m: int, pruned: dict[str, int]) -> Iterator[Contender]:
        """Yield the configurations to try, those that were good at a neighbouring M first."""
        seeds = self.ranked.get((shape.n, shape.k, table.row_class(m)), [])
        for config in seeds[: QUICK_VARIANTS if self.quick else BATCH]:
            yield Contender("triton", config)
        for variant in self._variants(m):
            need = self.builds.need(variant, shape.n)
            if isinstance(need, str):
                pruned[need] = pruned.get(need, 0) + 1
                continue
            listed = space.schedules(variant, m, shape.n, shape.k, self.device, need)
            for config in listed[:1] if self.quick else listed:
                if space.possible(config, m, shape.k, self.device.shared_bytes):
                    yield Contender("triton", config)

    def _near(self, shape, m: int, times, pruned: dict[str, int]) -> Iterator[Contender]:
        """Yield what lies one step from the best three of ours and passes the gates."""
        ours = (c for c in sorted(times, key=times.__getitem__) if c.backend == "triton")
        listed = [
            config
            for contender in itertools.islice(ours, 3)
            for config in space.neighbours(contender.config, shape.k)
            if space.possible(config, m, shape.k, self.device.shared_bytes)
        ]
        self.builds.ask([config.variant() for config in listed], shape.n)  # all, before waiting
        for config in listed:
            need = self.builds.need(config.variant(), shape.n)
            if isinstance(need, str):
                pruned[need] = pruned.get(need, 0) + 1
            else:
                yield Contender("triton", config)

    def _time(self, shape, m: int, contenders, how: dict, **more) -> list[Timing]:
        return self.bench.time(shape, m, contenders, **how, **more)

    def _against(self, shape, m: int, old, contenders, how: dict, **more) -> list[float | None]:
        """Time contenders beside the old one; return their times over its, None where not timed."""
        timings = self._time(shape, m, [old, *contenders], how, **more)
        base = timings[0].us
        return [t.us / base if t.us is not None and base else None for t in timings]

    def _decide(self, shape, m: int, defaults, good, times, pruned, start: float) -> dict:
        """Run the final and the confirmation; return the case's record."""
        old = defaults[0]
        # A search that the end of the run cut short is done again by the next one.
        effort = "quick" if self.quick else "cut" if self.clock() >= self.end else "full"
        finalists = [c for c in good if c != old][:FINALISTS]
        self._say("fine", len(times), 1.0)
        _, *rest = self._against(shape, m, old, finalists, self.fine)
        final = {c: r for c, r in zip(finalists, rest, strict=True) if r is not None}
        record = {
            "name": shape.name, "n": shape.n, "k": shape.k, "m": m,
            "effort": effort, "tried": len(times), "pruned": pruned,
            "old": _written(old),
        }  # fmt: skip
        winner = min(final, key=final.__getitem__, default=None)
        if winner is not None:
            self._say("confirm", len(times), 1.0, winner, final[winner])
        # The best of ours as well, for the heuristic's distance from it.
        best_of_ours = next((c for c in sorted(final, key=final.get) if c.backend == "triton"), old)
        last = list(dict.fromkeys([*defaults, winner or old, best_of_ours]))
        timings = self._time(shape, m, last, self.confirm, fresh=True)
        known = {c: t for c, t in zip(last, timings, strict=True) if t.us is not None}
        if old not in known:
            return {"failure": f"{old.backend}, on fresh data: {timings[0].note}"}
        over_us = max(known[c].us for c in defaults if c in known)
        best = old
        for rival in (*defaults, winner):  # each has to beat what would stay
            if rival in known and known[rival].us <= (1 - MIN_GAIN) * known[best].us:
                best = rival
        ours = [c for c in known if c.backend == "triton"] or [old]
        record |= {
            "old_us": known[old].us, "best_us": min(known[c].us for c in ours),
            "over_us": over_us, "us": known[old].us, "error": known[old].error,
            "best": _written(min(ours, key=lambda c: known[c].us)), "backend": None, "config": None,
            "all_us": {c.brief(): t.us for c, t in known.items()},
        }  # fmt: skip
        if known[best].us <= (1 - MIN_GAIN) * over_us:
            record |= {**_written(best), "us": known[best].us, "error": known[best].error}
            if best.backend == "triton":
                need = self.builds.need(best.config.variant(), shape.n)
                if not isinstance(need, str):  # the old one may fail a gate of the tuner's
                    record["registers"] = need.registers
                    record["shared_bytes"] = need.shared_bytes
        record["seconds"] = round(self.clock() - start, 3)
        return record


def keep(save: Callable[[], None], outcome: Outcome) -> None:
    """Save the state; where that fails, say so once in the outcome: the table is still to come."""
    try:
        save()
    except Exception as error:  # a full disk, say: what was measured must outlive it
        text = f"the state is not saved, a later run cannot go on from here: {error}"
        if text not in outcome.failures:
            outcome.failures.append(text)


def _written(contender: Contender) -> dict[str, Any]:
    return {"backend": contender.backend, "config": store.config_dict(contender.config)}


def _batches(items: Iterable, size: int) -> Iterator[list]:
    batch: list = []
    for item in items:
        if item not in batch:
            batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def distance(cases: Iterable[dict]) -> dict[str, float]:
    """How far what served before is from the best that was found: {"mean", "worst", "cases"}.

    Ratios old / best, both from the confirming run, geometric mean and maximum, over cases of a
    full search where our own heuristic served before.
    """
    ratios = [
        case["old_us"] / case["best_us"]
        for case in cases
        if case["effort"] == "full" and case["old"]["backend"] == "triton"
    ]
    if not ratios:
        return {"mean": 1.0, "worst": 1.0, "cases": 0}
    mean = statistics.geometric_mean(ratios)
    return {"mean": mean, "worst": max(ratios), "cases": len(ratios)}
