"""docs/compatibility.{md,json} from the matrix's records: what every release did, in a table."""

from __future__ import annotations

import json
import platform
from datetime import date

from tests.hosts import judge, lab, other_torch, play, read_in_source

DOCS = lab.PROJECT / "docs"
SHORT = {
    "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback": "FlashInfer",
    "flashinfer_gemm_w8a8_block_fp8_linear": "FlashInfer",
    "deepgemm_w8a8_block_fp8_linear_with_fallback": "DeepGEMM",
    "cutlass_w8a8_block_fp8_linear_with_fallback": "CUTLASS",
    "triton_w8a8_block_fp8_linear": "Triton",
}
#: Where sglang's own function was called: without the plugin, and with it switched off.
CRASHES = {"on": "stock, 12.0, on", "off": "plugin, 12.0, switched off"}
HEAD = """# Every released host

Made by `make test-hosts`, from the real wheels: each release's own Python with the FlashInfer and
transformers that it pins, in processes that present a GPU of compute capability 12.0 or 12.1, on a
machine without one. `Fp8LinearMethod` (and compressed-tensors' `CompressedTensorsW8A8Fp8`, where a
release serves block FP8 through it) was built, loaded and applied on the CPU, and its output
compared with float64. No SM12x card took part: what the card itself does is not in this table.

- **stock**: what sglang alone answers under `auto`, with DeepGEMM on / off / absent, and where that
  is an error, which.
- **with the plugin**: `served` means that on 12.0 and 12.1, with DeepGEMM on (refusing in either of
  the ways that are known), off and absent, `auto`, `triton` and an accepted `flashinfer_trtllm`
  went to the plugin with the right numbers, and so with `USE_TRITON_W8A8_FP8_KERNEL=1`; every other
  choice, every other GPU (8.9, 9.0, 10.0) and `SGLANG_KT_SM120_ENABLE=0` got the very function
  object that sglang would use; blocks of 64 x 128 and 128 x 64 and a checkpoint without blocks were
  left, once loaded, with what they have without the plugin; and a refusal of sglang's own stood.
- **way in**: the start-up hook, and sglang's plugin loader where there is one: the real
  `load_plugins()` with `SGLANG_PLUGINS` unset, naming us, and naming others, and a process that
  never calls it. (Where the notes say "spawned", in interpreters that Python's spawn started, with
  and without the start-up hook; elsewhere in forks, without it.)
- **read ...; run ...** in the notes: the release is not as a reading of the sources, its own or its
  neighbours', had said.

"""


def entry(record: dict) -> dict:
    """Return one release's line of docs/compatibility.json."""
    played = record["played"]
    found, broken = judge.everything(record), judge.broken(played)
    if broken:
        pins = [f"{name} {v}" for name, v in record["pins"].items() if name.startswith("transf")]
        notes = [
            f"sglang's own import fails, with the plugin and without, beside the {pins[0]} that it "
            f"pins: {broken}"
        ]
    else:
        notes = found + read_in_source.differences(record)
    if record["twin"]:
        notes.append(
            f"every module that takes part is the same file as in {record['twin']}, whose play "
            "stands for all but the central scenario"
        )
    if "hook" in record["loader"]:
        notes.append("loader played in spawned processes")
    if _ask(played, "plugin, 12.0, on").get("given") == "torch.int32":
        notes.append("weight scales arrive packed in int32 with DeepGEMM on, and are unpacked")
    return {
        "distribution": record["distribution"],
        "version": record["version"],
        "stock": "cannot be imported" if broken else _stock(played),
        "plugin": "no host to serve" if broken else "see notes" if found else "served",
        "way_in": "start-up hook, plugin loader" if record["loader"] else "start-up hook",
        "notes": notes,
    }


def _ask(played: dict, name: str) -> dict:
    """Return the first question of a scenario, which is always `auto` and `Fp8LinearMethod`."""
    return (played.get(name, {}).get("asks") or [{}])[0]


def _stock(played: dict) -> str:
    """Return "on / off / absent" for 12.0, and for 12.1 where that differs."""
    answers = {}
    for capability in ("12.0", "12.1"):
        names = [_ask(played, f"plugin, {capability}, {state}") for state in play.DEEP_GEMM]
        answers[capability] = [SHORT.get(n.get("stock", "?"), n.get("stock", "?")) for n in names]
    shown = []
    for state, answer in zip(play.DEEP_GEMM, answers["12.0"], strict=True):
        error = _ask(played, CRASHES[state]).get("error") if state in CRASHES else None
        crash = f" ({error['type']}: {_brief(error['message'])})" if error else ""
        shown.append(answer + crash)
    other = "" if answers["12.1"] == answers["12.0"] else f"; 12.1: {' / '.join(answers['12.1'])}"
    return " / ".join(shown) + other


def _brief(message: str) -> str:
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[-1][-90:] if lines else ""


def write(records: list[dict]) -> None:
    """Write both files; a release without a record has no line."""
    entries = [entry(record) for record in records]
    text = json.dumps({"hosts": entries}, indent=1, ensure_ascii=False)
    (DOCS / "compatibility.json").write_text(text + "\n")
    lines = [HEAD]
    for name in ("sglang-kt", "sglang"):
        rows = [e for e in entries if e["distribution"] == name]
        lines.append(f"## {name}\n\n| version | stock: DeepGEMM on / off / absent "
                     "| with the plugin | way in | notes |\n|---|---|---|---|---|\n")  # fmt: skip
        for row in rows:
            notes = "; ".join(row["notes"]).replace("|", "\\|").replace("\n", " ")
            stock = row["stock"].replace("|", "\\|")
            lines.append(
                f"| {row['version']} | {stock} | {row['plugin']} | {row['way_in']} | {notes} |\n"
            )
        lines.append("\n")
    served = sum(e["plugin"] == "served" for e in entries)
    lines.append(f"{served} of {len(entries)} releases served. Python {platform.python_version()}, "
                 f"torch {_torch()}, {date.today()}.\n")  # fmt: skip
    found = other_torch.record()
    if found:
        said = other_torch.said(found)
        lines.append(f"\nAlmost every sglang-kt pins torch {other_torch.PINNED}. This project's "
                     f"{said} ({found['when']}; no GPU took part).\n")  # fmt: skip
    (DOCS / "compatibility.md").write_text("".join(lines))


def _torch() -> str:
    from importlib.metadata import version

    return version("torch")
