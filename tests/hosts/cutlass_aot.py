"""`make cutlass-aot`: the host's CUTLASS kernels for sm_120a, looked at without a GPU.

    python -m tests.hosts.cutlass_aot                 # everything; the table on stdout
    python -m tests.hosts.cutlass_aot flashinfer      # whose name holds this
    python -m tests.hosts.cutlass_aot --json FILE     # and a record of it

The JIT kernels are built with this machine's nvcc from the sources in the released wheels, with the
CUTLASS headers that FlashInfer's wheel carries, as the hosts build them. sgl-kernel ships images
and no source: its kernels for SM120 are taken out of the library as they are. Of each kernel the
table gives the tile, registers, spills and tensor-core instructions. The first run takes about ten
minutes and downloads 1.5 GB; what was built or taken out lies in `.hosts/cutlass-aot` and is kept.

Exit code 0, or 1 where a kernel is missing or does not multiply FP8 natively, or nvcc failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jinja2
import triton
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.hosts import lab, patched, releases

ROOT = lab.ROOT / "cutlass-aot"
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
MARK = b"TmaWarpSpecializedBlockwiseScaling"
TARGET = "-gencode=arch=compute_120a,code=sm_120a"
#: The wheels that kt-kernel's CUDA libraries are spread over, in the order in which its
#: `sgl_kernel/payload_runtime.py` joins them to one archive.
PAYLOAD = (
    ("kt-kernel", "0.7.2"), ("transformers-kt", "5.6.0.post6"), ("sglang-kt", "0.7.2"),
    ("ktransformers", "0.7.2"), ("accelerate-kt", "1.14.0.post4"),
)  # fmt: skip
IMAGE = "sgl_kernel/sm100/common_ops.abi3.so"
console = Console(stderr=True)


class Failure(RuntimeError):
    """A subject cannot be built or found; the message says why."""


@dataclass(frozen=True)
class Kernel:
    """What is compiled of one kernel.

    Attributes:
        subject: Whose it is.
        tile: tokens x features x K of one thread block.
        schedule: CUTLASS's, with "Stream-K" where its scheduler is.
        output: bfloat16 or float16.
        activation_scales: "along M" or "along K": where they have stride 1.
        weight_scales: "along N" or "along K".
        registers: Per thread. stack: bytes per thread. spills: LDL and STL instructions.
        mma: Tensor-core instructions by name.
    """

    subject: str
    tile: str
    schedule: str
    output: str
    activation_scales: str
    weight_scales: str
    registers: int
    stack: int
    spills: int
    mma: dict[str, int]


# ---------------------------------------------------------------- getting the cubins


def sglang_jit(name: str, version: str, headers: str) -> Callable[[Path], list[Path]]:
    """Build sglang's own JIT kernel with the headers of FlashInfer `headers`, which it pins."""

    def make(folder: Path) -> list[Path]:
        _extract(
            name, version, folder, lambda m: "jit" in m and ("/csrc/" in m or "/include/" in m)
        )
        (entry,) = folder.rglob("fp8_blockwise_scaled_mm_entry.cuh")
        include = next(p for p in entry.parents if p.name == "csrc").parent / "include"
        space = "sglang::" if "namespace sglang" in entry.read_text() else ""
        unit = folder / "unit.cu"
        unit.write_text(f'#include <sgl_kernel/tensor.h>\n#include "{entry}"\n'
                        f"auto* entry = &{space}fp8_blockwise_scaled_mm;\n")  # fmt: skip
        lab._build("common", lab._common, lab.show)
        flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda",
                 "-DCUTE_USE_PACKED_TUPLE=1", "-DCUTLASS_ENABLE_TENSOR_CORE_MMA=1",
                 "-DCUTLASS_VERSIONS_GENERATED", "-DSGL_CUDA_ARCH=1200"]  # fmt: skip
        includes = [include, *_cutlass(headers), lab.ROOT / "common/tvm_ffi/include"]
        return [_nvcc(unit, flags, includes)]

    return make


def flashinfer(version: str) -> Callable[[Path], list[Path]]:
    """Build FlashInfer's groupwise kernel for K-major scales, bf16 and fp16."""

    def make(folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        data = patched.tree("flashinfer-python", version, fetch=True) / "flashinfer" / "data"
        template = (data / "csrc/gemm_groupwise_sm120_kernel_inst.jinja").read_text()
        unit = folder / "unit.cu"
        unit.write_text("\n".join(
            jinja2.Template(template).render(
                dtype_in="cutlass::float_e4m3_t", dtype_out=dtype, scale_major_k="true"
            )
            for dtype in ("cutlass::bfloat16_t", "cutlass::half_t")
        ))  # fmt: skip
        flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr"]
        includes = [data / "csrc", data / "include", *_cutlass(version)]
        return [_nvcc(unit, flags, includes)]

    return make


def shipped(name: str, version: str) -> Callable[[Path], list[Path]]:
    """Take the SM120 images of the kernel out of a wheel's library."""

    def make(folder: Path) -> list[Path]:
        _extract(name, version, folder, lambda member: member == IMAGE)
        return _images(folder / IMAGE)

    return make


def payload(folder: Path) -> list[Path]:
    """Join kt-kernel's library from the wheels that carry it, and take its images out."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "payload.tar.gz"
    with archive.open("wb") as joined:
        for name, version in PAYLOAD:
            with tempfile.TemporaryDirectory(dir=folder) as part:
                _extract(name, version, Path(part), lambda member: member.endswith("payload.part"))
                (piece,) = Path(part).rglob("payload.part")
                joined.write(piece.read_bytes())
    with tarfile.open(archive, "r:gz") as bundle:
        bundle.extract(IMAGE, folder, filter="data")
    archive.unlink()
    return _images(folder / IMAGE)


SUBJECTS: dict[str, Callable[[Path], list[Path]]] = {
    "sglang-kt 0.7.2 JIT": sglang_jit("sglang-kt", "0.7.2", headers="0.6.3"),
    "sglang 0.5.23 JIT": sglang_jit("sglang", "0.5.23", headers="0.7.2"),
    "flashinfer 0.6.3": flashinfer("0.6.3"),
    "flashinfer 0.7.2": flashinfer("0.7.2"),
    "sgl-kernel 0.3.21": shipped("sgl-kernel", "0.3.21"),
    "sglang-kernel 0.4.2": shipped("sglang-kernel", "0.4.2"),
    "kt-kernel 0.7.2": payload,
}


def _extract(name: str, version: str, into: Path, wanted: Callable[[str], bool]) -> None:
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as download:
        releases._download(f"{name}=={version}", download)
        with zipfile.ZipFile(next(Path(download).glob("*.whl"))) as archive:
            members = [member for member in archive.namelist() if wanted(member)]
            if not members:
                raise Failure(f"{name} {version}'s wheel holds nothing of it")
            archive.extractall(into, members)


def _cutlass(version: str) -> list[Path]:
    data = patched.tree("flashinfer-python", version, fetch=True) / "flashinfer" / "data"
    return [data / "cutlass/include", data / "cutlass/tools/util/include"]


def _nvcc(unit: Path, flags: list[str], includes: list[Path]) -> Path:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise Failure("no nvcc on PATH: install the CUDA 13.0 toolkit to build it")
    cubin = unit.with_suffix(".cubin")
    command = [nvcc, *flags, "-DNDEBUG", "-w", *(f"-I{path}" for path in includes), TARGET,
               "-cubin", unit, "-o", cubin]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise Failure(f"nvcc: {(result.stdout + result.stderr)[-600:]}")
    return cubin


def _images(library: Path) -> list[Path]:
    """Return the library's SM120 cubins that hold a blockwise kernel; the rest is deleted."""
    folder = library.parent / "images"
    folder.mkdir(exist_ok=True)
    command = [TOOLS / "cuobjdump", "-xelf", "sm_120", library.resolve()]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if result.returncode:
        raise Failure(f"cuobjdump: {result.stderr[-600:]}")
    library.unlink()
    kept = []
    for image in sorted(folder.glob("*.cubin")):
        if MARK in image.read_bytes():
            kept.append(image)
        else:
            image.unlink()
    return kept


# ---------------------------------------------------------------- reading them


def cubins(name: str, make: Callable[[Path], list[Path]]) -> list[Path]:
    """Return the cubins of a subject, made at most once."""
    folder = ROOT / re.sub(r"[^\w.]+", "-", name)
    stamp = folder / "cubins.json"
    if not stamp.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        made = make(folder)
        stamp.write_text(json.dumps([str(path.relative_to(folder)) for path in made]))
    return [folder / path for path in json.loads(stamp.read_text())]


def read(subject: str, cubin: Path) -> Iterator[Kernel]:
    """Yield what a cubin holds of blockwise kernels."""
    usage = _run(TOOLS / "cuobjdump", "-res-usage", cubin)
    resources = {
        name: (int(registers), int(stack))
        for name, registers, stack in re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", usage)
    }
    for section in re.split(
        r"^\s*\.section\s+\.text\.", _run(TOOLS / "nvdisasm", cubin), flags=re.M
    ):
        name = re.match(r"[\w$]+", section)
        if name is None or name[0] not in resources or MARK.decode() not in name[0]:
            continue
        counts = Counter(re.findall(
            r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)", section, re.M
        ))  # fmt: skip
        registers, stack = resources[name[0]]
        described = signature(_run("c++filt", "-r", name[0]))
        if described is None:
            continue
        yield Kernel(
            subject,
            **described,
            registers=registers,
            stack=stack,
            spills=sum(n for op, n in counts.items() if op.partition(".")[0] in ("LDL", "STL")),
            mma={op: n for op, n in counts.items() if "MMA" in op},
        )


SHAPE = re.compile(
    r"KernelTmaWarpSpecialized(\w+?)BlockwiseScalingSm120<.*?> ?>, cute::tuple<cute::C<(\d+)>, "
    r"cute::C<(\d+)>, cute::C<(\d+)> ?>"
)
#: A layout of scales: rows (or columns) to a scale, 128 of K to a scale, and the stride along the
#: first, which is 1 or not known before run time.
SCALES = re.compile(
    r"cute::Layout<cute::tuple<cute::tuple<cute::C<(\d+)>, int>, cute::tuple<cute::C<128>, int>, "
    r"int>, cute::tuple<cute::tuple<cute::C<0>, (cute::C<1>|int)"
)
OUTPUT = re.compile(r"CollectiveEpilogue<.*?cutlass::(bfloat16|half)_t")


def signature(demangled: str) -> dict[str, str] | None:
    """Return tile, schedule, layout of the scales and output type, from a kernel's demangled name.

    None for a kernel with one activation scale per 128 rows, which FlashInfer has too.

    The tile is given as tokens x features: where the weight stands first (its scales then have 128
    rows to a block, a token's have one), CUTLASS's own order is turned round.
    """
    shape, output = SHAPE.search(demangled), OUTPUT.search(demangled)
    layouts = SCALES.findall(demangled)
    if shape and output and {rows for rows, _ in layouts} == {"128"}:
        return None
    if shape is None or output is None or {rows for rows, _ in layouts} != {"1", "128"}:
        raise Failure(f"a kernel of another make: {demangled[:200]}")
    schedule, m, n, k = shape.groups()
    if layouts[0][0] == "128":
        m, n, schedule = n, m, f"{schedule}, weight first"
    if "StreamKScheduler" in demangled:
        schedule += ", Stream-K"
    return {
        "tile": f"{m}x{n}x{k}",
        "schedule": schedule.lower(),
        "output": {"bfloat16": "bfloat16", "half": "float16"}[output[1]],
        "activation_scales": "along K" if dict(layouts)["1"] == "int" else "along M",
        "weight_scales": "along K" if dict(layouts)["128"] == "int" else "along N",
    }


def failures(kernels: list[Kernel]) -> list[str]:
    """Return what is wrong with a subject's kernels; nothing where all multiply FP8 natively."""
    wrong = [f"no kernel with {kind} output" for kind in ("bfloat16", "float16")
             if kind not in {kernel.output for kernel in kernels}]  # fmt: skip
    for kernel in kernels:
        if not any(op.startswith("QMMA") for op in kernel.mma):
            wrong.append(f"{kernel.tile} {kernel.schedule}: no FP8 tensor-core instruction")
        if any(op.startswith("HMMA") for op in kernel.mma):
            wrong.append(f"{kernel.tile} {kernel.schedule}: FP8 is emulated in f16")
    return wrong


def _run(*command) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode:
        raise Failure(f"{command[0]}: {result.stderr[-400:]}")
    return result.stdout


def markdown(kernels: list[dict]) -> str:
    """Return the table of docs/cutlass.md, the bf16 rows of a record."""
    lines = ["| kernel | tile | schedule | activation scales | registers | stack | spills | mma |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in kernels:
        if row["output"] == "bfloat16":
            mma = ", ".join(f"{count} {op}" for op, count in row["mma"].items())
            lines.append(
                f"| {row['subject']} | {row['tile']} | {row['schedule']} | "
                f"{row['activation_scales']} | {row['registers']} | {row['stack']} | "
                f"{row['spills']} | {mma} |"
            )
    return "\n".join(lines)


def _nvcc_version() -> str | None:
    nvcc = shutil.which("nvcc")
    found = re.search(r"release (\S+), (\S+)", _run(nvcc, "--version")) if nvcc else None
    return found[2] if found else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hosts.cutlass_aot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("which", nargs="*", help="parts of the names of subjects; default: all")
    parser.add_argument("--json", type=Path, help="write a record of the table to this file")
    chosen = parser.parse_args(arguments)
    names = [n for n in SUBJECTS if not chosen.which or any(w in n for w in chosen.which)]
    if not names:
        parser.error(f"nothing is called that; there are {', '.join(SUBJECTS)}")
    rows, wrong = [], {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            try:
                found = [kernel for cubin in cubins(name, SUBJECTS[name])
                         for kernel in read(name, cubin)]  # fmt: skip
                wrong[name] = failures(found)
            except (Failure, lab.LabError) as error:
                found, wrong[name] = [], [str(error)]
            rows += sorted(found, key=lambda kernel: (kernel.tile, kernel.schedule, kernel.output))
            progress.advance(task)
    table = Table("kernel", "tile", "schedule", "output", "scales", "registers", "stack", "spills",
                  "mma")  # fmt: skip
    for row in rows:
        mma = " ".join(f"{n} {op}" for op, n in row.mma.items())
        table.add_row(row.subject, row.tile, row.schedule, row.output,
                      f"{row.activation_scales}, {row.weight_scales}", str(row.registers),
                      str(row.stack), str(row.spills), mma)  # fmt: skip
    Console(width=160).print(table)
    faults = [f"{name}: {text}" for name, texts in wrong.items() for text in texts]
    for fault in faults:
        console.print(fault, style="red", markup=False)
    if chosen.json:
        record = {"schema": 1, "ok": not faults, "nvcc": _nvcc_version(),
                  "kernels": [asdict(row) for row in rows]}  # fmt: skip
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
