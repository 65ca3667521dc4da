"""The host's CUTLASS kernels for block FP8 on SM12x, and the limits that their own sources set.

Read in the released sources and in the shipped images; docs/cutlass.md has the releases, and how
`make cutlass-aot` checks them. `select` decides by these facts and `explain` prints them: nothing
here imports, builds or runs a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        return f"tile {tiles}; {self.odd_rows}; needs {self.needs}"


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
        needs="nvcc at its first use",
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
        needs="nvcc at its first use",
    ),
)
NAMES = tuple(kernel.name for kernel in KERNELS)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}

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
