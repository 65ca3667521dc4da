"""Hardware counters of our decode kernels by Nsight Compute: what limits a shape that misses.

    python tests/gpu/counters.py OUT.json [--shapes 7168x18432,5120x17408] [--rows 4,16]

Runs itself under `ncu` and prints, per kernel: time, DRAM bytes and bandwidth, issue slots used,
and the reasons why warps waited. ncu empties the caches before each kernel and runs it alone,
without dependent launch, so its times are longer than a graph's. Exit status 3 where there is no
`ncu`, 1 where it may not read counters.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

#: The shapes that missed the absolute bound of docs/kernels.md at 16 (and two of them at 4) rows.
SHAPES = "2112x7168,7168x16384,7168x18432,5120x17408,16384x5120,14336x5120,5120x6144,34816x5120"
STALLS = (
    "long_scoreboard", "short_scoreboard", "math_pipe_throttle", "mio_throttle", "lg_throttle",
    "barrier", "wait", "not_selected", "dispatch_stall", "no_instruction", "membar",
)  # fmt: skip
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram_bytes": "dram__bytes_read.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "tensor_percent": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "warps_per_sm": "sm__warps_active.avg.per_cycle_active",
    **{
        f"stall_{name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
        for name in STALLS
    },
}
UNITS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
BYTES = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def launch(shapes: str, rows: str) -> None:
    """Run every case once to compile it and once for the profiler (inside ncu)."""
    import measure
    import torch

    from sglang_kt_sm120 import bench, heuristic
    from sglang_kt_sm120.backends import triton as backend

    device = measure.this_device()
    arch = None if device.capability[0] == 12 else "sm120"
    for text in shapes.split(","):
        n, k = map(int, text.split("x"))
        weights, scales = bench.make_weights(n, k, "cuda", 1)
        counters = torch.zeros(heuristic.counters_needed(n, k), dtype=torch.int32, device="cuda")
        for m in map(int, rows.split(",")):
            config = heuristic.config_for(heuristic.Case(m, n, k), device)
            run = backend.plan(config, n, k, arch=arch, pdl=True)
            x = torch.randn(m, k, device="cuda").bfloat16()
            for profiled in (False, True):
                if profiled:
                    torch.cuda.profiler.start()
                run(x, weights[0], scales[0], None, x.dtype, config, counters)
                torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def cases(shapes: str, rows: str, records: list[dict]) -> list[dict]:
    """Say of each profiled kernel which shape and M it belongs to: launches come in order."""
    pending = iter(records)
    found = []
    for shape in shapes.split(","):
        for m in rows.split(","):
            for record in pending:
                found.append({"shape": shape, "m": int(m), **record})
                if not record["kernel"].startswith("_quantise"):
                    break
    return found


def parse(text: str) -> list[dict]:
    """Read `ncu --csv --page raw`: one record a kernel, the names of `METRICS`."""
    lines = text[text.index('"ID"') :].splitlines()
    rows = list(csv.DictReader(lines))
    units, records = rows[0], []
    for row in rows[1:]:
        record: dict = {"kernel": row["Kernel Name"]}
        for name, metric in METRICS.items():
            if not row.get(metric):
                continue
            value = float(row[metric].replace(",", ""))
            scale = {"us": UNITS, "dram_bytes": BYTES}.get(name, {}).get(units[metric], 1)
            record[name] = value * scale
        records.append(record)
    return records


def show(records: list[dict]) -> None:
    for record in records:
        waits = {name[6:]: v for name, v in record.items() if name.startswith("stall_") and v > 0.1}
        worst = sorted(waits.items(), key=lambda item: -item[1])[:5]
        us, read = record.get("us", 0), record.get("dram_bytes", 0)
        print(
            f"{record['shape']} M={record['m']} {record['kernel']}: {us:.2f} us, "
            f"{read / 1e6:.1f} MB read, {read / max(us, 1e-9) / 1e3:.0f} GB/s "
            f"({record.get('dram_percent', 0):.0f} % of DRAM), issue "
            f"{record.get('issue_percent', 0):.0f} %, tensor {record.get('tensor_percent', 0):.0f} "
            f"%, {record.get('warps_per_sm', 0):.1f} warps an SM; warps waiting per issue: "
            + ", ".join(f"{name} {value:.1f}" for name, value in worst)
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default="4,16")
    parser.add_argument("--launch", action="store_true", help="what runs inside ncu")
    options = parser.parse_args()
    if options.launch:
        launch(options.shapes, options.rows)
        return 0
    ncu = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if ncu is None:
        print("no ncu on this machine", file=sys.stderr)
        return 3
    command = [
        ncu, "--csv", "--page", "raw", "--profile-from-start", "off", "--target-processes", "all",
        "-k", "regex:_direct_kernel|_pipelined_kernel|_quantise_kernel",
        "--metrics", ",".join(METRICS.values()),
        sys.executable, __file__, str(options.out), "--launch", "--shapes", options.shapes,
        "--rows", options.rows,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    options.out.with_suffix(".txt").write_text(result.stdout + result.stderr)
    if result.returncode or '"ID"' not in result.stdout:
        print((result.stdout + result.stderr)[-1500:], file=sys.stderr)
        return 1
    records = cases(options.shapes, options.rows, parse(result.stdout))
    options.out.write_text(json.dumps({"schema": 1, "metrics": METRICS, "records": records}))
    show(records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
