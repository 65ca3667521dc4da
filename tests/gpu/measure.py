"""The project's benchmark on a machine without sglang: ours against its stock Triton kernels.

    python tests/gpu/measure.py OUT.json [--rows 1,2,4,8,16,32,64] [--sets deepseek-r1,qwen3.6-27b]

Writes records and environment as JSON and prints one line a case. Off SM12x ours run with Triton's
arch="sm120"; from 32 rows on also natively, because Hopper emulates the SM120 lowering's FP8 there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import stock  # noqa: E402

from sglang_kt_sm120 import bench, shapes  # noqa: E402

EMULATED_FROM = 32  # rows from which Hopper's emulation of FP8 mma bounds the SM120 lowering


def this_device():
    properties = torch.cuda.get_device_properties(0)
    return SimpleNamespace(
        capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", 101376),
    )


def plain(case):
    """A small kernel that does not trigger its dependents, alone in a chain."""
    small = torch.ones(1024, device=case.x.device)
    return lambda index: small.mul_(1.0)


def behind_plain(candidate):
    """`candidate` with such a kernel before every call: what a layer behind a foreign one sees."""

    def prepare(case):
        first, second = plain(case), candidate.prepare(case)

        def call(index):
            first(index)
            return second(index)

        return call

    return bench.Candidate("ours behind plain", prepare)


def candidates(rows):
    device = this_device()
    arch = None if device.capability[0] == 12 else "sm120"
    ours = bench.ours(device, arch=arch)
    listed = [ours, bench.ours(device, arch=arch, pdl=False, name="ours without pdl")]
    module = stock.load()
    if module:
        listed.append(bench.stock(stock.Stock(module)))
        listed.append(bench.stock(stock.Stock(module, tuned=True), "stock, tuned for H200"))
    listed.append(bench.streaming_read(16 * device.sm_count))
    if rows <= 16:
        listed.append(behind_plain(ours))
        listed.append(bench.Candidate("plain", plain, tolerance=float("inf")))
    if arch and rows >= EMULATED_FROM:
        listed.append(bench.ours(device, name="ours, native lowering"))
    return listed


def line(records):
    """One case as text: the times and the ratio to stock."""
    us = {record.candidate: record.us for record in records}
    first = records[0]
    times = "  ".join(f"{name} {value:.2f}" for name, value in us.items() if value)
    notes = "  ".join(f"{r.candidate}: {r.note}" for r in records if r.note)
    return f"{first.n}x{first.k} M={first.m}  floor {first.bytes / 4130e3:.2f}  {times}  {notes}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--sets", default="deepseek-r1,qwen3.6-27b")
    parser.add_argument("--rounds", type=int, default=bench.ROUNDS)
    options = parser.parse_args()
    wanted = {}
    for name in options.sets.split(","):
        for layer in shapes.SHAPE_SETS[name]:
            wanted.setdefault((layer.n, layer.k), SimpleNamespace(name=name, n=layer.n, k=layer.k))
    rows = [int(value) for value in options.rows.split(",")]
    records = []
    device = torch.device("cuda", 0)
    for case in bench.make_cases(wanted.values(), rows, device):
        latest = bench.time_case(case, candidates(case.m), rounds=options.rounds)
        records.extend(latest)
        print(line(latest), flush=True)
    result = {
        "schema": 1,
        "environment": bench.environment(),
        "method": "CUDA graph over rotating weights > 3x L2, candidates interleaved, median us",
        "records": [record.as_dict() for record in records],
    }
    options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
