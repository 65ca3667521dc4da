"""The host's own CUTLASS kernels (limits.py), behind our quantisation, each proven before use.

`offer` takes what the host has, `prove` probes kernels at load, `known` says what came of it, and
`run` multiplies with the one that a configuration names. Nothing is derived from the weights: each
kernel reads the weight and its scales as the checkpoint has them, transposed as views where it
wants them so. The activation is quantised by our kernel straight into the layout, and the number
of rows, that the kernel wants.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from sglang_kt_sm120 import limits
from sglang_kt_sm120.backends.cutlass import agreement, libraries, proof

logger = logging.getLogger("sglang_kt_sm120")
NAME = "cutlass"

_kernels: dict[str, libraries.Product] = {}  # loaded: name -> product of quantised operands
_broken: dict[str, str] = {}  # name -> why it can serve no shape in this process
_proven: dict[tuple, dict[str, str | None]] = {}  # (device, n, k, dtype) -> name -> why not
_host_kernel: str | None = None  # the kernel of the host's own `auto`
_group: agreement.Group | None = None
_devices: list[int | None] = []  # that verdicts were asked for, in their order
_compared: dict[tuple, str | None] = {}  # (ranks, question) -> why they differ


def offer(product: Callable | None, *, is_default: bool) -> None:
    """Take the function that the host's own CUTLASS linear multiplies with.

    Args:
        product: The host's `fp8_blockwise_scaled_mm`, or None where it has none.
        is_default: The host's `auto` on this GPU is that linear.
    """
    global _host_kernel
    name = libraries.offer(product)
    _host_kernel = name if is_default else None


def join(store, rank: int, ranks: tuple[int, ...]) -> None:
    """Take the ranks that have to come to the same verdicts.

    Args:
        store: A `torch.distributed.Store` that all of them reach; None where one rank is alone.
        rank, ranks: This one, and all of them.
    """
    global _group
    if store is None or len(ranks) < 2:
        _group = None
    elif _group is None or (_group.store, _group.rank, _group.ranks) != (store, rank, ranks):
        _group = agreement.Group(store, rank, ranks)


def forget() -> None:
    """Forget every kernel, verdict and rank, and what was offered (tests)."""
    global _host_kernel, _group
    _host_kernel = _group = None
    for memory in (_kernels, _broken, _proven, _devices, _compared):
        memory.clear()
    libraries.forget()


def known(index: int | None, n: int, k: int, dtype: torch.dtype) -> limits.Known:
    """Return what this process knows of the kernels for an `[n, k]` weight on CUDA device `index`.

    `dtype` is that of the activations. The host's own kernel comes first among the proven ones, so
    that serving untuned changes as little as may be.
    """
    verdicts = _proven.get((index, n, k, dtype), {})
    good = [name for name in _order(limits.NAMES) if verdicts.get(name, "") is None]
    bad = tuple((name, why) for name, why in verdicts.items() if why is not None)
    return limits.Known(tuple(good), bad, _host_kernel or "")


def prove(
    device: torch.device,
    n: int,
    k: int,
    dtype: torch.dtype,
    named: tuple[str, ...],
    anyone: tuple[str, ...],
    *,
    arch: str | None = None,
) -> limits.Known:
    """Probe kernels on a random layer of this shape; a verdict holds for the life of the process.

    Called at load, never during capture. A kernel that is wrong, raises, or leaves its output
    unwritten is struck off with one warning; an error that has nothing to do with the shape (a
    library that is not there, a build that fails) strikes it off for every shape.

    Args:
        device, n, k, dtype: The layer: its CUDA device, its weight's shape, its activations.
        named: Kernels that are probed whatever else is known.
        anyone: Kernels of which the first that is right will do.
        arch: Triton's launch option for our quantisation kernel, or None.

    Returns:
        `known` of this shape.
    """
    verdicts = _proven.setdefault((device.index, n, k, dtype), {})

    def probe(name: str) -> bool:
        if name not in verdicts:
            verdicts[name] = _probe(name, device, n, k, dtype, arch)
        return verdicts[name] is None

    for name in named:
        probe(name)
    for name in _order(anyone):
        if probe(name):
            break
    return known(device.index, n, k, dtype)


def _order(names: tuple[str, ...]) -> list[str]:
    return sorted(names, key=lambda name: name != _host_kernel)


def _probe(name, device, n: int, k: int, dtype: torch.dtype, arch: str | None) -> str | None:
    """Return None where every rank found the kernel right on this shape, else why not; warn."""
    why = _broken.get(name)
    if why is None:
        why = _load(name) or proof.judge(_kernels[name], name, device, n, k, dtype, arch)
        lasts = bool(why) and (name not in _kernels or libraries.concerns_every_shape(why))
        if lasts:
            _broken[name] = why
        if why and libraries.is_installed(name):
            logger.warning(
                "sglang-kt-sm120: %s is not used for N=%d K=%d%s: %s",
                limits.BY_NAME[name].title, n, k, ", nor for any other layer" if lasts else "", why,
            )  # fmt: skip
    return agreed(f"{name}/{n}x{k}/{dtype}", device, why)


def agreed(question: str, device: torch.device, why: str | None) -> str | None:
    """Return the verdict of all ranks on `question`, where `why` is this one's: None for yes.

    Every rank has to ask, in any order. A process with layers on several devices asks for each:
    its first device means every rank's first, whatever their numbers are.
    """
    return why if _group is None else agreement.settle(_group, _named(question, device), why)


def same(question: str, device: torch.device, value: str, *, wait: bool) -> str | None:
    """Return None where all ranks say the same (see `agreement.same`), asked once per device."""
    if _group is None:
        return None
    key = (_group.ranks, _named(question, device))
    if key not in _compared:
        _compared[key] = agreement.same(_group, key[1], value, wait=wait)
    return _compared[key]


def _named(question: str, device: torch.device) -> str:
    if device.index not in _devices:
        _devices.append(device.index)
    return f"{_devices.index(device.index)}/{question}"


def _load(name: str) -> str | None:
    """Find a kernel; return why it is not there, or None."""
    if name not in _kernels:
        try:
            _kernels[name] = libraries.load(name)
        except Exception as error:  # a library may break on import in any way
            return proof.describe(error)
        kernel = limits.BY_NAME[name]
        if is_built_at_use(name):
            logger.info(
                "sglang-kt-sm120: trying %s; where it is not built yet, nvcc now takes minutes.",
                kernel.title,
            )
    return None


def is_built_at_use(name: str) -> bool:
    """True where this kernel is in this environment and its first call may have to compile it."""
    return "nvcc" in limits.BY_NAME[name].needs and libraries.is_installed(name)


def run(x, weight, weight_scale, x_scale, out_dtype, config, counters, *, arch=None, pdl=False):
    """Multiply once by the kernel that `config` names (see `plan` and backends/__init__.py)."""
    call = plan(config, *weight.shape, arch=arch, pdl=pdl)
    return call(x, weight, weight_scale, x_scale, out_dtype, config, counters)


def plan(
    config: limits.Cutlass, n: int, k: int, *, arch: str | None = None, pdl: bool = False
) -> Callable[..., torch.Tensor]:
    """Return what serves the calls of a layer by the kernel that `config` names.

    Rows are padded where the kernel wants a multiple of 4, or would take a slower path without: the
    quantisation kernel writes into tensors that have the rows, which costs nothing. Only an
    activation that arrives quantised is copied then, or where its scales lie otherwise.

    Args:
        config: Names a kernel that was proven on `[n, k]`.
        n, k: The weight's shape.
        arch: Triton's launch option for our quantisation kernel, or None.
        pdl: Launch that with programmatic stream serialisation.

    Returns:
        call(x, weight, weight_scale, x_scale, out_dtype, config, counters), as backends/__init__.py
        says, -> `[M, N]`, whose memory may hold up to three rows more.
    """
    from sglang_kt_sm120 import kernels  # wants triton, which a machine without a GPU may lack

    kernel, product = limits.BY_NAME[config.kernel], _kernels[config.kernel]
    column_major, padded = kernel.column_major, kernel.padded
    options: dict[str, object] = {} if arch is None else {"arch": arch}
    if pdl:
        options["launch_pdl"] = True

    def call(x, weight, weight_scale, x_scale, out_dtype, config, counters):
        m = x.shape[0]
        rows = padded(m)
        if x_scale is None:
            codes, scales = kernels.quantise(
                x, column_major=column_major, rows=rows, options=options
            )
        else:
            codes, scales = laid_out(x, x_scale, rows, column_major)
        out = product(codes, weight, scales, weight_scale, out_dtype)
        return out if rows == m else out[:m]

    return call


def laid_out(
    codes: torch.Tensor, scales: torch.Tensor, rows: int, column_major: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return quantised operands as a kernel reads them, the same tensors where they lie so already.

    Args:
        codes: e4m3 `[M, K]`, inner stride 1.
        scales: fp32 `[M, K/128]`, any strides.
        rows: How many rows the kernel wants, at least M.
        column_major: Scales with strides (1, rows); else row-major.

    Returns:
        codes `[rows, K]`, contiguous, and scales `[rows, K/128]`; the rows beyond M hold zeros.
    """
    m, groups = scales.shape
    if rows != m:
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, rows - m))
        codes = codes.view(torch.float8_e4m3fn)
    wanted = (1, rows) if column_major else (groups, 1)
    if rows == m and scales.stride() == wanted:
        return codes.contiguous(), scales
    padded = scales.new_zeros((groups, rows) if column_major else (rows, groups))
    padded = padded.t() if column_major else padded
    padded[:m] = scales
    return codes.contiguous(), padded
