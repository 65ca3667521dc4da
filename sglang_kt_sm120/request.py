"""What the user asked for: `--fp8-gemm-backend`, or a variable of an old release.

Hosts rewrite it before dispatch sees it, each era in its own way; here is the one place that knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from sglang_kt_sm120 import env

#: Variables of old releases that ask for a backend while --fp8-gemm-backend is "auto".
REQUEST_VARIABLES = {
    "SGLANG_ENABLE_FLASHINFER_FP8_GEMM": "flashinfer_trtllm",
    "SGLANG_ENABLE_FLASHINFER_GEMM": "flashinfer_trtllm",
    "SGLANG_SUPPORT_CUTLASS_BLOCK_FP8": "cutlass",
}


#: sglang's linear functions whose kernels SM12x lacks, in the releases where we take their place.
WITHOUT_A_KERNEL = (
    "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback",
    "deepgemm_w8a8_block_fp8_linear_with_fallback",
)
TRITON = "triton_w8a8_block_fp8_linear"


@dataclass(frozen=True)
class Request:
    """What was asked for, and how: `backend` as `--fp8-gemm-backend` names it."""

    backend: str
    source: str  # "--fp8-gemm-backend cutlass", "SGLANG_...=1", or "" for the default


def what_serves(fp8_utils, stock: Callable) -> Callable:
    """Return `stock`, or sglang's Triton function where `stock` would end the server on SM12x."""
    hopeless = [getattr(fp8_utils, name, None) for name in WITHOUT_A_KERNEL]
    function = getattr(stock, "func", stock)  # newer releases hand out partials of them
    return getattr(fp8_utils, TRITON, stock) if function in hopeless else stock


def requested(fp8_utils) -> Request:
    """Return what the user asked for, not what the host has turned it into.

    sglang >= 0.5.10 rewrites "auto" on SM120 before dispatch sees it, and old releases turn a
    variable into a backend; so the server argument is read first, then the variables.
    """
    argument = server_argument(fp8_utils, "fp8_gemm_runner_backend")
    resolved = getattr(fp8_utils, "get_fp8_gemm_runner_backend", None)
    resolved = "auto" if resolved is None else str(resolved().value)
    if argument not in (None, "auto"):
        return Request(argument, f"--fp8-gemm-backend {argument}")
    for variable, backend in REQUEST_VARIABLES.items():
        if resolved in (backend, "auto") and _variable_counts(fp8_utils, variable, resolved):
            return Request(backend, f"{variable}={os.environ[variable]}")
    if argument is None and resolved != "auto":
        return Request(resolved, f"--fp8-gemm-backend {resolved}")
    return Request("auto", "")


def server_argument(fp8_utils, name: str):
    """Return a server argument of this process, or None where no server was configured."""
    try:
        if hasattr(fp8_utils, "get_exec"):  # sglang >= 0.5.17 keeps arguments in bags
            bag = fp8_utils.get_exec()
            bag = bag.deterministic if name == "enable_deterministic_inference" else bag.kernel
            return getattr(bag, name, None)
        from sglang.srt.server_args import get_global_server_args

        return getattr(get_global_server_args(), name, None)
    except Exception:  # tools build layers without a server; every era raises something else
        return None


def _variable_counts(fp8_utils, variable: str, resolved: str) -> bool:
    """True where `variable` is set and this host lets it decide.

    0.5.5 to 0.5.6 read it at import, into a flag; later hosts in `initialize_fp8_gemm_config`,
    which leaves its answer in `resolved`.
    """
    if os.environ.get(variable, "").strip().lower() not in env.TRUE:
        return False
    if not hasattr(fp8_utils, "get_fp8_gemm_runner_backend"):
        flags = {
            "flashinfer_trtllm": ("ENABLE_FLASHINFER_GEMM", "ENABLE_FLASHINFER_FP8_GEMM"),
            "cutlass": ("CUTLASS_BLOCK_FP8_SUPPORTED",),
        }
        return any(getattr(fp8_utils, flag, False) for flag in flags[REQUEST_VARIABLES[variable]])
    return resolved == REQUEST_VARIABLES[variable] and _reads(fp8_utils, variable)


def _reads(fp8_utils, variable: str) -> bool:
    """True where the host still reads the variable: sglang >= 0.5.10 does not."""
    initialise = getattr(fp8_utils, "initialize_fp8_gemm_config", None)
    names = initialise.__code__.co_names if initialise else ()
    canonical = variable.replace("ENABLE_FLASHINFER_GEMM", "ENABLE_FLASHINFER_FP8_GEMM")
    return canonical in names
