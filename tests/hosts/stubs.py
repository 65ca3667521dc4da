"""The one place where a real sglang host is helped over what a machine without a GPU lacks.

`put_on(capability)` before sglang is imported makes torch answer as if one GPU of that compute
capability were there. Everything that decides between FP8 functions is then the host's own code:
`is_blackwell_supported`, `is_sm90_supported`, `is_sm120_supported`, `get_device_sm`, DeepGEMM's
`_compute_enable_deep_gemm`, FlashInfer's `backend_requirement`. Replaced, and nothing else:

- **torch.cuda**: is_available, device_count, get_device_capability, get_device_name,
  get_device_properties, and torch.version.cuda where torch has none. On a machine with a GPU only
  the capability and the name.
- **absent packages** (torchvision, sgl_kernel): a module without content, only where the real one
  cannot be found. Whatever is called in them is a Mock; fakes of sgl_kernel's ops are not kept.
- **ops that sglang registers for CUDA** are registered for the CPU too, with the same body.
- **activation quantisation**: `per_token_group_quant_8bit`, CUDA built at run time, by the same
  arithmetic in torch.
- **FlashInfer's look at a tensor's device**, which refuses CPU tensors before it looks further.
- **parallel_state.is_cuda_alike**: the tensor-parallel group of one lives on the CPU, through gloo.
- **deep_gemm**, only on request: a package whose GEMM raises, as the real one does on SM120; its
  pre-compilation is off.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import stat
import sys
import tempfile
import types
from pathlib import Path
from unittest.mock import MagicMock

ABSENT = ("torchvision", "sgl_kernel")
#: Memory that the stand-in reports, in MiB: the RTX PRO 6000 of the first report.
MEMORY_MIB = 97887
#: What DeepGEMM's assertions say on a GPU that it has no kernel for, as public reports quote them.
DEEP_GEMM_REFUSALS = {
    "recipe": "Assertion error (deepgemm/csrc/utils/layout.hpp:56): Unknown recipe",
    "architecture": "Assertion error (deepgemm/csrc/apis/gemm.hpp:376): Unsupported architecture",
}


class _Nothing(types.ModuleType):
    """A package that can be imported, and whose every attribute is a Mock."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Finder:
    """Last on `sys.meta_path`: asked only for what no other finder has."""

    def __init__(self, roots: tuple[str, ...], fill=None):
        self.roots, self.fill = roots, fill

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Nothing(spec.name)

    def exec_module(self, module):
        if self.fill is not None:
            self.fill(module)


def absent() -> None:
    """Let packages that a machine without a GPU lacks be imported, empty. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(ABSENT))


def put_on(capability: tuple[int, int], deep_gemm: str | None = None) -> None:
    """Present this machine as one with a GPU of `capability`. Call before sglang is imported.

    Args:
        capability: Compute capability of the stand-in, for example `(12, 0)`.
        deep_gemm: A key of `DEEP_GEMM_REFUSALS` makes the package importable, raising that;
            None leaves it as it is (absent in the hosts of lab.py).
    """
    if "sglang" in sys.modules:
        raise RuntimeError("put_on comes too late: sglang has been imported")
    absent()
    if deep_gemm is not None:
        os.environ["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] = "0"  # it would allocate on the GPU
        message = DEEP_GEMM_REFUSALS[deep_gemm]
        sys.meta_path.append(_Finder(("deep_gemm",), lambda module: _deep_gemm(module, message)))
    _torch(capability)
    _flashinfer(capability)


def after_import() -> None:
    """Replace what lies inside sglang's own modules. Call once sglang's fp8 is imported."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.quantization import fp8_kernel

    fp8_kernel.sgl_per_token_group_quant_8bit_jit = quantise
    parallel_state.is_cuda_alike = lambda: False


def one_rank() -> None:
    """Start a tensor-parallel group of one, which sglang's layers ask for their size."""
    from sglang.srt import distributed

    rendezvous = f"file://{tempfile.mkdtemp(prefix='sglang-kt-sm120-')}/store"
    distributed.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=rendezvous, backend="gloo"
    )
    distributed.initialize_model_parallel(1)


def quantise(
    input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0=False
) -> None:
    """Fill `output_q` and `output_s` as sglang's `per_token_group_quant_8bit` does on CUDA."""
    import torch

    groups = input.float().unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(-1).clamp_min(eps) / fp8_max
    if scale_ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    output_q.copy_((groups / scale[..., None]).clamp(fp8_min, fp8_max).flatten(-2))
    output_s.copy_(_pack_exponents(scale) if output_s.dtype == torch.int32 else scale)


def nvidia_smi() -> None:
    """Put an `nvidia-smi` on PATH that knows the memory size: ServerArgs asks it."""
    folder = Path(tempfile.mkdtemp(prefix="sglang-kt-sm120-"))
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho {MEMORY_MIB}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def _torch(capability: tuple[int, int]) -> None:
    """torch.cuda as on a machine with one such card; with a real GPU only what it is called."""
    import torch

    has_gpu = torch.cuda.is_available()
    if has_gpu:  # Triton must go on compiling for the card that is here
        from triton.runtime import driver

        driver.active.get_current_target()
    name = f"stand-in GPU of capability {capability[0]}.{capability[1]}"
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_name = lambda device=None: name
    _torch_library(torch)
    if has_gpu:
        return
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.version.cuda = torch.version.cuda or "12.9"
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        total_memory=MEMORY_MIB << 20,
        multi_processor_count=188,
        shared_memory_per_block_optin=101376,
        L2_cache_size=128 << 20,
    )


def _torch_library(torch) -> None:
    """Let sglang's own CUDA ops take CPU tensors, and let fakes of absent ops go unregistered."""
    register_fake, impl = torch.library.register_fake, torch.library.Library.impl

    def register_fake_of_what_exists(op, *args, **kwargs):
        if isinstance(op, str) and op.startswith("sgl_kernel::"):
            return lambda function: function
        return register_fake(op, *args, **kwargs)

    def impl_for_cpu_too(self, name, function, key="", **kwargs):
        impl(self, name, function, key, **kwargs)
        if self.ns == "sglang" and key == "CUDA":
            impl(self, name, function, "CPU", **kwargs)

    if isinstance(importlib.util.find_spec("sgl_kernel").loader, _Finder):
        torch.library.register_fake = register_fake_of_what_exists
    torch.library.Library.impl = impl_for_cpu_too


def _flashinfer(capability: tuple[int, int]) -> None:
    import flashinfer.utils

    flashinfer.utils.get_compute_capability = lambda device: capability


def _deep_gemm(module: types.ModuleType, message: str) -> None:
    """Fill a deep_gemm whose layout helper works and whose GEMM refuses, as on SM120."""

    def refuse(*args, **kwargs):
        raise RuntimeError(message)

    if module.__name__ == "deep_gemm":
        module.fp8_gemm_nt = refuse
    elif module.__name__ == "deep_gemm.utils.layout":
        module.get_mn_major_tma_aligned_packed_ue8m0_tensor = _pack_exponents


def _pack_exponents(scale):
    """Four UE8M0 exponents to an int32, K padded to a multiple of four groups."""
    import torch

    exponents = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4))
    return padded.contiguous().view(torch.int32)
