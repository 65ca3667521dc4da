"""What has to hold of a compiled kernel, and of the schedule that it is launched with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from types import SimpleNamespace

from sglang_kt_sm120 import heuristic
from sglang_kt_sm120.heuristic import Config

SHARED_LIMIT = 101376  # bytes a block may use on SM12x
IN_FLIGHT = 32 * 1024  # bytes per SM that decode should have outstanding
NON_TENSOR_SHARE = 0.5  # issue slots besides mma over tensor cycles, prefill
#: The largest SM12x card that schedules are judged for: RTX PRO 6000.
SM12X = SimpleNamespace(capability=(12, 0), sm_count=188, shared_bytes=SHARED_LIMIT)
PAIR = 64  # numbers that one warp's F2FP converts: two a lane


def conversions(config: Config, all_counts: Counter, loop: Counter | None) -> list[str]:
    """Failures of "F2FP only in quantisation and epilogue", counted against what those need.

    Quantising packs [block_m, 128] numbers per K block, two a lane, shared by the warps; it may
    stand twice in the code (the direct kernel's first step is peeled). The epilogue packs a tile in
    each of its two branches (alone, or last of several splits). Anything else is a conversion of
    operands: FP8 emulated in f16, or a copy of the quantiser in every lane.

    Args:
        all_counts: instructions of the whole kernel. loop: of its main loop, None where unknown.
    """
    quantised = config.block_m * 128 * config.unroll // (PAIR * config.num_warps)
    stored = config.block_m * config.block_n // (PAIR * config.num_warps)
    packs_fp8 = quantised if config.fused else 0
    allowed = {"E4M3 pack": 2 * packs_fp8, "output pack": 2 * stored, "other": 0}
    in_loop = {"E4M3 pack": packs_fp8, "output pack": 0, "other": 0}
    failures = []
    for counts, limits, where in ((all_counts, allowed, ""), (loop, in_loop, " in the main loop")):
        kinds = Counter()
        for name, n in (counts or {}).items():
            if name.startswith("F2FP"):
                kinds[_kind(name)] += n
        failures += [
            f"F2FP{where}: {n} of kind {kind!r}, quantisation and epilogue need {limits[kind]}"
            for kind, n in kinds.items()
            if n > limits[kind]
        ]
    return failures


def _kind(name: str) -> str:
    if "UNPACK" in name:
        return "other"
    return "E4M3 pack" if "E4M3" in name else "output pack"


def failures(
    config: Config | None, record: dict, counts: Counter, loop: Counter | None, fp8: bool = True
) -> list[str]:
    """Gates that a compiled kernel fails, as texts.

    Args:
        config: the variant, None for the quantisation kernel.
        record: its record so far (see `aot.measure`).
        counts, loop: instructions of the kernel and of its main loop.
        fp8: whether this Triton has FP8 instructions for the target at all; where it has none, that
            is a fact about Triton, and f16 ones are no failure of the kernel.
    """
    found = []
    if record["spills"] or record["local"]:
        found.append(f"spills: {record['spills']} stack bytes, {record['local']} LDL/STL")
    if record["shared_bytes"] > SHARED_LIMIT:
        found.append(f"shared memory {record['shared_bytes']} > {SHARED_LIMIT}")
    if config is None:
        return found
    mma = record["mma"]
    if fp8:
        if not mma.get("QMMA") and not mma.get("QMMA.SF"):
            found.append("no native FP8 mma")
        if mma.get("HMMA"):
            found.append(f"{mma['HMMA']} HMMA: FP8 is emulated in f16")
        found += conversions(config, counts, loop)
    if config.unit_scaled and not mma.get("QMMA.SF"):
        found.append("dot_scaled is not lowered to a block-scaled mma")
    if record["source"] == "sass" and not record["model"]:
        found.append("no loop with an mma in the SASS: nothing of it could be judged")
    share = record["model"].get("non_tensor_share", 0.0)
    if config.kernel == "tiled" and share > NON_TENSOR_SHARE:
        found.append(f"issue slots that are not mma: {share} of the tensor cycles")
    return found


def bytes_in_flight(config: Config, programs: int, k_blocks: int | None = None) -> int:
    """Weight bytes that `programs` resident programs of a decode variant keep requested.

    k_blocks: of one program, where it has fewer than its pipeline is deep.
    """
    depth = config.unroll if config.kernel == "direct" else config.num_stages - 1
    depth = depth if k_blocks is None else min(depth, k_blocks)
    return programs * depth * config.block_n * 128


@dataclass(frozen=True)
class Schedule:
    """How a decode layer is spread over a card: what one SM gets.

    Attributes:
        n, k: the layer's weight. m: the first of the rows that share this schedule.
        config: as selection returns it. programs: in all.
        busy: SMs that get at least one.
        per_sm: programs that an SM runs at once (the fewest, among SMs that hold equally many).
        in_flight: weight bytes that they keep requested.
        share: weight bytes of the layer, over the SMs.
        failures: texts of failed gates.
    """

    n: int
    k: int
    m: int
    config: Config
    programs: int
    busy: int
    per_sm: int
    in_flight: int
    share: int
    failures: list[str]

    def as_dict(self) -> dict:
        """JSON-able form."""
        return asdict(self)


def schedules(
    layers: Iterable[tuple[int, int]],
    choose: Callable[[int, int, int], Config],
    resident: Callable[[Config], int],
    device=SM12X,
) -> list[Schedule]:
    """Judge the schedules of decode layers: every SM busy, and enough bytes in flight on each.

    Enough is 32 KiB, or a layer's whole share of an SM where that is less.

    Args:
        layers: (n, k) of weights.
        choose: (m, n, k) -> the config that selection returns, for every m from 1 to 64.
        resident: config -> programs that an SM holds, from the compiler's numbers.
        device: its sm_count.

    Returns:
        One for each layer and distinct config.
    """
    found: dict[tuple, Schedule] = {}
    for n, k in layers:
        for m in range(1, heuristic.DECODE_ROWS + 1):
            config = choose(m, n, k)
            if (n, k, config) not in found:
                found[n, k, config] = _schedule(n, k, m, config, resident(config), device)
    return list(found.values())


def _schedule(n: int, k: int, m: int, config: Config, resident: int, device) -> Schedule:
    tiles = -(-n // config.block_n) * -(-m // config.block_m)
    programs = tiles * config.splits
    busy = min(programs, device.sm_count)
    per_sm = max(1, min(resident, programs // device.sm_count))
    k_blocks = k // heuristic.GROUP // config.splits  # of the shortest range
    in_flight = bytes_in_flight(config, per_sm, k_blocks)
    share = n * k // device.sm_count
    enough = min(IN_FLIGHT, share)
    texts = []
    if busy < device.sm_count:
        texts.append(f"{programs} programs leave {device.sm_count - busy} SMs idle")
    if in_flight < enough:
        texts.append(f"{in_flight} bytes in flight on an SM < {enough}")
    return Schedule(n, k, m, config, programs, busy, per_sm, in_flight, share, texts)
