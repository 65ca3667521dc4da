"""A benchmark's records, apart from what takes them: showing earlier ones needs no Triton."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class Record:
    """One line of a benchmark. `us` is None where the candidate was wrong or failed."""

    shape: str
    n: int
    k: int
    m: int
    candidate: str
    us: float | None = None
    spread: float | None = None  # (largest - smallest) / median over the rounds
    error: float | None = None  # relative, against float64 on the same quantised operands
    bytes: int = 0
    scales: str = "fp32"
    config: dict = field(default_factory=dict)
    note: str = ""

    def as_dict(self) -> dict:
        """JSON-able form."""
        return asdict(self)
