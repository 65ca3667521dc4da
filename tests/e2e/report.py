"""Turn the records of a run into the tables of docs/verification.md.

python -m tests.e2e.report FOLDER
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from tests.e2e import compare, runs


def read(folder: Path) -> dict[str, dict]:
    """Return case name -> record; telling lines are picked anew from a log that lies beside it."""
    records = {}
    for file in sorted(folder.glob("*.record")):
        record = json.loads(file.read_text())
        if file.with_suffix(".log").exists():
            record["lines"] = runs.telling(runs.log_text(file.with_suffix(".log")))
        records[record["case"]["name"]] = record
    return records


def multiplied_by(record: dict) -> str:
    """Say what multiplied FP8 weights in the scheduler, and how many calls were captured."""
    total: Counter = Counter()
    for process in record["processes"]:
        for row in process["calls"]:
            who = "ours" if row["by"] == "plugin" else "sglang"
            name = f"{who}: {row['name'].removesuffix('_w8a8_block_fp8_linear')} {row['arch']}"
            total[name.strip(), row["capturing"]] += row["count"]
    names = dict.fromkeys(name for name, _ in total)
    return "; ".join(f"{n} {total[n, False]} + {total[n, True]} captured" for n in names)


def starts(records: dict[str, dict]) -> list[str]:
    lines = ["| start | ended | up after | block-FP8 calls in the scheduler |", "|---|---|---|---|"]
    for name, record in records.items():
        up = f"{record['seconds_up']:.0f} s" if record["answers"] else "-"
        how = "served" if record["answers"] else record["traceback"][-1:] or record["ended"]
        how = next((line for line in reversed(record["traceback"]) if line.strip()), how)
        lines.append(f"| {name} | {how} | {up} | {multiplied_by(record)} |")
    return lines


def against_stock(records: dict[str, dict]) -> list[str]:
    lines = [
        "| start | prompts with equal tokens | prompt log-probabilities: mean, worst difference "
        "| first differing tokens: gap to the other's token, ours / stock |",
        "|---|---|---|---|",
    ]
    for name, record in records.items():
        stock = records.get(f"{record['case']['host']}-{record['case']['checkpoint']}-stock-triton")
        if not record["answers"] or stock is None or stock is record:
            continue
        result = compare.compare(record["answers"], stock["answers"])
        gaps = [
            f"{row['ours']['gap']:.3f} / {row['stock']['gap']:.3f}"
            if None not in (row["ours"]["gap"], row["stock"]["gap"])
            else "not among the five best"
            for row in result["differences"]
        ]
        lines.append(
            f"| {name} | {result['equal']} of {result['prompts']} "
            f"| {result['prompt_mean_difference']:.4f}, {result['prompt_worst_difference']:.3f} "
            f"| {', '.join(gaps) or '-'} |"
        )
    return lines


def main() -> None:
    records = read(Path(sys.argv[1]))
    print("\n".join(starts(records)))
    print()
    print("\n".join(against_stock(records)))
    for name, record in records.items():
        print(f"\n### {name}\n")
        print(record["facts"])
        for answer in record["answers"][:3]:
            print("tokens", answer["tokens"])
        print("\n".join(record["lines"]))


if __name__ == "__main__":
    main()
