"""Facts about this machine, as plain values that go into JSON.

Every probe is guarded: what cannot be found out becomes None or an "error" text, never an
exception, so that the report always prints. Nothing but the standard library at import.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

#: Distributions whose versions matter here.
DISTRIBUTIONS = (
    "sglang-kt-sm120",
    "sglang-kt",
    "sglang",
    "kt-kernel",
    "torch",
    "triton",
    "flashinfer-python",
    "sgl-kernel",
    "sglang-kernel",
    "sgl-deep-gemm",
    "deep-gemm",
)
#: Import folders that more than one of them could write into.
SHARED_FOLDERS = ("sglang", "deep_gemm", "sgl_kernel", "triton")
GPU_FIELDS = ("name", "compute_cap", "driver_version", "memory.total", "power.limit")


def guarded(probe: Callable[[], Any]) -> Any:
    """Return what `probe` finds, or `{"error": ...}`."""
    try:
        return probe()
    except Exception as error:  # the report always prints: see above
        return {"error": f"{type(error).__name__}: {error}"}


def run(command: list[str], timeout: float = 60.0, **kwargs) -> subprocess.CompletedProcess:
    """Run a command to its end and keep its output as text; raises as subprocess.run does."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **kwargs)


def versions() -> dict[str, str]:
    """Return the installed version of each of `DISTRIBUTIONS` that is installed."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def owners() -> dict[str, list[str]]:
    """Return which distributions own each of `SHARED_FOLDERS`; more than one is an accident."""
    by_package = metadata.packages_distributions()
    return {
        folder: sorted(set(by_package[folder])) for folder in SHARED_FOLDERS if folder in by_package
    }


#: Where releases keep their own CUTLASS kernel for SM120. Those that bring it (sglang-kt from
#: 0.7.0, sglang from 0.5.16) are those whose `auto` there is CUTLASS.
HOST_CUTLASS = tuple(
    Path(folder, "csrc/gemm/fp8_blockwise/fp8_blockwise_scaled_mm_sm120.cuh")
    for folder in ("jit_kernel", "kernels/jit")
)


def host() -> dict[str, Any]:
    """Say where sglang lies and whether its `auto` on SM12x is CUTLASS, without importing it.

    Returns {"path": folder, or None where there is no sglang, "cutlass": bool}.
    """
    spec = importlib.util.find_spec("sglang")
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    place = next((place for place in places if (place / "srt").is_dir()), None)
    if place is None:
        return {"path": None, "cutlass": False}
    return {"path": str(place), "cutlass": any((place / file).is_file() for file in HOST_CUTLASS)}


def gpus() -> list[dict[str, str]]:
    """Return name, capability, driver, memory and power limit of each GPU, from nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = f"--query-gpu={','.join(GPU_FIELDS)}"
    result = run(["nvidia-smi", query, "--format=csv,noheader"])
    if result.returncode:
        raise RuntimeError(result.stdout.strip() or result.stderr.strip())
    rows = (line.split(", ") for line in result.stdout.strip().splitlines())
    return [dict(zip(GPU_FIELDS, row, strict=False)) for row in rows]


def torch_facts() -> dict[str, Any]:
    """Return torch's version, CUDA version, architectures and the devices that it sees."""
    import torch

    cuda = torch.cuda.is_available()
    devices = [
        {
            "name": torch.cuda.get_device_name(index),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
            "sm_count": torch.cuda.get_device_properties(index).multi_processor_count,
        }
        for index in range(torch.cuda.device_count() if cuda else 0)
    ]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "arch_list": torch.cuda.get_arch_list() if torch.version.cuda else [],
        "devices": devices,
    }


def ptxas(arch: str = "sm_120a") -> dict[str, Any]:
    """Say whether the ptxas that Triton uses assembles for `arch`: {"ok", "path", "message"}."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    # Triton >= 3.6 brings a second one for Blackwell and newer, with a variable of its own.
    second = (folder / "ptxas-blackwell").is_file()
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if second else "TRITON_PTXAS_PATH"
    own = str(folder / ("ptxas-blackwell" if second else "ptxas"))
    path = next((c for c in (os.environ.get(variable), own) if c and Path(c).is_file()), None)
    if path is None:
        return {"ok": False, "path": None, "message": "Triton has no ptxas here"}
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "empty.ptx"
        source.write_text(
            ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }\n"
        )
        result = run([path, f"-arch={arch}", str(source), "-o", f"{scratch}/empty.cubin"])
    return {"ok": result.returncode == 0, "path": path, "message": result.stderr.strip()}


def writable(folder: Path) -> bool:
    """True where a file can be made in `folder`, or in the nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def triton_cache() -> Path:
    """Return the folder that Triton keeps compiled kernels in."""
    home = Path(os.environ.get("TRITON_HOME", Path.home()))
    return Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))


#: Run in a process of its own: importing sglang takes seconds and has side effects.
SEAM_PROBE = """
import importlib
from sglang_kt_sm120 import host
from sglang_kt_sm120._startup import TARGETS
for name in TARGETS:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or "?"):  # not every sglang has every one of them
            raise
print("SEAM", host.installed())
"""


def seam() -> dict[str, Any]:
    """Import sglang's FP8 modules in a fresh interpreter and see whether they are wrapped there.

    Returns {"imported": bool, "wrapped": bool, "message": what went wrong, in one line}.
    """
    result = run([sys.executable, "-c", SEAM_PROBE], timeout=300.0)
    lines = [line for line in result.stdout.splitlines() if line.startswith("SEAM ")]
    said = result.stderr.strip().splitlines() or ["no output"]
    ours = [line for line in said if line.startswith("sglang-kt-sm120 ")]  # its ERROR, if any
    message = (ours or [""])[-1] if lines else said[-1]
    return {"imported": bool(lines), "wrapped": lines[-1:] == ["SEAM True"], "message": message}


def facts() -> dict[str, Any]:
    """Return everything above but `seam`, ready for JSON."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "versions": guarded(versions),
        "owners": guarded(owners),
        "gpus": guarded(gpus),
        "torch": guarded(torch_facts),
        "ptxas": {arch: guarded(lambda arch=arch: ptxas(arch)) for arch in ("sm_120a", "sm_121a")},
        "triton_cache": str(triton_cache()),
        "host": guarded(host),  # last: finders of other tools may act when sglang is looked for
    }
