"""Compile every kernel variant for a target GPU, without one, and judge what the compiler made.

The numbers come from Triton's own tools: registers, stack and shared memory from `cuobjdump`,
instructions from `nvdisasm`. Where this Triton's disassembler cannot read the target, instructions
are counted in PTX instead and the record says so.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_kt_sm120 import heuristic
from sglang_kt_sm120.aot import tile_model
from sglang_kt_sm120.heuristic import Config

ARCHES = ("sm_120a", "sm_121a")
SHARED_LIMIT = 101376  # bytes a block may use on SM12x
IN_FLIGHT = 32 * 1024  # bytes per SM that decode should have outstanding
NON_TENSOR_SHARE = 0.5  # issue slots besides mma over tensor cycles, prefill
SM12X = SimpleNamespace(capability=(12, 0), sm_count=188, shared_bytes=SHARED_LIMIT)

_POINTERS = {
    "w": "*fp8e4nv",
    "codes": "*fp8e4nv",
    "counters": "*i32",
    "x_scale": "*fp32",
    "w_scale": "*fp32",
    "scratch": "*fp32",
    "scales": "*fp32",
}
_ALIGNED = ("N", "stride_xm")  # integers that are multiples of 16 in every model


def _kernel(name: str):
    """The jitted function and its module's constants, by kernel name."""
    module = importlib.import_module(f"sglang_kt_sm120.kernels.{name}")
    return getattr(module, f"_{'quantise' if name == 'quant' else name}_kernel")


def _constants(config: Config) -> dict[str, object]:
    """constexpr arguments of the launch that `config` stands for, as the launchers pass them."""
    if config.kernel == "direct":
        return {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "UNROLL": config.unroll,
            "WARPS": config.num_warps,
            "CHUNK": config.chunk,
            "GDC": True,
        }
    if config.kernel == "pipelined":
        return {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "FUSED": config.fused,
            "SWAP": config.swap,
            "PREFETCH": config.prefetch,
            "CHUNK": config.chunk,
            "GDC": True,
        }
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "GROUP_M": config.group_m,
        "UNIT_SCALED": config.unit_scaled,
        "SPLIT_ORDER": config.split_order > 0,
        "GDC": True,
    }


def compile_config(config: Config | None, arch: str, *, dtype: str = "bf16", pdl: bool = True):
    """Compile one variant for an architecture. Needs no GPU.

    Args:
        config: the variant, or None for the quantisation kernel.
        arch: "sm_120a", "sm_121a" or "sm_90a". On 121 and 90 the kernel is lowered as for 120,
            which is how the plugin launches it there.
        dtype: of activations and output, "bf16" or "fp16".
        pdl: as launched with dependent launch.

    Returns:
        Triton's compiled kernel (`asm`, `metadata`).

    Raises:
        Whatever Triton or its ptxas raises where it cannot compile for `arch`.
    """
    capability = int(re.sub(r"\D", "", arch))
    options: dict[str, object] = {"launch_pdl": pdl}
    if capability != 120:
        options["arch"] = "sm120"
    if config is None:
        kernel, fused = _kernel("quant"), True
        constants: dict[str, object] = {"GROUPS": 16, "GDC": True}
        options["num_warps"] = 4
    else:
        kernel, fused = _kernel(config.kernel), config.fused
        constants = _constants(config)
        options["num_warps"] = config.num_warps
        options["num_stages"] = config.num_stages
        if config.registers:
            options["maxnreg"] = config.registers
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(index,)] = constants[name]
            continue
        kind = _POINTERS.get(name, "i32")
        if name == "x":
            kind = f"*{dtype}" if fused else "*fp8e4nv"
        elif name == "out":
            kind = f"*{dtype}"
        signature[name] = kind
        if kind.startswith("*") or name in _ALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def assembler_knows(arch: str) -> bool:
    """Whether the ptxas that this Triton uses can assemble for `arch` (3.5.1's: not sm_121a)."""
    from triton.backends.nvidia import compiler

    try:
        ptxas = compiler.get_ptxas(int(re.sub(r"\D", "", arch)))
    except TypeError:  # before 3.6 there is one for all
        ptxas = compiler.get_ptxas()
    path = getattr(ptxas, "path", ptxas)
    path = path[0] if isinstance(path, tuple) else path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(".version 8.0\n.target sm_80\n.address_size 64\n")
        file.flush()
        command = [path, f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        result = subprocess.run(command, capture_output=True, text=True)
    return "is not defined for option" not in result.stderr


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


def disassemble(cubin: bytes) -> str | None:
    """SASS as text, or None where this Triton's nvdisasm cannot read the target."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            command = [_tool("nvdisasm"), "-c", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None


def _instructions(sass: str | None, ptx: str) -> tuple[Counter, str]:
    """Instruction counts and where they were read: "sass", or "ptx" where nvdisasm fails."""
    if sass is not None:
        pattern = r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)"
        found = re.findall(pattern, sass, re.M)
        if found:
            return Counter(found), "sass"
    counts: Counter = Counter()
    for line in ptx.splitlines():
        text = line.strip()
        if text.startswith("mma.sync"):
            kind = "QMMA.SF" if "block_scale" in text else "QMMA" if "e4m3" in text else "HMMA"
            counts[kind] += 1
        elif text.startswith("ld.local"):
            counts["LDL"] += 1
        elif text.startswith("st.local"):
            counts["STL"] += 1
    return counts, "ptx"


def _resources(cubin: bytes, metadata) -> tuple[int | None, int | None]:
    """(registers per thread, stack bytes per thread), or None where cuobjdump fails."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            command = [_tool("cuobjdump"), "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None, None
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    return (int(registers[1]) if registers else None, int(stack[1]) if stack else None)


def _count(counts: Counter, prefix: str) -> int:
    return sum(n for name, n in counts.items() if name == prefix or name.startswith(prefix + "."))


def name_of(config: Config | None) -> str:
    """A short name: kernel and tile, for tables."""
    if config is None:
        return "quantise"
    parts = [f"{config.kernel} {config.block_m}x{config.block_n}", f"{config.num_warps}w"]
    if config.kernel == "direct":
        parts.append(f"u{config.unroll}")
    else:
        parts.append(f"s{config.num_stages}")
    for flag in ("fused", "unit_scaled", "split_order"):
        if getattr(config, flag):
            parts.append(flag.replace("_", "-"))
    return " ".join(parts)


def bytes_in_flight(config: Config, programs: int) -> int:
    """Weight bytes that `programs` resident programs of a decode variant keep requested."""
    depth = config.unroll if config.kernel == "direct" else config.num_stages - 1
    return programs * depth * config.block_n * 128


def measure(config: Config | None, arch: str, **options) -> dict:
    """Compile one variant and describe it: the record that `report` lists.

    Keys: name, config, arch, triton, registers, spills (stack bytes), shared_bytes, mma
    ({instruction: count}), f2fp, shuffles, local (LDL and STL), source ("sass" or "ptx"),
    programs_per_sm, bytes_in_flight (per SM, decode only), model (see tile_model), failures
    (texts of failed gates).
    """
    compiled = compile_config(config, arch, **options)
    sass = disassemble(compiled.asm["cubin"])
    counts, source = _instructions(sass, compiled.asm["ptx"])
    registers, stack = _resources(compiled.asm["cubin"], compiled.metadata)
    scaled = _count(counts, "QMMA.SF")
    mma = {"QMMA.SF": scaled, "QMMA": _count(counts, "QMMA") - scaled}
    mma["HMMA"] = _count(counts, "HMMA")
    record = {
        "name": name_of(config),
        "config": asdict(config) if config else {},
        "arch": arch,
        "triton": triton.__version__,
        "registers": registers,
        "spills": stack,
        "shared_bytes": compiled.metadata.shared,
        "mma": {name: n for name, n in mma.items() if n},
        "f2fp": _count(counts, "F2FP"),
        "shuffles": _count(counts, "SHFL"),
        "local": _count(counts, "LDL") + _count(counts, "STL"),
        "source": source,
    }
    if config is not None and registers is not None:
        need = heuristic.Resources(registers, compiled.metadata.shared)
        programs = heuristic.resident(need, config.num_warps, SM12X)
        record["programs_per_sm"] = programs
        if config.kernel != "tiled":
            record["bytes_in_flight"] = bytes_in_flight(config, programs)
        record["model"] = tile_model.model(sass, config.num_warps) if sass else {}
    record["failures"] = _failures(config, record)
    return record


def quick_look(compiled) -> dict:
    """Registers, spills (stack bytes), shared_bytes and mma ({kind: count}, from PTX) of a kernel.

    Args:
        compiled: What `triton.compile`, or a launch with `warmup=True`, returns.
    """
    registers, stack = _resources(compiled.asm["cubin"], compiled.metadata)
    counts, _ = _instructions(None, compiled.asm["ptx"])
    mma = {kind: counts[kind] for kind in ("QMMA", "QMMA.SF", "HMMA") if counts[kind]}
    shared = compiled.metadata.shared
    return {"registers": registers, "spills": stack, "shared_bytes": shared, "mma": mma}


def lowers_block_scale(arch: str) -> bool:
    """True where this Triton lowers unit-scale `tl.dot_scaled` to a block-scaled FP8 mma."""
    compiled = compile_config(replace(heuristic.LARGE, unit_scaled=True), arch)
    return "block_scale" in compiled.asm["ptx"]


def _failures(config: Config | None, record: dict) -> list[str]:
    """Gates that a record fails, as texts."""
    failures = []
    if record["spills"] or record["local"]:
        failures.append(f"spills: {record['spills']} stack bytes, {record['local']} LDL/STL")
    if record["shared_bytes"] > SHARED_LIMIT:
        failures.append(f"shared memory {record['shared_bytes']} > {SHARED_LIMIT}")
    if config is None:
        return failures
    mma = record["mma"]
    if not mma.get("QMMA") and not mma.get("QMMA.SF"):
        failures.append("no native FP8 mma")
    if mma.get("HMMA"):
        failures.append(f"{mma['HMMA']} HMMA: FP8 is emulated in f16")
    if config.unit_scaled and not mma.get("QMMA.SF"):
        failures.append("dot_scaled is not lowered to a block-scaled mma")
    share = record.get("model", {}).get("non_tensor_share", 0.0)
    if config.kernel == "tiled" and share > NON_TENSOR_SHARE:
        failures.append(f"issue slots that are not mma: {share} of the tensor cycles")
    if record.get("bytes_in_flight", IN_FLIGHT) < IN_FLIGHT:
        failures.append(f"{record['bytes_in_flight']} bytes in flight per SM < {IN_FLIGHT}")
    return failures


def report(configs: Iterable[Config], arch: str, **options) -> list[dict]:
    """Compile the quantisation kernel and every distinct variant of `configs` for `arch`.

    A variant that does not compile gives a record with an `error` and that as its failure. Where
    this Triton's ptxas does not know `arch`, that is a fact and no failure: one record says so
    under `unsupported`.
    """
    if not assembler_knows(arch):
        fact = f"the ptxas of Triton {triton.__version__} does not know {arch}"
        return [{"name": "", "config": {}, "arch": arch, "unsupported": fact, "failures": []}]
    records = []
    variants: list[Config | None] = [None, *dict.fromkeys(config.variant() for config in configs)]
    for variant in variants:
        try:
            records.append(measure(variant, arch, **options))
        except Exception as failure:  # a compiler error is a finding, not the end of the report
            text = f"{type(failure).__name__}: {failure}"[:500]
            records.append(
                {
                    "name": name_of(variant),
                    "config": asdict(variant) if variant else {},
                    "arch": arch,
                    "triton": triton.__version__,
                    "error": text,
                    "failures": [f"does not compile: {text}"],
                }
            )
    return records
