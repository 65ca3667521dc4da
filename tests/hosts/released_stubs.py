"""What stubs.py replaces, where the other releases keep it; and nothing that decides anything."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import tempfile
from pathlib import Path

#: Third-party modules that some release imports on the way to its FP8 layers, none of which takes
#: part in their choice: an empty module where the real one is absent.
ABSENT = ("torchao", "torch_memory_saver", "torchcodec", "torchaudio", "cuda")
#: Modules that hold the activation quantisation built at run time, newest first.
QUANTISERS = (
    ("sglang.kernels.ops.gemm.fp8_kernel", "sgl_per_token_group_quant_8bit_jit"),
    ("sglang.kernels.ops.quantization.fp8_kernel", "sgl_per_token_group_quant_8bit_jit"),
    ("sglang.srt.layers.quantization.fp8_kernel", "sgl_per_token_group_quant_8bit_jit"),
    ("sglang.srt.layers.quantization.fp8_kernel", "sgl_per_token_group_quant_8bit"),
    ("sglang.srt.layers.quantization.fp8_kernel", "sgl_per_token_group_quant_fp8"),
)


def before_import() -> None:
    """Load CUDA's run-time library. Call before anything is imported.

    FlashInfer looks for libcudart among the libraries that the
    process has loaded; torch's CUDA builds load it, its CPU build has none.
    """
    import stubs

    stubs.absent()
    finder = next(f for f in sys.meta_path if isinstance(f, stubs._Finder))
    finder.fill = _give_version
    spec = importlib.util.find_spec("nvidia.cuda_runtime")
    for folder in spec.submodule_search_locations if spec else ():
        for library in Path(folder).glob("lib/libcudart.so*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def absent() -> None:
    """Let the absent modules be imported; not sooner, or transformers would take them for real."""
    import stubs

    finder = next(f for f in sys.meta_path if isinstance(f, stubs._Finder))
    finder.roots = tuple({*finder.roots, *ABSENT})


def same_capability() -> None:
    """Let FlashInfer's modules that hold a copy of it use stubs.py's look at a tensor's device."""
    import flashinfer.utils

    for name, module in tuple(sys.modules.items()):
        if name.startswith("flashinfer.") and hasattr(module, "get_compute_capability"):
            module.get_compute_capability = flashinfer.utils.get_compute_capability


def _give_version(module) -> None:
    """transformers compares torchvision's version when it is imported."""
    module.__version__ = "0.24.1"


def quantise(
    input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0=False, *flags, **newer
) -> None:
    """As stubs.quantise, with the arguments that other releases pass on."""
    import stubs

    stubs.quantise(input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0)


def after_import() -> None:
    """Replace what lies inside sglang's own modules. Call once sglang's fp8 is imported."""
    for module_name, name in QUANTISERS:
        module = sys.modules.get(module_name)
        if module is not None and hasattr(module, name):
            setattr(module, name, quantise)
    from sglang.srt.distributed import parallel_state

    parallel_state.is_cuda_alike = lambda: False


def one_rank() -> None:
    """As stubs.one_rank: newer releases take the group's size from their arguments, not from us."""
    from sglang.srt import distributed

    rendezvous = f"file://{tempfile.mkdtemp(prefix='sglang-kt-sm120-')}/store"
    distributed.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=rendezvous, backend="gloo"
    )
    distributed.initialize_model_parallel(backend="gloo")
