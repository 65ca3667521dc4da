"""The host's CUTLASS kernels for block FP8 on SM12x, and the limits that their own sources set.

Read in the released sources and in the shipped images; docs/cutlass.md has the releases, and how
`make cutlass-aot` checks them. `select` decides by these facts and `explain` prints them: nothing
here imports, builds or runs a kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

#: Each kernel takes whole 128 x 128 weight blocks only. CUTLASS's SM120 blockwise collective
#: refuses anything else (`can_implement` of sm120_mma_tma_blockwise_scaling.hpp).
WHOLE_BLOCKS = 128


@dataclass(frozen=True)
class Kernel:
    """One of the host's kernels.

    Attributes:
        name: How `SGLANG_KT_SM120_DISABLED_BACKENDS`, tables and `explain` call it.
        title: What a person knows it by.
        capabilities: Compute capabilities that it is built for, as far as its source says.
        tiles: (largest M, tile of tokens x features x K) in rising order; None is every larger M.
        pad_above: Above this many rows it wants a multiple of `rows`; see `padded`.
        rows: That multiple, 4 for all of them today.
        column_major: Activation scales lie with stride 1 along M, in whole columns of `padded` M;
            else they are row-major `[M, K/128]`.
        odd_rows: What it does with other row counts by itself.
        needs: What must be there before its first call.
        distributions: Who may bring it: what of them is installed is its version.
        note: What else its source says that could stop it.
    """

    name: str
    title: str
    capabilities: tuple[tuple[int, int], ...]
    tiles: tuple[tuple[int | None, str], ...]
    pad_above: int
    rows: int
    column_major: bool
    odd_rows: str
    needs: str
    distributions: tuple[str, ...]
    note: str = ""

    def padded(self, m: int) -> int:
        """Return how many rows a product of `m` rows is launched with."""
        return m if m <= self.pad_above else m + -m % self.rows

    def refuses(self, n: int, k: int, capability: tuple[int, int]) -> str | None:
        """Return why this kernel cannot take an `[n, k]` weight on this capability, or None."""
        if n % WHOLE_BLOCKS or k % WHOLE_BLOCKS:
            return f"{n} x {k} is not in whole 128 x 128 blocks"
        if capability not in self.capabilities:
            known = " and ".join(f"{major}.{minor}" for major, minor in self.capabilities)
            return f"built for {known}, not for {capability[0]}.{capability[1]}"
        return None

    def limits(self) -> str:
        """Return the recorded limits in one line, as `explain` prints them."""
        tiles = " then ".join(f"{tile}{f' to M={m}' if m else ''}" for m, tile in self.tiles)
        above = f" above {self.pad_above}" if self.pad_above else ""
        built = " and ".join("{}.{}".format(*capability) for capability in self.capabilities)
        return (
            f"tile {tiles}; N and K multiples of {WHOLE_BLOCKS}; M padded to a multiple of "
            f"{self.rows}{above}, since it {self.odd_rows}; built for {built}"
            f"{f' ({self.note})' if self.note else ''}; needs {self.needs}"
        )


#: In the order in which they are tried. An image that is already compiled comes first.
KERNELS = (
    Kernel(
        "sgl_kernel",
        "sgl-kernel's fp8_blockwise_scaled_mm",
        ((12, 0),),
        ((None, "128x128x128"),),
        pad_above=0,
        rows=4,
        column_major=True,
        odd_rows="copies its input to pad M % 4",
        needs="an sgl_kernel with this op",
        distributions=("sgl-kernel", "sglang-kernel", "kt-kernel"),  # one folder, three owners
    ),
    Kernel(
        "sglang_jit",
        "sglang's own JIT kernel",
        ((12, 0), (12, 1)),
        # The first releases (sglang-kt 0.7, sglang 0.5.16 and 0.5.17); later ones go on to M 128
        # with the narrow tile, and to 256 with 64x128x128.
        ((64, "32x128x128"), (None, "128x128x128")),
        pad_above=64,
        rows=4,
        column_major=True,
        odd_rows="takes its decode tile for M % 4",
        needs="nvcc 12.8 or newer at its first use",
        distributions=("sglang-kt", "sglang"),
        note="sglang-kt's source names 12.0a for any card, which a 12.1 cannot load; the probe "
        "decides",
    ),
    Kernel(
        "flashinfer",
        "FlashInfer's gemm_fp8_nt_groupwise (cutlass)",
        ((12, 0), (12, 1)),
        ((None, "128x128x128"),),
        pad_above=0,
        rows=4,
        column_major=False,
        odd_rows="asks for M % 4 = 0, and would leave the output unwritten for other N or K",
        needs="nvcc 12.8 or newer at its first use",
        distributions=("flashinfer-python",),
    ),
)
NAMES = tuple(kernel.name for kernel in KERNELS)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


@functools.cache
def versions() -> dict[str, str]:
    """Return what of each kernel's distributions is installed, read from metadata: name -> text.

    A kernel is left out where none is: not there, or not to be told from another version of it.
    """
    from importlib import metadata

    found: dict[str, list[str]] = {}
    for kernel in KERNELS:
        for name in kernel.distributions:
            try:
                version = metadata.version(name)
            except Exception:  # not installed, or metadata that nobody can read
                continue
            if version:  # None where an interrupted pip left an empty folder
                found.setdefault(kernel.name, []).append(f"{name} {version}")
    return {name: ", ".join(listed) for name, listed in found.items()}


#: What else the hosts carry for this product on SM12x, and why it is not taken.
REJECTED = {
    "flashinfer cutile": "it times 24 candidates at the first call with each M, so ranks, restarts "
    "and CUDA graphs would differ, and capture would fail",
    "flashinfer b12x": "it requantises to MXFP8, whose scales are powers of two",
}


@dataclass(frozen=True)
class Cutlass:
    """The configuration of backend "cutlass": which of the host's kernels serves.

    Attributes:
        kernel: One of `NAMES`.
    """

    kernel: str

    def variant(self) -> Cutlass:
        """Return what is compiled for this configuration: the kernel itself."""
        return self


@dataclass(frozen=True)
class Known:
    """What this process knows of the host's kernels for one `[n, k]` weight, dtype and device.

    Attributes:
        proven: Kernels that passed their probe, in the order of preference.
        struck: (kernel, why not) of those that did not.
        host_default: The kernel that the host's own `auto` on this GPU takes, "" where that is no
            CUTLASS.
    """

    proven: tuple[str, ...] = ()
    struck: tuple[tuple[str, str], ...] = ()
    host_default: str = ""


def unusable(
    config: Any,
    n: int,
    k: int,
    capability: tuple[int, int],
    recorded: dict[str, str],
    here: dict[str, str] | None,
) -> str | None:
    """Return why a tuned row that names a kernel of the host's cannot stand, or None.

    Args:
        config: The row's: {"kernel": one of `NAMES`}, or None for whichever is proven.
        n, k, capability: The weight's shape, and the GPU's.
        recorded: `versions` when the row was tuned; other keys are not read.
        here: `versions` of this environment, or None: any that is recorded will do.
    """
    if config is not None and (not isinstance(config, dict) or config.keys() != {"kernel"}):
        return f'configuration {config!r} is neither {{"kernel": NAME}} nor null'
    named = NAMES if config is None else (config["kernel"],)
    if named[0] not in NAMES:
        return f"kernel {named[0]!r} is none of {', '.join(NAMES)}"
    refusals = {name: BY_NAME[name].refuses(n, k, capability) for name in named}
    able = [name for name, why in refusals.items() if why is None]
    if not able:
        return "; ".join(f"{name}: {why}" for name, why in refusals.items())
    then = {name: recorded[name] for name in able if recorded.get(name)}
    if not then:
        return f"no version of {' or '.join(able)} is recorded: it may be another kernel now"
    now = then if here is None else {name: here[name] for name in able if name in here}
    if now != then:
        return f"it was tuned with {_said(then)}, here is {_said(now)}; tune again"
    return None


def _said(found: dict[str, str]) -> str:
    return "; ".join(f"{name} of {version}" for name, version in found.items()) or "none"
