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

import functools
import threading
from importlib import import_module

import torch

from sglang_kt_sm120 import devices, env, select

NAMESPACE = "sglang_kt_sm120"
#: Streams that get a row of their own in a layer's counters; a further one gets fresh zeros.
COUNTER_SLOTS = 4
#: Prefill splits K only while its 64 x 64 tiles are fewer than the SMs can take; this is more than
#: that on any SM12x GPU. A layer with fewer counters would get fresh zeros: one kernel more.
PREFILL_TILES = 512
E4M3 = torch.float8_e4m3fn

_deterministic = False
_choices: dict[tuple, tuple] = {}  # decided products: see _decide
_generation = 0  # how often choices were forgotten: see Prepared
_launched: set[tuple] = set()  # kernel variants that ran, or are about to, outside of capture
_slots: dict[tuple[int, int], int] = {}  # (device, stream) -> row of a layer's counters
_slots_lock = threading.Lock()


def set_deterministic(on: bool) -> None:
    """Ask for one K order for every M from now on (batch-invariant serving)."""
    global _deterministic
    _deterministic = on
    forget_choices()


def forget_choices() -> None:
    """Decide every product anew, after something that decisions depend on has changed."""
    global _generation
    _generation += 1
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


def _require(condition: bool, error: type[Exception], message: str) -> None:
    if not condition:
        raise error(f"{NAMESPACE}: {message}")


def check_weight(weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Raise TypeError or ValueError, with the shapes, unless this is a block-FP8 weight."""
    _require(weight.dim() == 2, ValueError, f"weight must be [N, K], got {list(weight.shape)}")
    n, k = weight.shape
    _require(
        weight.dtype is E4M3,
        TypeError,
        f"weight [{n}, {k}] is {weight.dtype}; block FP8 needs torch.float8_e4m3fn",
    )
    _require(
        k > 0 and k % select.BLOCK == 0,
        ValueError,
        f"weight [{n}, {k}]: K = {k} is not a multiple of 128 (one activation scale per 128)",
    )
    expected = [-(-n // select.BLOCK), k // select.BLOCK]
    _require(
        list(scale.shape) == expected,
        ValueError,
        f"weight [{n}, {k}] needs scales {expected}, one per 128 x 128 block; "
        f"got {list(scale.shape)}",
    )
    _require(
        scale.dtype is torch.float32,
        TypeError,
        f"weight [{n}, {k}]: scales are {scale.dtype}, expected torch.float32",
    )


def _check(x, x_scale, weight, weight_scale, out_dtype) -> None:
    check_weight(weight, weight_scale)
    n, k = weight.shape
    _require(
        x.device == weight.device == weight_scale.device,
        ValueError,
        f"activation, weight [{n}, {k}] and scales are on {x.device}, {weight.device} and "
        f"{weight_scale.device}; expected one device",
    )
    _require(
        x.dim() == 2 and x.shape[1] == k,
        ValueError,
        f"activation {list(x.shape)} does not fit weight [{n}, {k}]; expected [M, {k}]",
    )
    served = (torch.bfloat16, torch.float16)
    _require(
        out_dtype in served,
        TypeError,
        f"activation or output is {out_dtype} (weight [{n}, {k}]); bfloat16 and float16 are served",
    )
    if x_scale is None:
        _require(x.dtype in served, TypeError, f"activation is {x.dtype}; expected bf16 or fp16")
        return
    _require(x.dtype is E4M3, TypeError, f"quantised activation is {x.dtype}; expected {E4M3}")
    expected = [x.shape[0], k // select.BLOCK]
    _require(
        list(x_scale.shape) == expected and x_scale.dtype is torch.float32,
        ValueError,
        f"activation scales must be float32 {expected}, got {x_scale.dtype} {list(x_scale.shape)}",
    )


def problem_of(m: int, n: int, k: int, dtype: torch.dtype, prequantised: bool = False):
    """Return the `select.Problem` that a call with these sizes is decided by, in this process."""
    name = str(dtype).removeprefix("torch.")
    return select.Problem(select.bucket(max(m, 1)), n, k, name, prequantised, _deterministic)


def _decide(x, x_scale, weight, weight_scale, out_dtype) -> tuple:
    """Check a product that was not met before; return (backend's run, choice, launch options)."""
    _check(x, x_scale, weight, weight_scale, out_dtype)
    n, k = weight.shape
    index = x.device.index if x.device.type == "cuda" else None
    device = devices.device(index)
    problem = problem_of(x.shape[0], n, k, out_dtype, prequantised=x_scale is not None)
    choice = select.choose(problem, device, cutlass_verdict(x.device, n, k))
    if x.device.type == "cuda":
        _require_compiled(choice, problem, x)
    backend = import_module(f"{NAMESPACE}.backends.{choice.backend}")
    options = {"arch": devices.arch(index), "pdl": env.PDL.get()}
    return functools.partial(backend.run, **options), choice


def _require_compiled(choice: select.Choice, problem: select.Problem, x: torch.Tensor) -> None:
    """Refuse a kernel whose first launch would fall into a CUDA-graph capture.

    Compiling it, or loading its module, would kill the capture with an error that names neither.
    """
    variant = choice.config.variant() if hasattr(choice.config, "variant") else None
    key = (choice.backend, variant, x.device, x.dtype, problem.dtype, problem.n % 16 == 0)
    if torch.cuda.is_current_stream_capturing():
        _require(
            key in _launched,
            RuntimeError,
            f"no kernel for M={x.shape[0]} N={problem.n} K={problem.k} is compiled yet, and none "
            "may be compiled while a CUDA graph is captured. Call the layer once with this many "
            "rows before capture (sglang does), or `sglang_kt_sm120.warm.layer` when it is loaded",
        )
    _launched.add(key)


def cutlass_verdict(device: torch.device, n: int, k: int) -> str | None:
    """Return None where the host's CUTLASS was proven for this layer shape, else the reason."""
    return import_module(f"{NAMESPACE}.backends.cutlass").why_not(device.index, n, k)


def _run(x, x_scale, weight, weight_scale, out_dtype, counters):
    m, n = x.shape[0], weight.shape[0]
    key = (
        select.bucket(max(m, 1)), x.shape[1:], weight.shape, weight_scale.shape, x.dtype, out_dtype,
        weight.dtype, weight_scale.dtype, x.device, None if x_scale is None else x_scale.shape[1:],
    )  # fmt: skip
    decided = _choices.get(key)
    if decided is None:
        decided = _choices[key] = _decide(x, x_scale, weight, weight_scale, out_dtype)
    if m == 0 or n == 0:
        return x.new_empty((m, n), dtype=out_dtype)
    run, choice = decided
    if x.stride(1) != 1:
        x = x.contiguous()
    if not weight.is_contiguous():
        raise ValueError(f"{NAMESPACE}: weight {list(weight.shape)} must be contiguous")
    if not weight_scale.is_contiguous():
        weight_scale = weight_scale.contiguous()
    if x.device.type != "cuda":
        return run(x, weight, weight_scale, x_scale, out_dtype, choice.config, None)
    index = x.device.index
    if counters is not None:
        slot = _slot(index)
        counters = counters[slot] if slot < counters.shape[0] else None
    if torch.cuda.current_device() == index:
        return run(x, weight, weight_scale, x_scale, out_dtype, choice.config, counters)
    with torch.cuda.device(index):
        return run(x, weight, weight_scale, x_scale, out_dtype, choice.config, counters)


def _slot(index: int) -> int:
    """Return the row of a layer's counters that belongs to the current stream of this device."""
    stream = (index, torch._C._cuda_getCurrentRawStream(index))
    slot = _slots.get(stream)
    if slot is None:
        with _slots_lock:
            taken = sum(1 for device, _ in _slots if device == index)
            slot = _slots.setdefault(stream, taken)
    return slot


def is_plain(x: torch.Tensor) -> bool:
    """True where the dispatcher would do nothing but call our implementation.

    That is eager mode with an ordinary tensor: no fake tensors, no dispatch mode, no functorch
    transform. (Under torch.compile the caller asks `torch.compiler.is_compiling()` first.)
    """
    return (
        type(x) is torch.Tensor
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class Prepared:
    """What one loaded layer keeps for its eager calls.

    Attributes:
        counters: From `counters_for`, or None on the CPU.
        rows: The rows of `counters`, one per stream.
        k: The layer's input features.
        decided: (bucket of M, dtype, device) -> (backend's run, its configuration).
        generation: The `forget_choices` that `decided` is younger than.
    """

    def __init__(self, n: int, k: int, device: torch.device):
        self.counters = counters_for(n, k, device)
        self.rows = [] if self.counters is None else list(self.counters.unbind())
        self.k = k
        self.decided: dict[tuple, tuple] = {}
        self.generation = _generation

    def __getstate__(self) -> dict:
        return self.__dict__ | {"decided": {}}


def plain_linear(prepared: Prepared, x, weight, weight_scale) -> torch.Tensor:
    """Do what `block_fp8_linear` does, for a prepared layer and an x that `is_plain`.

    The dispatcher, and checks that a prepared layer has behind it, would cost more than a decode
    kernel runs; so eager calls of a layer come here.
    """
    m, k = x.shape
    index = x.get_device()  # -1 for the CPU
    if prepared.generation != _generation:
        prepared.decided.clear()
        prepared.generation = _generation
    dtype = x.dtype
    key = (m if m <= select.DECODE_M else select.bucket(m), dtype, index)
    decided = prepared.decided.get(key)
    if decided is None or k != prepared.k or x.stride(1) != 1 or not m:
        out = _run(x, None, weight, weight_scale, dtype, prepared.counters)
        if m:
            run, choice = _decide(x, None, weight, weight_scale, dtype)
            prepared.decided[key] = (run, choice.config)
        return out
    run, config = decided
    if index < 0:
        return run(x, weight, weight_scale, None, dtype, config, None)
    slot = _slot(index)
    row = prepared.rows[slot] if slot < COUNTER_SLOTS else None
    if torch._C._cuda_getDevice() == index:
        return run(x, weight, weight_scale, None, dtype, config, row)
    with torch.cuda.device(index):
        return run(x, weight, weight_scale, None, dtype, config, row)


def _linear_impl(x, weight, weight_scale, counters=None):
    return _run(x, None, weight, weight_scale, x.dtype, counters)


def _gemm_impl(a, b, a_scale, b_scale, out_dtype, counters=None):
    return _run(a, a_scale, b, b_scale, out_dtype, counters)


def _linear_fake(x, weight, weight_scale, counters=None):
    _check(x, None, weight, weight_scale, x.dtype)
    return x.new_empty((x.shape[0], weight.shape[0]))


def _gemm_fake(a, b, a_scale, b_scale, out_dtype, counters=None):
    _check_fake_gemm(a, b)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _check_fake_gemm(a, b) -> None:
    _require(
        a.dim() == 2 and b.dim() == 2,
        ValueError,
        f"expected [M, K] and [N, K], got {a.dim()} and {b.dim()} dimensions",
    )


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
