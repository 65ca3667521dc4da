"""The CUDA sources that a patch changes, compiled for the card they are for; no GPU is needed.

A binding of FlashInfer is one translation unit, and the fork's JIT kernel is one through its entry
point. Only the headers of a wheel are needed beside nvcc, and cuRAND's, which a small toolkit lacks
(FlashInfer includes `curand_kernel.h`): they come from the registry's wheel.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_kt_sm120.patches import Patch
from tests.hosts import lab, patched, releases

#: The cuRAND of CUDA 13.0; its headers have not changed what FlashInfer uses of them for years.
CURAND = ("nvidia-curand", "10.4.0.35")
#: What FlashInfer's own build defines for dtypes that its headers can do.
FORMATS = ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")
ENTRY = "sglang/jit_kernel/csrc/gemm/fp8_blockwise/fp8_blockwise_scaled_mm_entry.cuh"


class NoCompiler(RuntimeError):
    """There is no nvcc here, or one too old for sm_120a; the message says which."""


@dataclass(frozen=True)
class Unit:
    """One translation unit: its text, the architecture (such as "120a"), and nvcc's options."""

    name: str
    text: str
    arch: str
    options: tuple[str, ...]


def units(patch: Patch, tree: Path) -> list[Unit]:
    """Return what to compile of `tree`, a host's or FlashInfer's wheel with `patch` applied."""
    files = [file for file in patch.files if file.endswith((".cu", ".cuh"))]
    if not files:
        return []
    whole = patched.tree("flashinfer-python", "0.7.2", fetch=True) / "flashinfer" / "data"
    includes = [whole / "cutlass" / "include", whole / "cutlass/tools/util/include",
                lab.ROOT / "common" / "tvm_ffi" / "include", curand()]  # fmt: skip
    if (tree / "sglang").is_dir():
        site = lab.install("sglang-kt-0.7.2", lambda *a: None).site  # its headers too
        includes.insert(0, site / "sglang" / "jit_kernel" / "include")
        text = (f'#include <sgl_kernel/tensor.h>\n#include "{tree / ENTRY}"\n'
                "auto* entry = &fp8_blockwise_scaled_mm;\n")  # fmt: skip
        return [Unit("fp8_blockwise_scaled_mm", text, "120a", _options("c++20", includes))]
    data = tree / "flashinfer" / "data"
    includes = [data / "csrc", data / "include", whole / "spdlog" / "include", *includes]
    options = _options("c++17", includes, [f"-DFLASHINFER_ENABLE_{name}" for name in FORMATS])
    found = []
    for file in files:
        name = Path(file).stem
        arch = "100a" if name.endswith("sm100") else "120a"
        found.append(Unit(name, (data / file).read_text(), arch, options))
    return found


def _options(standard: str, includes: list[Path], further: list[str] = []) -> tuple[str, ...]:  # noqa: B006
    fixed = (f"-std={standard}", "-O1", "--expt-relaxed-constexpr", "-w", "-DNDEBUG")
    return (*fixed, *further, *(f"-I{path}" for path in includes))


def compile_one(unit: Unit) -> str | None:
    """Compile one unit; return what nvcc complained about, or None.

    Raises:
        NoCompiler: No nvcc that knows the architecture is here.
    """
    nvcc = compiler(unit.arch)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"{unit.name}.cu"
        source.write_text(unit.text)
        arch = f"-gencode=arch=compute_{unit.arch},code=sm_{unit.arch}"
        command = [nvcc, *unit.options, arch, "-c", source, "-o", Path(folder) / "object"]
        result = subprocess.run(command, capture_output=True, text=True)
    if not result.returncode:
        return None
    errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
    return "\n".join(errors[:3]) or result.stderr[-500:] or f"nvcc ended with {result.returncode}"


def compiler(arch: str) -> str:
    """Return the nvcc here.

    Raises:
        NoCompiler: There is none, or it does not know `arch`.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise NoCompiler("no nvcc here")
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
    if not re.search(rf"\bsm_{arch.rstrip('a')}\b", known):
        raise NoCompiler(f"this nvcc does not know sm_{arch}")
    return nvcc


def curand() -> Path:
    """Return a folder with cuRAND's headers, fetched at most once (60 MB for 17 small files)."""
    name, version = CURAND

    def make(target: Path, requirements: Path, progress: lab.Progress) -> None:
        progress(name, 0, 1, "fetching the wheel for its headers")
        with tempfile.TemporaryDirectory(dir=lab.ROOT) as download:
            releases._download(f"{name}=={version}", download)
            with zipfile.ZipFile(next(Path(download).glob("*.whl"))) as archive:
                archive.extractall(target, [n for n in archive.namelist() if n.endswith(".h")])

    folder = lab._build(f"headers-{name}-{version}", make, lab.show)
    return next(folder.glob("nvidia/*/include"))


def findings(patch: Patch, tree: Path) -> Iterator[tuple[bool, str]]:
    """Compile every unit of a patched tree; yield (good, what was seen)."""
    for unit in units(patch, tree):
        try:
            problem = compile_one(unit)
        except NoCompiler as error:
            yield True, f"{unit.name} not compiled: {error}"
            continue
        yield problem is None, f"{unit.name} for sm_{unit.arch}: {problem or 'compiles'}"
