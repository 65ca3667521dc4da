"""Compile every kernel variant for a target GPU, without one, and judge what the compiler made.

The numbers come from Triton's own tools: registers, stack and shared memory from `cuobjdump`,
instructions from `nvdisasm`. Where this Triton's disassembler cannot read the target, instructions
are counted in PTX instead and the record says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import triton

from sglang_kt_sm120 import heuristic
from sglang_kt_sm120.aot import gates, reading, tile_model
from sglang_kt_sm120.aot.compiling import DTYPES, assembler_knows, compile_config, features
from sglang_kt_sm120.aot.gates import SHARED_LIMIT, SM12X, bytes_in_flight
from sglang_kt_sm120.aot.reading import disassemble
from sglang_kt_sm120.heuristic import Config

__all__ = [
    "ARCHES", "DTYPES", "SHARED_LIMIT", "SM12X", "assembler_knows", "bytes_in_flight",
    "compile_config", "disassemble", "facts", "features", "judge_schedules", "measure", "name_of",
    "quick_look", "report",
]  # fmt: skip

ARCHES = ("sm_120a", "sm_121a")


def name_of(config: Config | None) -> str:
    """A short name: kernel and tile, for tables."""
    if config is None:
        return "quantise"
    parts = [f"{config.kernel} {config.block_m}x{config.block_n}", f"{config.num_warps}w"]
    if config.kernel == "direct":
        parts.append(f"u{config.unroll}")
    else:
        parts.append(f"s{config.num_stages}")
    if config.kernel == "pipelined" and config.swap:
        parts.append("swapped")
    for flag in ("fused", "prefetch", "unit_scaled", "split_order"):
        if getattr(config, flag):
            parts.append(flag.replace("_", "-"))
    return " ".join(parts)


def _mma(counts: Counter) -> dict[str, int]:
    scaled = reading.count(counts, "QMMA.SF")
    found = {
        "QMMA.SF": scaled,
        "QMMA": reading.count(counts, "QMMA") - scaled,
        "HMMA": reading.count(counts, "HMMA"),
    }
    return {name: n for name, n in found.items() if n}


def measure(config: Config | None, arch: str, *, dtype: str = "bf16", pdl: bool = True) -> dict:
    """Compile one variant and describe it: the record that `report` lists.

    Keys: name, config, arch, dtype (of activations and output), triton, registers, spills (stack
    bytes), shared_bytes, mma ({instruction: count}), f2fp, shuffles, local (LDL and STL), source
    ("sass" or "ptx"), mma_per_k_block (of the main loop, per warp; None where it has none),
    programs_per_sm (CTAs that an SM12x SM holds), bytes_in_flight (of all of them; decode only),
    model (see tile_model), failures (texts of failed gates).
    """
    compiled = compile_config(config, arch, dtype=dtype, pdl=pdl)
    sass = disassemble(compiled.asm["cubin"])
    counts, source = reading.instructions(sass, compiled.asm["ptx"])
    registers, stack = reading.resources(compiled.asm["cubin"])
    loop = tile_model.main_loop(sass) if sass else []
    record = {
        "name": name_of(config),
        "config": asdict(config) if config else {},
        "arch": arch,
        "dtype": dtype,
        "triton": triton.__version__,
        "registers": registers,
        "spills": stack,
        "shared_bytes": compiled.metadata.shared,
        "mma": _mma(counts),
        "f2fp": reading.count(counts, "F2FP"),
        "shuffles": reading.count(counts, "SHFL"),
        "local": reading.count(counts, "LDL") + reading.count(counts, "STL"),
        "source": source,
        "model": tile_model.model(sass, config.num_warps) if config and sass else {},
    }
    if config is not None and record["model"]:
        k_blocks = config.unroll if config.kernel == "direct" else 1
        record["mma_per_k_block"] = record["model"]["mma"] / k_blocks
    if config is not None and registers is not None:
        need = heuristic.Resources(registers, compiled.metadata.shared)
        record["programs_per_sm"] = heuristic.resident(need, config.num_warps, SM12X)
        if config.kernel != "tiled":
            record["bytes_in_flight"] = bytes_in_flight(config, record["programs_per_sm"])
    in_loop = Counter(name for name, _ in loop) if loop else None
    record["failures"] = gates.failures(config, record, counts, in_loop, features(arch).fp8)
    return record


def quick_look(compiled) -> dict:
    """Registers, spills (stack bytes), shared_bytes and mma ({kind: count}, from PTX) of a kernel.

    Args:
        compiled: What `triton.compile`, or a launch with `warmup=True`, returns.
    """
    registers, stack = reading.resources(compiled.asm["cubin"])
    counts, _ = reading.instructions(None, compiled.asm["ptx"])
    shared = compiled.metadata.shared
    return {"registers": registers, "spills": stack, "shared_bytes": shared, "mma": _mma(counts)}


def facts(arch: str) -> list[str]:
    """What this Triton lacks for `arch`, in sentences: facts about it, not about our kernels."""
    version = f"Triton {triton.__version__}"
    if not assembler_knows(arch):
        return [f"{arch}: the ptxas of {version} does not know it"]
    can, found = features(arch), []
    if not can.fp8:
        found.append(f"{arch}: {version} multiplies FP8 as f16 (HMMA)")
    if not can.block_scale:
        found.append(f"{arch}: {version} has no block-scaled FP8; prefill takes the plain one")
    if can.tokens > 8:
        found.append(f"{arch}: {version} refuses 8-token tiles; decode takes 16")
    return found


def report(
    configs: Iterable[Config], arch: str, dtypes: Iterable[str] = tuple(DTYPES), jobs: int = 2
) -> Iterator[dict]:
    """Compile the quantisation kernel and every distinct variant of `configs` for `arch`.

    Yields a record (see `measure`) per variant and dtype of the activation, in order, as they are
    made by `jobs` threads. A variant that does not compile gives one with an `error` and that as
    its failure. Nothing where this Triton's ptxas does not know `arch` (see `facts`).
    """
    if not assembler_knows(arch):
        return
    features(arch)  # once, before threads ask
    variants: list[Config | None] = [None, *dict.fromkeys(config.variant() for config in configs)]
    todo = [(variant, arch, dtype) for dtype in dtypes for variant in variants]
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda item: _attempt(*item), todo)


def _attempt(variant: Config | None, arch: str, dtype: str) -> dict:
    try:
        return measure(variant, arch, dtype=dtype)
    except Exception as failure:  # a compiler error is a finding, not the end of the report
        text = f"{type(failure).__name__}: {failure}"[:500]
        return {
            "name": name_of(variant),
            "config": asdict(variant) if variant else {},
            "arch": arch,
            "dtype": dtype,
            "triton": triton.__version__,
            "error": text,
            "failures": [f"does not compile: {text}"],
        }


def judge_schedules(
    layers: Iterable[tuple[int, int]], device, records: Iterable[dict], **flags
) -> list[gates.Schedule]:
    """Judge how decode is spread over `device` (see `gates.schedules`), with compiled registers.

    Args:
        layers: (n, k) of weights. device: capability, sm_count, shared_bytes.
        records: from `report` for one architecture; every variant met must be among them.
        flags: prequantised, deterministic (see `heuristic.Case`).
    """
    programs: dict[Config, int] = {}
    for record in records:
        if record["config"] and record.get("programs_per_sm"):
            variant = Config(**record["config"])
            programs[variant] = min(record["programs_per_sm"], programs.get(variant, 1 << 10))

    def choose(m: int, n: int, k: int) -> Config:
        return heuristic.config_for(heuristic.Case(m, n, k, **flags), device)

    return gates.schedules(layers, choose, lambda c: programs.get(c.variant(), 1), device)
