"""The torch ops that sglang's layers end in, and the routing inside them.

    sglang_kt_sm120::block_fp8_linear(x, weight, weight_scale, counters=None) -> Tensor
    sglang_kt_sm120::fp8_gemm_nt_groupwise(a, b, a_scale, b_scale, out_dtype, counters=None)
        -> Tensor

Both are opaque to torch.compile: inside them M is an int, so an eager, a compiled and a captured
run take the same kernel. They are functional: nothing is mutated (`counters` are zero before and
after) and the output aliases nothing. Registered through `torch.library.Library` rather than
`custom_op`, which costs three times as much per call.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from importlib import import_module

import torch

from sglang_kt_sm120 import checks, devices, env, limits, select

NAMESPACE = "sglang_kt_sm120"
#: Streams that get a row of their own in a layer's counters; a further one gets fresh zeros.
COUNTER_SLOTS = 8
#: Prefill splits K only while its 64 x 64 tiles are fewer than the SMs can take; this is more than
#: that on any SM12x GPU. A layer with fewer counters would get fresh zeros: one kernel more.
PREFILL_TILES = 512

_deterministic = False
_choices: dict[tuple, tuple] = {}  # decided products: see _decide
generation = 0  # how often choices were forgotten: see eager.py
_launched: set[tuple] = set()  # kernel variants that ran, or are about to, outside of capture
_slots: dict[tuple[int, int], int] = {}  # (device, stream) -> row of a layer's counters
_slots_lock = threading.Lock()


def set_deterministic(on: bool) -> None:
    """Ask for one K order for every M from now on (batch-invariant serving)."""
    global _deterministic
    _deterministic = on
    forget_choices()


def is_deterministic() -> bool:
    """Return what `set_deterministic` was told last."""
    return _deterministic


def forget_choices() -> None:
    """Decide every product anew, after something that decisions depend on has changed."""
    global generation
    generation += 1
    _choices.clear()


def counters_for(n: int, k: int, device: torch.device) -> torch.Tensor | None:
    """Allocate the split-K arrival counters of one layer.

    Returns int32 `[COUNTER_SLOTS, tiles]` of zeros on `device`, or None on the CPU. Every launch
    leaves them zero. Two launches that run at the same time must not share a row: each stream has
    its own.
    """
    if device.type != "cuda":
        return None
    from sglang_kt_sm120 import heuristic

    tiles = max(heuristic.counters_needed(n, k), PREFILL_TILES)
    tiles += -tiles % 4  # rows of whole 16 bytes: Triton compiles anew for another alignment
    with torch.inference_mode(False):  # a reload zeroes them, in whatever mode it runs
        return torch.zeros(COUNTER_SLOTS, tiles, dtype=torch.int32, device=device)


def block_fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Quantise `x` per row and 128 columns, and multiply by a block-FP8 weight.

    Args:
        x: bf16 or fp16 `[M, K]`, any strides.
        weight: e4m3 `[N, K]`, contiguous.
        weight_scale: fp32 `[ceil(N/128), ceil(K/128)]`, one factor per 128 x 128 block.
        counters: From `counters_for(N, K)`, or None.

    Returns:
        `[M, N]` in x's dtype, fresh.

    Raises:
        TypeError: A dtype that is not served (fp32 activations among them).
        ValueError: Shapes that do not fit, or K that is no multiple of 128.
    """
    return torch.ops.sglang_kt_sm120.block_fp8_linear(x, weight, weight_scale, counters)


def fp8_gemm_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply an activation that is quantised already; scales are K-major ("K" in FlashInfer).

    Args:
        a: e4m3 `[M, K]`. b: e4m3 `[N, K]`, contiguous.
        a_scale: fp32 `[M, K/128]`, any strides. b_scale: fp32 `[ceil(N/128), ceil(K/128)]`.
        out_dtype: bf16 or fp16.
        counters: From `counters_for(N, K)`, or None.

    Returns:
        `[M, N]` in `out_dtype`, fresh.

    Raises:
        TypeError, ValueError: As `block_fp8_linear`.
    """
    return torch.ops.sglang_kt_sm120.fp8_gemm_nt_groupwise(
        a, b, a_scale, b_scale, out_dtype, counters
    )


def problem_of(m: int, n: int, k: int, dtype: torch.dtype, prequantised: bool = False):
    """Return the `select.Problem` that a call with these sizes is decided by, in this process."""
    name = str(dtype).removeprefix("torch.")
    return select.Problem(select.bucket(max(m, 1)), n, k, name, prequantised, _deterministic)


def _decide(x, x_scale, weight, weight_scale, out_dtype) -> tuple:
    """Decide a product that was not met before; return (backend's run, choice, variant's key).

    While a CUDA graph is captured, a kernel whose first launch it would be is refused: compiling
    it, or loading its module, would kill the capture with an error that names neither.
    """
    n, k = weight.shape
    index = x.device.index if x.device.type == "cuda" else None
    capturing = index is not None and _is_capturing(x.device)
    # Where nothing ran before, deciding would itself read tables and ask the compiler.
    if capturing and not any(key[2] == x.device for key in _launched):
        raise _first_in_capture(x, n, k, x_scale)
    device = devices.device(index)
    problem = problem_of(x.shape[0], n, k, out_dtype, prequantised=x_scale is not None)
    choice = select.choose(problem, device, known_cutlass(x.device, n, k, out_dtype))
    key = None if index is None else _key(choice, problem, x, x_scale)
    if capturing and key not in _launched:
        raise _first_in_capture(x, n, k, x_scale)
    backend = import_module(f"{NAMESPACE}.backends.{choice.backend}")
    options = {"arch": devices.arch(index), "pdl": env.PDL.get()}
    if hasattr(backend, "plan"):  # works out once what no call of this layer changes
        return backend.plan(choice.config, n, k, **options), choice, key
    return functools.partial(backend.run, **options), choice, key


def _is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):  # capture is asked of a device's current stream
        return torch.cuda.is_current_stream_capturing()


def _key(choice, problem: select.Problem, x: torch.Tensor, x_scale) -> tuple:
    """Return what tells apart the kernels that are compiled for these operands."""
    variant = choice.config.variant() if hasattr(choice.config, "variant") else None
    key = (choice.backend, variant, x.device, x.dtype, problem.dtype, problem.n % 16 == 0)
    return key if x_scale is None else key + _specialised(x_scale)


def _first_in_capture(x: torch.Tensor, n: int, k: int, x_scale) -> RuntimeError:
    warm = ", or `sglang_kt_sm120.warm.layer` when it is loaded" if x_scale is None else ""
    return RuntimeError(
        f"{NAMESPACE}: no kernel for M={x.shape[0]} N={n} K={k} is compiled yet, and none may be "
        "compiled while a CUDA graph is captured. Call the layer once with such an input before "
        f"capture (sglang does){warm}"
    )


def _specialised(scale: torch.Tensor) -> tuple:
    """Return what of the strides Triton compiles anew for."""
    return tuple((stride == 1, stride % 16 == 0) for stride in scale.stride())


def known_cutlass(device: torch.device, n: int, k: int, dtype: torch.dtype) -> limits.Known:
    """Return what the probes have said by now of the host's CUTLASS kernels on this shape."""
    return import_module(f"{NAMESPACE}.backends.cutlass").known(device.index, n, k, dtype)


def cutlass_to_prove(
    device: torch.device, n: int, k: int, dtype: torch.dtype
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return `select.wanted_kernels` for a layer of this shape on CUDA device `device`."""
    default = known_cutlass(device, n, k, dtype).host_default
    return select.wanted_kernels(problem_of(1, n, k, dtype), devices.device(device.index), default)


def prove_cutlass(
    device: torch.device, n: int, k: int, dtype: torch.dtype, *, every: bool = False
) -> limits.Known:
    """Probe those of the host's CUTLASS kernels that a choice for this shape could take.

    Called at load, never during capture; a kernel is probed once per shape and process.

    Args:
        device: Where the layer is; on the CPU nothing is probed.
        n, k: Its weight's shape.
        dtype: Of the activations.
        every: Probe every kernel that is not ruled out (for `tune`), not only what is wanted.

    Returns:
        What is known then.
    """
    cutlass = import_module(f"{NAMESPACE}.backends.cutlass")
    before = cutlass.known(device.index, n, k, dtype)
    if device.type != "cuda":
        return before
    named, anyone = cutlass_to_prove(device, n, k, dtype)
    if every:
        problem = problem_of(1, n, k, dtype)
        named, anyone = select.usable_kernels(problem, devices.device(device.index)), ()
    options = {"arch": devices.arch(device.index)}
    after = cutlass.prove(device, n, k, dtype, named, anyone, **options)
    if after != before:
        forget_choices()
    return after


def run(x, x_scale, weight, weight_scale, out_dtype, counters, decision=None):
    """Check, decide and launch one product: what both ops do.

    Args:
        x, x_scale, weight, weight_scale, out_dtype, counters: As the ops take them; x_scale None
            where x is to be quantised.
        decision: Receives (the backend's run, its configuration) where something was launched.
    """
    m, n = x.shape[0], weight.shape[0]
    key = (
        select.bucket(max(m, 1)), x.shape[1:], weight.shape, weight_scale.shape, x.dtype, out_dtype,
        weight.dtype, weight_scale.dtype, x.device, weight.device, weight_scale.device,
        None if x_scale is None
        else (x_scale.shape[1:], x_scale.dtype, x_scale.device, _specialised(x_scale)),
    )  # fmt: skip
    decided = _choices.get(key)
    if decided is None or (x_scale is not None and x_scale.shape[0] != m):
        checks.check(x, x_scale, weight, weight_scale, out_dtype)
    if not weight.is_contiguous():
        raise ValueError(f"{NAMESPACE}: weight {list(weight.shape)} must be contiguous")
    if m == 0 or n == 0:  # nothing to decide: nothing will be launched
        return x.new_empty((m, n), dtype=out_dtype)
    first = decided is None
    if first:
        decided = _decide(x, x_scale, weight, weight_scale, out_dtype)
    launch, choice, variant = decided
    x = aligned(x)
    if not weight_scale.is_contiguous() or weight_scale.data_ptr() % 16:
        weight_scale = weight_scale.clone(memory_format=torch.contiguous_format)
    if x_scale is not None and x_scale.data_ptr() % 16:
        x_scale = x_scale.clone(memory_format=torch.preserve_format)
    index = x.get_device()
    if counters is not None:
        row = stream_row(index) if index == counters.get_device() >= 0 else counters.shape[0]
        counters = counters[row] if row < counters.shape[0] else None
    with contextlib.nullcontext() if _is_current(index) else torch.cuda.device(index):
        out = launch(x, weight, weight_scale, x_scale, out_dtype, choice.config, counters)
    if first:  # only what has run once is known to be compiled
        _choices[key] = decided
        if variant is not None:  # on the CPU nothing is launched
            _launched.add(variant)
    if decision is not None:
        decision.append((launch, choice.config))
    return out


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return `[M, K]` x as the kernels are compiled for: 16-byte rows, inner stride 1.

    Triton compiles anew for a pointer or a row stride that is not a multiple of 16, which must not
    happen during capture; such views are rare, and copied.
    """
    rows, columns = x.stride()
    if columns != 1 or rows % 16 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _is_current(index: int) -> bool:
    """True where work for device `index` needs no switch: it is current, or the CPU (-1)."""
    return index < 0 or torch._C._cuda_getDevice() == index


def stream_row(index: int) -> int:
    """Return the row of a layer's counters that belongs to the current stream of this device."""
    stream = (index, torch._C._cuda_getCurrentRawStream(index))
    slot = _slots.get(stream)
    if slot is None:
        with _slots_lock:
            taken = sum(1 for device, _ in _slots if device == index)
            slot = _slots.setdefault(stream, taken)
    return slot


def _linear_impl(x, weight, weight_scale, counters=None):
    return run(x, None, weight, weight_scale, x.dtype, counters)


def _gemm_impl(a, b, a_scale, b_scale, out_dtype, counters=None):
    return run(a, a_scale, b, b_scale, out_dtype, counters)


def _linear_fake(x, weight, weight_scale, counters=None):
    checks.check(x, None, weight, weight_scale, x.dtype)
    return x.new_empty((x.shape[0], weight.shape[0]))


def _gemm_fake(a, b, a_scale, b_scale, out_dtype, counters=None):
    checks.check(a, a_scale, b, b_scale, out_dtype)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    # Inductor must hand over strides as they are: the op reads them, and never copies for nothing.
    strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    tags = (torch.Tag.pt2_compliant_tag, strides)
    ops = (
        (
            "block_fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, "
            "Tensor? counters=None) -> Tensor",
            _linear_impl,
            _linear_fake,
        ),
        (
            "fp8_gemm_nt_groupwise(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, "
            "ScalarType out_dtype, Tensor? counters=None) -> Tensor",
            _gemm_impl,
            _gemm_fake,
        ),
    )
    for schema, implementation, fake in ops:
        name = schema.partition("(")[0]
        library.define(schema, tags=tags)
        for key in ("CUDA", "CPU"):
            library.impl(name, implementation, key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return library


_LIBRARY = _register()
