"""What one trip through a kernel's main loop costs an SM12x, resource by resource. A model.

Counts come from the disassembled loop; rates are the architecture's as published or measured by
others (sources in docs/kernels.md). It says which resource a variant would hit first, not how
fast a card is.
"""

from __future__ import annotations

import re
from collections import Counter

MMA_CYCLES = (
    16  # per m16n8k32 FP8 and sub-partition at full rate; GeForce runs the plain one at half
)
SHARED_BYTES_PER_CYCLE = 128  # per SM
# Per SM: a 128 x 128 FP8 kernel read 12.9 bytes a cycle at 66 % of L2's throughput.
L2_BYTES_PER_CYCLE = 19

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
_LABEL = re.compile(r"^(\.L_x_\d+):")


def main_loop(sass: str) -> list[tuple[str, str]]:
    """Instructions (name, operands) of the loop with the most mma, or [] where there is none."""
    lines: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for raw in sass.splitlines():
        text = raw.strip()
        label = _LABEL.match(text)
        if label:
            labels[label[1]] = len(lines)
            continue
        match = _LINE.search(text)
        if match:
            lines.append((match[2], match[3]))
    best: list[tuple[str, str]] = []
    most = (0, 0)
    for index, (name, operands) in enumerate(lines):
        target = re.search(r"\((\.L_x_\d+)\)", operands) if name.startswith("BRA") else None
        if target and labels.get(target[1], index + 1) <= index:
            body = lines[labels[target[1]] : index + 1]
            count = sum(name.startswith(("QMMA", "HMMA")) for name, _ in body)
            if count and (count, -len(body)) > most:
                best, most = body, (count, -len(body))
    return best


def _width(name: str) -> int:
    """Bytes per lane of a memory instruction."""
    for suffix, width in ((".128", 16), (".64", 8), (".U16", 2), (".U8", 1)):
        if suffix in name:
            return width
    return 4


def model(sass: str, num_warps: int) -> dict:
    """Cycles that one trip of the main loop needs of each resource of an SM, for one program.

    Returns {} where the kernel has no loop with an mma, else: mma and instructions per warp,
    cycles {"tensor", "tensor_geforce", "issue", "shared", "l2"}, limit (the largest, at full tensor
    rate) and non_tensor_share (issue slots that are not mma, over tensor cycles).
    """
    loop = main_loop(sass)
    if not loop:
        return {}
    counts = Counter(name.split(".")[0] for name, _ in loop)
    warps = max(1.0, num_warps / 4)  # per sub-partition
    scaled = any(name.startswith("QMMA.SF") for name, _ in loop)
    mma = counts["QMMA"] + counts["HMMA"]
    shared = l2 = 0
    for name, _ in loop:
        kind = name.split(".")[0]
        lanes = 32 * num_warps
        if kind == "LDSM":
            shared += 16 * lanes
        elif kind in ("LDS", "STS"):
            shared += _width(name) * lanes
        elif kind == "LDGSTS":
            shared += 16 * lanes
            l2 += 16 * lanes
        elif kind == "LDG" and _width(name) == 16:  # narrower ones are scales, the same for many
            l2 += 16 * lanes
    tensor = mma * MMA_CYCLES * warps
    cycles = {
        "tensor": tensor,
        "issue": len(loop) * warps,
        "shared": shared / SHARED_BYTES_PER_CYCLE,
        "l2": l2 / L2_BYTES_PER_CYCLE,
    }
    limit = max(cycles, key=lambda name: cycles[name])
    cycles["tensor_geforce"] = tensor * (1 if scaled else 2)
    return {
        "mma": mma,
        "instructions": len(loop),
        "cycles": {name: round(value) for name, value in cycles.items()},
        "limit": limit,
        "non_tensor_share": round((len(loop) - mma) * warps / tensor, 2),
    }
