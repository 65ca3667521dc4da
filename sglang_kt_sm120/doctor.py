"""Checks of this machine, each a row with its verdict and, where it failed, what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kt_sm120 import _startup, devices, env, plugin, select, system
from sglang_kt_sm120.configs import store

OK, WARN, FAIL = "ok", "warn", "fail"
NO_GPU = "no GPU here"
HOST_FOLDER = "sglang"


@dataclass(frozen=True)
class Row:
    """One check: its name, status ("ok", "warn", "fail"), what was seen, and the remedy.

    `verdict` is what a failed check means for this machine where nothing is broken, but nothing
    could be served either: no GPU, no sglang, switched off.
    """

    check: str
    status: str
    value: str
    fix: str = ""
    verdict: str = ""


def rows(facts: dict[str, Any], seam: Callable[[], dict[str, Any]] | None) -> list[Row]:
    """Judge the facts of `system.facts()`.

    Args:
        facts: What was found out about this machine.
        seam: `system.seam`, or None to leave out the check that imports sglang.
    """
    found = [
        *_gpu(facts["torch"]),
        *_torch(facts["torch"]),
        *_triton(facts),
        *_ownership(facts["owners"], facts["versions"], facts.get("host", {}).get("path")),
        *_hook(),
        *_variables(),
        *_cache(Path(facts["triton_cache"])),
        *_tables(facts["torch"]),
    ]
    if seam is not None and any(row.check == "host" and row.status == OK for row in found):
        found += _seam(system.guarded(seam))
    return found


def exit_code(found: list[Row]) -> int:
    """Return 0 where this machine can serve, 3 where nothing is broken but no GPU is, else 1."""
    failed = [row for row in found if row.status == FAIL]
    if any(not row.verdict for row in failed):
        return 1
    if any(row.verdict == NO_GPU for row in failed):
        return 3
    return 1 if failed else 0


def verdict(found: list[Row]) -> str:
    """Say in one line whether this machine can serve, and if not, what stands in the way."""
    failed = [row for row in found if row.status == FAIL]
    if not failed:
        return "ready"
    broken = [row.check for row in failed if not row.verdict]
    reasons = [row.verdict for row in failed if row.verdict]
    reasons += [f"see {', '.join(broken)} above"] if broken else []
    return f"not ready: {'; '.join(dict.fromkeys(reasons))}"


def _gpu(torch: dict[str, Any]) -> Iterator[Row]:
    if "error" in torch:
        yield Row("torch", FAIL, torch["error"], "install a CUDA build of torch")
        return
    devices = torch["devices"]
    ours = [d for d in devices if tuple(map(int, d["capability"].split("."))) in select.SM120]
    if not devices:
        yield Row(
            "GPU", FAIL, "no CUDA device is visible to torch",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES; without a GPU explain --gpu, aot, "
            "warm --gpu, patch, bench --from and the demo work", NO_GPU,
        )  # fmt: skip
        return
    names = ", ".join(f"{d['name']} ({d['capability']})" for d in devices)
    if ours:
        yield Row("GPU", OK, names)
    elif env.TEST_CAPABILITY.get() in select.SM120:
        yield Row("GPU", WARN, names, "none is an SM120 or SM121; the test override presents them")
    else:
        yield Row(
            "GPU", FAIL, names, "no SM120/SM121 among them: the plugin leaves sglang as it is",
            "no SM120/SM121 GPU here",
        )  # fmt: skip


def _torch(torch: dict[str, Any]) -> Iterator[Row]:
    if "error" in torch:
        return
    if not torch["cuda"]:
        yield Row(
            "torch", WARN, f"{torch['version']}, a build without CUDA",
            "serving needs a CUDA 12.8 or newer build of torch",
        )  # fmt: skip
    elif not any(arch.startswith(("sm_120", "compute_120")) for arch in torch["arch_list"]):
        yield Row(
            "torch", FAIL, f"{torch['version']} has no sm_120 ({' '.join(torch['arch_list'])})",
            "install a torch built for CUDA 12.8 or newer; this one says 'no kernel image' there",
        )  # fmt: skip
    else:
        yield Row("torch", OK, f"{torch['version']}, CUDA {torch['cuda']}, has sm_120")


def _triton(facts: dict[str, Any]) -> Iterator[Row]:
    version = facts["versions"].get("triton", "no triton")
    seen = [d["capability"] for d in facts["torch"].get("devices", [])]
    # GB10 needs an assembler for 12.1; Triton 3.4 and 3.5 bring none.
    arch = "sm_121a" if "12.1" in seen else "sm_120a"
    ptxas = facts["ptxas"][arch]
    if "error" in ptxas and not facts["torch"].get("cuda") and "error" not in facts["torch"]:
        yield Row(
            "Triton", WARN, ptxas["error"],
            "pip install triton, for aot and warm: only torch's CUDA builds bring it",
        )  # fmt: skip
    elif "error" in ptxas:
        yield Row(
            "Triton", FAIL, ptxas["error"], "Triton comes with torch's CUDA builds: reinstall torch"
        )
    elif not ptxas["ok"]:
        needs = "12.9" if arch == "sm_121a" else "12.8"
        yield Row(
            "Triton", FAIL, f"{version}: {ptxas['message'] or f'its ptxas refuses {arch}'}",
            f"set TRITON_PTXAS_PATH (and, from Triton 3.6, TRITON_PTXAS_BLACKWELL_PATH) to the "
            f"ptxas of CUDA {needs} or newer, or update triton",
        )  # fmt: skip
    else:
        yield Row("Triton", OK, f"{version}, ptxas assembles for {arch}")


def _ownership(
    owners: dict[str, list[str]], versions: dict[str, str], path: str | None
) -> Iterator[Row]:
    """Judge who wrote the shared folders; `path` is where sglang lies, whoever put it there."""
    if "error" in owners:
        yield Row("owners", WARN, owners["error"], "this Python's package metadata cannot be read")
        owners = {}
    for folder, names in owners.items():
        if len(names) > 1:
            yield Row(
                f"owner of {folder}/", FAIL, " and ".join(names),
                "two distributions wrote into one folder: uninstall both, then reinstall the one "
                "that you want",
            )  # fmt: skip
    names = owners.get(HOST_FOLDER, [])
    if not names and path:  # an editable install, or PYTHONPATH
        yield Row("host", OK, f"sglang in {path}")
    elif not names:
        yield Row(
            "host", FAIL, "no sglang here", "pip install sglang-kt (or sglang)", "no sglang here"
        )
    elif len(names) == 1:
        yield Row("host", OK, f"{names[0]} {versions.get(names[0], '')}".strip())


def _hook() -> Iterator[Row]:
    if not env.ENABLE.get():
        yield Row(
            "hook", FAIL, f"{env.ENABLE.name}=0: switched off", f"unset {env.ENABLE.name}",
            "switched off",
        )  # fmt: skip
    elif _startup.armed():
        yield Row("hook", OK, "start-up hook is armed in new interpreters")
    else:
        yield Row(
            "hook", FAIL, "start-up hook did not run in this interpreter",
            "install the wheel into this environment's site-packages (python -S and -I skip it)",
        )  # fmt: skip


def _seam(seam: dict[str, Any]) -> Iterator[Row]:
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if "error" in seam or not seam["imported"]:
        yield Row(
            "seam", FAIL, f"sglang does not import here: {seam.get('error') or seam['message']}",
            "sglang itself cannot start in this environment; mend that first",
            "sglang does not import",
        )  # fmt: skip
    elif seam["wrapped"]:
        yield Row("seam", OK, "sglang's block-FP8 dispatch is wrapped in a fresh interpreter")
    elif not env.ENABLE.get():
        yield Row(
            "seam", FAIL, "not wrapped: switched off", f"unset {env.ENABLE.name}", "switched off"
        )
    elif not plugin.allowed_by(allowed):
        yield Row(
            "seam", FAIL, f"not wrapped: SGLANG_PLUGINS={allowed}",
            f"add {plugin.ENTRY_POINT} to SGLANG_PLUGINS", "left out by SGLANG_PLUGINS",
        )  # fmt: skip
    else:
        yield Row(
            "seam", FAIL,
            seam["message"] or "the plugin is installed, but sglang's dispatch is not wrapped",
            "this sglang may be newer than the plugin, or changed: sglang's own kernels serve "
            "until sglang-kt-sm120 is updated",
        )  # fmt: skip


def _variables() -> Iterator[Row]:
    for name, (what, fix) in env.misread().items():
        yield Row(name, FAIL, what, fix)
    if env.TEST_CAPABILITY.get():
        yield Row(
            env.TEST_CAPABILITY.name, WARN, os.environ[env.TEST_CAPABILITY.name],
            "a test override is on: the plugin does not see the real GPU; unset it to serve",
        )  # fmt: skip
    for name in ("SGLANG_ENABLE_FLASHINFER_FP8_GEMM", "SGLANG_ENABLE_FLASHINFER_GEMM"):
        if os.environ.get(name, "").strip().lower() in env.TRUE:
            yield Row(
                name, WARN, os.environ[name],
                "asks for FlashInfer's trtllm, which has no SM120 kernel; unset it",
            )  # fmt: skip


def _cache(folder: Path) -> Iterator[Row]:
    if system.writable(folder):
        yield Row("kernel cache", OK, str(folder))
    else:
        yield Row(
            "kernel cache", FAIL, f"{folder} cannot be written",
            "set TRITON_CACHE_DIR to a folder that can",
        )  # fmt: skip


def _tables(torch: dict[str, Any]) -> Iterator[Row]:
    """One row for each kind of SM12x GPU here: which tuned table decides, or the offer to tune."""
    seen = {d["name"]: d for d in torch.get("devices", [])}
    for name, facts in seen.items():
        capability = tuple(map(int, facts["capability"].split(".")))
        if capability not in select.SM120 or "sm_count" not in facts:
            continue
        device = devices.describe(name, capability=capability, sm_count=facts["sm_count"])
        trouble, found = store.trouble(device), store.tables(device)
        if trouble:
            yield Row("tuned table", WARN, trouble, "sglang-kt-sm120 tune --model PATH")
        elif found:
            yield Row("tuned table", OK, "; ".join(f"{f.kind} {f.title()}" for f in found))
        else:
            yield Row(
                "tuned table", WARN, f"none for {name}",
                "sglang-kt-sm120 tune --quick --model PATH: 90 s, with the server stopped",
            )  # fmt: skip
