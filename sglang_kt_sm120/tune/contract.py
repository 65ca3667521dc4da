"""What the tuner's pieces say to each other: contenders, timings, events, protocols.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_kt_sm120 import heuristic


@dataclass(frozen=True)
class Contender:
    """What may serve: a backend of `table.BACKENDS` and its configuration."""

    backend: str
    config: Any

    def brief(self) -> str:
        """Return a few words for a progress line."""
        if not isinstance(self.config, heuristic.Config):
            return f"{self.backend} {getattr(self.config, 'kernel', '')}".strip()
        c = self.config
        return f"{c.kernel} {c.block_m}x{c.block_n} {c.num_warps}w x{c.splits}"


@dataclass(frozen=True)
class Timing:
    """What became of a contender: microseconds (None: not timed), relative error, why not."""

    us: float | None
    error: float | None = None
    note: str = ""


class Bench(Protocol):
    """Times contenders on one product, interleaved, each checked before and after.

    Attributes:
        waited: Seconds spent so far on building and probing the host's kernels, in `defaults` and
            `others`; they count neither against a case's time nor against the run's.
    """

    waited: float

    def time(
        self,
        shape,
        m: int,
        contenders: Sequence[Contender],
        *,
        rounds: int,
        graph_us: float,
        fresh: bool = False,
    ) -> list[Timing]:
        """Return one `Timing` each; `fresh` asks for new operands."""  # fmt: skip

    def defaults(self, shape, m: int) -> list[Contender]:
        """Return what may serve this product where no table says otherwise.

        The first is the old one: what this host serves unless told otherwise. Then what it serves
        where our kernels are asked for, if that is another.
        """

    def others(self, shape, m: int) -> list[Contender]:
        """Return the contenders that are not ours (the host's CUTLASS kernels)."""


class Builds(Protocol):
    """Compiles variants ahead.

    Attributes:
        waited: Seconds spent in `need` so far; they do not count against a case's time.
    """

    waited: float

    def ask(self, variants: Iterable[heuristic.Config], n: int) -> None:
        """Start compiling, for weights of `n` rows, and return at once."""

    def need(self, variant: heuristic.Config, n: int) -> heuristic.Resources | str:
        """Wait for a variant; return what it takes, or the gate that it fails."""


@dataclass
class Event:
    """Where a run stands, for a progress display."""

    shape: Any
    m: int
    done: int  # cases
    total: int
    step: str  # "coarse", "near", "fine", "confirm"
    tried: int  # contenders
    part: float = 0.0  # of the case's search, by its time or by its contenders, 0 to 1
    left: float = 0.0  # seconds of the budget
    best: str = ""
    ratio: float | None = None  # the best's time over the old one's


@dataclass
class Outcome:
    """How a run ended: "done", "budget" (time is up) or "interrupted"; what failed, as texts."""

    ended: str = "done"
    failures: list[str] = field(default_factory=list)
