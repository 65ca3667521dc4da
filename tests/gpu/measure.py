"""The project's benchmark on a machine without sglang: ours against stock, DeepGEMM and CUTLASS.

    python tests/gpu/measure.py OUT.json [--rows 1,2,4,8,16,32,64] [--sets deepseek-r1,qwen3.6-27b]

Writes records and environment as JSON and prints one line a case. Off SM12x ours run with Triton's
arch="sm120"; from 32 rows on also natively, because Hopper emulates the SM120 lowering's FP8 there.
DeepGEMM and CUTLASS take part where `deep_gemm` and `sgl_kernel` import. `--compile` runs each
candidate once and times nothing: started before, once per `--shard`, it keeps compilation (minutes
for DeepGEMM) out of the way.
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

from sglang_kt_sm120 import bench, host, shapes  # noqa: E402

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
    listed += bench.libraries(without={"cutile", "b12x"})  # for SM12x, or of other numbers
    functions = host.linear_functions()  # where a real sglang imports
    if "deepgemm" in functions:
        listed.append(bench.host_linear("deepgemm path of sglang", *functions["deepgemm"]))
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


def compile_only(case, listed):
    """Run every candidate once, so that the timed run finds it compiled."""
    for candidate in listed:
        try:
            candidate.prepare(case)(0)
        except Exception as failure:  # the timed run meets it again and records it
            print(f"{candidate.name} {case.n}x{case.k} M={case.m}: {failure}"[:200], flush=True)
    torch.cuda.synchronize()


def wanted_shapes(options):
    """The layers asked for, each (N, K) once, of this shard."""
    wanted = {}
    for name in options.sets.split(","):
        for layer in shapes.SHAPE_SETS[name]:
            wanted.setdefault((layer.n, layer.k), SimpleNamespace(name=name, n=layer.n, k=layer.k))
    if options.shapes:
        named = [tuple(map(int, text.split("x"))) for text in options.shapes.split(",")]
        wanted = {(n, k): SimpleNamespace(name="named", n=n, k=k) for n, k in named}
    index, shards = map(int, options.shard.split("/"))
    return list(wanted.values())[index::shards]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--sets", default="deepseek-r1,qwen3.6-27b")
    parser.add_argument("--shapes", help="instead of --sets: 2112x7168,4096x7168")
    parser.add_argument("--rounds", type=int, default=bench.ROUNDS)
    parser.add_argument("--shard", default="0/1", help="I/N: every Nth shape, from the Ith")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    rows = [int(value) for value in options.rows.split(",")]
    records = []
    device = torch.device("cuda", 0)
    for case in bench.make_cases(wanted_shapes(options), rows, device):
        listed = candidates(case.m)
        if options.compile:
            compile_only(case, listed)
            continue
        latest = bench.time_case(case, listed, rounds=options.rounds)
        records.extend(latest)
        print(line(latest), flush=True)
    if options.compile:
        return
    result = {
        "schema": 1,
        "environment": bench.environment(),
        "method": "CUDA graph over rotating weights > 3x L2, candidates interleaved, median us",
        "records": [record.as_dict() for record in records],
    }
    options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
