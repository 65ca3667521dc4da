"""Compile what a launch would compile, for a GPU that need not be here, and launch nothing.

The launchers run as they are, on tensors without memory; in place of a jitted kernel they get a
stand-in that compiles for the target asked for. Nothing of Triton is replaced, so this may also run
inside a server.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import subprocess
import tempfile
import threading
from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_kt_sm120 import kernels
from sglang_kt_sm120.backends import triton as backend
from sglang_kt_sm120.heuristic import Config
from sglang_kt_sm120.kernels import probe

N, K = 4096, 4096  # of the layer that is compiled for; N is a multiple of 16, as models' are
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_asking = threading.Lock()
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.float8_e4m3fn: "*fp8e4nv",
}


class Compiler:
    """What launchers may use in place of a jitted kernel; keeps what it compiled, in order."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)
        self.compiled: list = []

    def __call__(self, kernel):
        """Return something to launch `kernel` with that compiles it instead."""
        return _Launched(kernel, self)


@dataclass
class _Launched:
    kernel: triton.JITFunction
    compiler: Compiler

    def __getitem__(self, grid):
        return self._compile

    def _compile(self, *arguments, **named) -> None:
        """Compile for these arguments, specialised as Triton specialises them: 16-byte alignment
        of every pointer and of integers that are multiples of 16, but for those marked."""
        kernel = self.kernel
        constants = {name: named.pop(name) for name in kernel.arg_names if name in named}
        signature, values, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            name = parameter.name
            if name in constants:
                signature[name] = "constexpr"
                values[(index,)] = constants[name]
                continue
            argument = arguments[index]
            pointer = isinstance(argument, torch.Tensor)
            signature[name] = _POINTERS[argument.dtype] if pointer else "i32"
            if pointer or (argument % 16 == 0 and not parameter.do_not_specialize):
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
        made = triton.compile(source, target=self.compiler.target, options=named)
        self.compiler.compiled.append(made)


def _lowering(capability: int) -> dict[str, str]:
    """On 121 and 90 a kernel is lowered as for 120, which is how the plugin launches it there."""
    return {} if capability == 120 else {"arch": "sm120"}


def compile_config(config: Config | None, arch: str, *, dtype: str = "bf16", pdl: bool = True):
    """Compile one variant for an architecture. Needs no GPU.

    Args:
        config: the variant, or None for the quantisation kernel.
        arch: "sm_120a", "sm_121a" or "sm_90a".
        dtype: of activations and output, "bf16" or "fp16".
        pdl: as launched with dependent launch.

    Returns:
        Triton's compiled kernel (`asm`, `metadata`).

    Raises:
        Whatever Triton or its ptxas raises where it cannot compile for `arch`.
    """
    capability = int(re.sub(r"\D", "", arch))
    compiler, lowering = Compiler(capability), _lowering(capability)
    rows = config.block_m if config else 16
    x = torch.empty(rows, K, dtype=DTYPES[dtype], device="meta")
    if config is None:
        options = lowering | ({"launch_pdl": True} if pdl else {})
        kernels.quantise(x, options=options, through=compiler)
        return compiler.compiled[0]
    scale = None
    if not config.fused:
        x = torch.empty(rows, K, dtype=torch.float8_e4m3fn, device="meta")
        scale = torch.empty(K // 128, rows, dtype=torch.float32, device="meta").t()
    weight = torch.empty(N, K, dtype=torch.float8_e4m3fn, device="meta")
    weight_scale = torch.empty(N // 128, K // 128, dtype=torch.float32, device="meta")
    counters = torch.empty(N, dtype=torch.int32, device="meta")
    call = backend.plan(config, N, K, arch=lowering.get("arch"), pdl=pdl, through=compiler)
    call(x, weight, weight_scale, scale, DTYPES[dtype], config, counters)
    return compiler.compiled[0]


@dataclass(frozen=True)
class Features:
    """What this Triton makes for an architecture, found by compiling two or three small products.

    Attributes:
        fp8: FP8 products are FP8 tensor-core instructions; without it they become f16 ones.
        block_scale: unit-scale `tl.dot_scaled` becomes the block-scaled FP8 instruction.
        tokens: the fewest tokens a product's tile may have, 8 or 16.
    """

    fp8: bool
    block_scale: bool
    tokens: int


def features(arch: str) -> Features:
    """Ask the compiler what it can do for `arch` ("sm_120a"), once per process.

    Raises:
        Whatever Triton or its ptxas raises where it cannot compile for `arch` at all.
    """
    with _asking:  # stdout is the whole process's: one at a time may turn it away
        return _features(arch)


@functools.cache
def _features(arch: str) -> Features:
    capability = int(re.sub(r"\D", "", arch))

    def ptx(m: int, n: int, unit_scaled: bool = False) -> str:
        compiler = Compiler(capability)
        probe.probe(m, n, unit_scaled, _lowering(capability), through=compiler)
        return compiler.compiled[0].asm["ptx"]

    plain = ptx(64, 64)  # every Triton has this: an error here is the assembler's
    return Features(
        fp8=re.search(r"mma\.sync\S*\.e4m3", plain) is not None,
        block_scale=_tried(lambda: "block_scale" in ptx(64, 64, True), False),
        tokens=_tried(lambda: ptx(64, 8) and 8, 16),
    )


def _tried(question, otherwise):
    try:
        # Triton prints a kernel that its assembler refuses: no finding for a server's log.
        with contextlib.redirect_stdout(io.StringIO()):
            return question()
    except Exception:  # however a compiler says no: there are as many ways as versions
        return otherwise


def assembler_knows(arch: str) -> bool:
    """Whether the ptxas that this Triton uses can assemble for `arch` (3.5.1's: not sm_121a)."""
    from triton.backends.nvidia import compiler

    try:
        ptxas = compiler.get_ptxas(int(re.sub(r"\D", "", arch)))
    except TypeError:  # before 3.6 there is one for all
        ptxas = compiler.get_ptxas()
    path = getattr(ptxas, "path", ptxas)
    path = path[0] if isinstance(path, tuple) else path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(".version 8.0\n.target sm_80\n.address_size 64\n")
        file.flush()
        command = [path, f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        result = subprocess.run(command, capture_output=True, text=True)
    return "is not defined for option" not in result.stderr
