"""Which kernel and which schedule for a problem on a device: tables and one formula.

Standard library only. A `problem` has m, n, k, prequantised and deterministic; a `device` has
capability, sm_count and shared_bytes (per block, opt-in), and may have mma and tokens (see
`select.Device`). Both are duck-typed.

The tables say which kernel variant serves which rows; where each line comes from is in
docs/kernels.md. The formula is *one exact wave*: a decode layer is split along K into as many
programs as the device holds at once, no more (one program too many costs a whole second wave) and
in equal parts. How many it holds follows from the registers and shared memory recorded here,
which `aot` re-measures and a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GROUP = 128  # columns of K per activation scale; rows and columns per weight scale
MAX_SPLITS = 24  # partial sums that a reduction may have to read
DECODE_ROWS = 64  # largest M that the decode kernels serve


@dataclass(frozen=True)
class Config:
    """One launch: a kernel, its compiled variant and its run-time schedule.

    `splits` and the value of `split_order` above 1 are run-time arguments; everything else
    selects a compiled variant.
    """

    kernel: str  # "direct", "pipelined" or "tiled"
    block_m: int  # tokens per program
    block_n: int  # weight rows per program
    num_warps: int
    num_stages: int = 1
    fused: bool = False  # quantises the activation itself (direct always does)
    unroll: int = 1  # direct: K blocks requested at once
    registers: int = 0  # direct: registers per thread at most, 0 for no limit
    swap: bool = True  # pipelined: weights on the 16-wide side of the product
    prefetch: int = 0  # pipelined: K blocks of the weight asked of L2 before the wait
    chunk: int = 8  # partial sums read at once in the reduction
    group_m: int = 8  # tiled: row tiles that walk along N together
    unit_scaled: bool = False  # tiled: block-scaled instruction with unit scales
    split_order: int = 0  # tiled: sum K in this many ranges, as split-K would
    splits: int = 1  # programs per output tile

    def variant(self) -> Config:
        """This config without its run-time part: equal variants share one compilation."""
        return replace(self, splits=1, split_order=min(self.split_order, 1))


@dataclass(frozen=True)
class Resources:
    """What a compiled variant needs: registers per thread, shared bytes per program."""

    registers: int
    shared_bytes: int


# Decode variants. Names are for this file and the documents only.
WIDE8 = Config("direct", 8, 128, num_warps=8, fused=True, chunk=16)
NARROW8 = Config("direct", 8, 128, num_warps=8, unroll=4, registers=128, fused=True, chunk=16)
SHORT8 = Config("direct", 8, 64, num_warps=4, unroll=2, registers=128, fused=True, chunk=16)
NARROW16 = Config("direct", 16, 64, num_warps=4, unroll=2, registers=128, fused=True)
FUSED16 = Config("pipelined", 16, 128, num_warps=4, num_stages=3, fused=True, chunk=4)
ROWS16 = Config("pipelined", 16, 64, num_warps=4, num_stages=3, swap=False, prefetch=1, chunk=4)
ROWS32 = Config("pipelined", 32, 64, num_warps=4, num_stages=3, prefetch=1, chunk=4)
ROWS64 = Config("pipelined", 64, 64, num_warps=4, num_stages=3, swap=False, prefetch=1, chunk=4)

# Prefill variants, largest tile first.
LARGE = Config("tiled", 128, 128, num_warps=8, num_stages=3)
MEDIUM = Config("tiled", 64, 128, num_warps=4, num_stages=3)

# One order of K for every M. The tokens are the 16-wide side everywhere, as in prefill.
FIXED16 = Config("pipelined", 16, 64, num_warps=4, num_stages=3, fused=True, swap=False, chunk=4)
FIXED32 = replace(FIXED16, block_m=32, fused=False, prefetch=1)
FIXED64 = replace(FIXED16, block_m=64, fused=False, prefetch=1)
FIXED_LARGE = Config("tiled", 64, 128, num_warps=8, num_stages=3, split_order=1)
FIXED_PROGRAMS = 512  # programs aimed at, whatever the device: two on each SM of the largest card

# From ahead-of-time compilation for sm_120a (Triton 3.6.0 and its ptxas), bf16, dependent launch.
RESOURCES = {
    WIDE8: Resources(61, 4096),
    NARROW8: Resources(128, 4096),
    SHORT8: Resources(101, 2048),
    NARROW16: Resources(126, 4096),
    FUSED16: Resources(126, 43008),
    ROWS16: Resources(64, 20480),
    ROWS32: Resources(96, 24576),
    ROWS64: Resources(166, 32768),
}


def resident(need: Resources, num_warps: int, device) -> int:
    """Programs that one SM holds at once, from registers, shared memory and the SM's limits."""
    warps, blocks = (48, 24) if device.capability[0] == 12 else (64, 32)
    # Each of an SM's four parts has a quarter of its registers and allocates them per warp.
    per_warp = -(-need.registers // 8) * 8 * 32
    warps = min(4 * (16384 // per_warp), warps)
    # A block takes 1 KiB of shared memory for the system, and an SM has 1 KiB more than a block
    # can opt in to.
    shared = (device.shared_bytes + 1024) // (need.shared_bytes + 1024)
    return min(warps // num_warps, shared, blocks)


def programs_per_sm(variant: Config, device) -> int:
    """Programs of a decode variant that one SM holds."""
    return resident(RESOURCES[variant], variant.num_warps, device)


def equal_splits(steps: int, at_most: int) -> int:
    """The fewest splits whose longest part is as short as `at_most` splits could make it."""
    at_most = max(1, min(at_most, steps, MAX_SPLITS))
    return -(-steps // -(-steps // at_most))


def one_wave(variant: Config, n: int, k: int, programs: int) -> tuple[Config, float]:
    """`variant` with as many splits as fit `programs`. Returns (config, its programs / `programs`).

    More than 1 where there are more tiles than `programs`.
    """
    tiles, programs = -(-n // variant.block_n), max(programs, 1)
    steps = -(-k // (GROUP * variant.unroll))
    splits = equal_splits(steps, programs // tiles)
    return replace(variant, splits=splits), tiles * splits / programs


def config_for(problem, device) -> Config:
    """The kernel and schedule for a problem.

    Args:
        problem: m >= 1, n, k (a multiple of 128), prequantised (the activation arrives as e4m3
            with scales), deterministic (the same order of K for every M).
        device: capability, sm_count, shared_bytes.
    """
    if problem.deterministic:
        return _fixed_order(problem)
    if problem.m > DECODE_ROWS:
        return _prefill(problem, device)
    for rows, choose in _DECODE:
        if problem.m <= rows:
            return choose(problem, device)
    raise AssertionError("unreachable")


def _split(variant: Config, problem, device, per_sm: float = 64) -> Config:
    """`variant` split over `per_sm` programs an SM, or over all it holds if that is fewer."""
    return _filled(variant, problem, device, per_sm)[0]


def _filled(variant: Config, problem, device, per_sm: float = 64) -> tuple[Config, float]:
    """`_split`, and the share of those programs that it uses."""
    programs = device.sm_count * min(per_sm, programs_per_sm(variant, device))
    return one_wave(variant, problem.n, problem.k, int(programs))


def _up_to_8(problem, device) -> Config:
    """Four K blocks at once for small layers; one, in more programs, for large ones."""
    if getattr(device, "tokens", 8) > 8 or problem.prequantised:  # no 8-token tiles for it
        return _up_to_16(problem, device)
    weight = problem.n * problem.k
    if weight > 50_000_000:
        return _even_waves(WIDE8, problem, device)
    wide, filled = _filled(WIDE8, problem, device)
    full = 0.8 <= filled <= 1.0
    if full and weight > 25_000_000:
        return wide
    narrow, short = (_split(variant, problem, device) for variant in (NARROW8, SHORT8))
    steps = -(-problem.k // GROUP)
    longest = NARROW8.unroll * -(-steps // (NARROW8.unroll * narrow.splits))
    if longest * narrow.splits > 1.2 * steps:  # steps of four leave some programs with less to do
        return wide if full else short
    if narrow.splits > 1:
        return short if short.splits >= 2 * narrow.splits else narrow
    # One step is the whole of K: two in smaller programs overlap, if there are enough of them.
    programs = device.sm_count * programs_per_sm(SHORT8, device)
    enough = -(-problem.n // SHORT8.block_n) >= 0.8 * programs
    return short if short.splits == 1 and steps == NARROW8.unroll and enough else narrow


def _even_waves(variant: Config, problem, device) -> Config:
    """One wave; where equal parts leave much of it empty, the fewest (up to 4) that end evenly."""
    wave = device.sm_count * programs_per_sm(variant, device)
    made = [one_wave(variant, problem.n, problem.k, waves * wave) for waves in (1, 2, 3, 4)]
    for (config, filled), enough in zip(made, (0.8, 0.9, 0.9, 0.9), strict=True):
        if enough <= filled <= 1.0:
            return config
    return made[-1][0]


def _up_to_16(problem, device) -> Config:
    """Fused where a quantisation kernel would cost more than quantising in every program."""
    weight = problem.n * problem.k
    if problem.prequantised or weight > 35_000_000:
        return _split(ROWS16, problem, device, 4)
    if weight > 20_000_000:
        return _split(FUSED16, problem, device, 2)
    return _split(NARROW16, problem, device, 4)


def _up_to_32(problem, device) -> Config:
    return _split(ROWS32, problem, device, 3)


def _up_to_64(problem, device) -> Config:
    config = _split(ROWS64, problem, device, 3 if problem.n * problem.k > 60_000_000 else 2)
    if device.capability[0] != 12:
        return config
    # Two of them request 32 KiB. Where equal parts leave some SMs with one, cut one finer.
    wanted = -(-2 * device.sm_count // -(-problem.n // ROWS64.block_n))
    if config.splits >= wanted or programs_per_sm(ROWS64, device) < 3:
        return config
    return replace(config, splits=equal_splits(problem.k // GROUP, wanted))


_DECODE = ((8, _up_to_8), (16, _up_to_16), (32, _up_to_32), (DECODE_ROWS, _up_to_64))


def _prefill(problem, device) -> Config:
    """The largest tile that still gives most SMs one; below that, 64-row tiles and split-K."""
    unit_scaled = getattr(device, "mma", "plain") == "block_scale"
    for variant in (LARGE, MEDIUM):
        tiles = -(-problem.m // variant.block_m) * -(-problem.n // variant.block_n)
        if tiles >= 0.75 * device.sm_count:
            return replace(variant, unit_scaled=unit_scaled)
    programs = 2 * device.sm_count // -(-problem.m // ROWS64.block_m)
    return one_wave(ROWS64, problem.n, problem.k, max(programs, 1))[0]


def fixed_splits(n: int, k: int) -> int:
    """Splits under deterministic inference: a function of the weight's shape alone."""
    return equal_splits(k // GROUP, FIXED_PROGRAMS // -(-n // FIXED16.block_n))


def _fixed_order(problem) -> Config:
    splits = fixed_splits(problem.n, problem.k)
    for variant in (FIXED16, FIXED32, FIXED64):
        if problem.m <= variant.block_m:
            fused = variant.fused and not problem.prequantised
            prefetch = variant.prefetch if fused else 1
            return replace(variant, splits=splits, fused=fused, prefetch=prefetch)
    return replace(FIXED_LARGE, split_order=splits)


def counters_needed(n: int, k: int) -> int:
    """Most output tiles that any config with M <= 64 has: how many counters a layer needs."""
    narrowest = min(variant.block_n for variant in (*RESOURCES, FIXED16, FIXED32, FIXED64))
    return -(-n // narrowest)


@dataclass(frozen=True)
class Case:
    """A problem, for callers that have no `select.Problem`."""

    m: int
    n: int
    k: int
    prequantised: bool = False
    deterministic: bool = False
