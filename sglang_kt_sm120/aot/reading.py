"""Read what a compiler made: instructions, registers and stack, with Triton's own tools."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton

#: PTX beginnings that stand for an instruction, where SASS cannot be read.
_PTX = {
    "ld.local": "LDL",
    "st.local": "STL",
    "cvt.rn.f16x2.e4m3x2": "F2FP.F16.E4M3.UNPACK_B",
    "cvt.rn.satfinite.e4m3x2.f32": "F2FP.SATFINITE.E4M3.F32.PACK_AB",
}


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


def _run_on(cubin: bytes, *command: str) -> str | None:
    """The output of one of Triton's tools on a cubin, or None where it fails."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            run = [_tool(command[0]), *command[1:], file.name]
            return subprocess.run(run, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None


def disassemble(cubin: bytes) -> str | None:
    """SASS as text, or None where this Triton's nvdisasm cannot read the target."""
    return _run_on(cubin, "nvdisasm", "-c")


def instructions(sass: str | None, ptx: str) -> tuple[Counter, str]:
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
        for beginning, name in _PTX.items():
            counts[name] += text.startswith(beginning)
    return +counts, "ptx"


def count(counts: Counter, prefix: str) -> int:
    """How many instructions are `prefix` or a variant of it (HMMA, HMMA.16816.F32)."""
    return sum(n for name, n in counts.items() if name == prefix or name.startswith(prefix + "."))


def resources(cubin: bytes) -> tuple[int | None, int | None]:
    """(registers per thread, stack bytes per thread), or None where cuobjdump fails."""
    text = _run_on(cubin, "cuobjdump", "-res-usage") or ""
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    return (int(registers[1]) if registers else None, int(stack[1]) if stack else None)
