"""Eager calls of a loaded layer, past the dispatcher and past checks that its loading has made.

Those would cost more than a decode kernel runs. What `op.run` and `op.aligned` do is therefore
written out here again, where a call of either would count: they change together. Under
torch.compile, and for anything but an ordinary tensor, the registered op is called instead
(linear.py); both end in the same kernels.
"""

from __future__ import annotations

import torch

from sglang_kt_sm120 import op, select

# Looked up once: a few dozen look-ups take as long as a small kernel.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_transforms = torch._C._functorch.peek_interpreter_stack
_is_jit_tracing = torch._C._is_tracing
_function_modes = torch._C._is_torch_function_mode_enabled  # make_fx(pre_dispatch=True) sets one
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # no CPU build has these two
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Prepared:
    """What one loaded layer keeps for its eager calls.

    Attributes:
        counters: From `op.counters_for`, or None on the CPU.
        rows: The rows of `counters`, one per stream.
        shape: The layer's [N, K].
        index: Its CUDA device, -1 for the CPU.
        decided: (bucket of M, weight's shape, dtype, device) -> (backend's run, configuration).
            The shape, because hosts may share one callable between layers.
        generation: The `op.forget_choices` that `decided` is younger than.
        latest: (stream, its row of `counters` or None) of the latest call. One object, so that two
            threads cannot mix theirs.
    """

    def __init__(self, n: int, k: int, device: torch.device):
        self.counters = op.counters_for(n, k, device)
        self.rows = [] if self.counters is None else list(self.counters.unbind())
        self.shape = torch.Size((n, k))
        self.index = -1 if self.counters is None else self.counters.get_device()
        self.decided: dict[tuple, tuple] = {}
        self.generation = op.generation
        self.latest: tuple[int | None, torch.Tensor | None] = (None, None)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"decided": {}, "latest": (None, None)}

    def row(self, index: int, stream: int) -> torch.Tensor | None:
        """Return the counters for calls on `stream` of CUDA device `index`; None: none are kept.

        That is so on another device than the layer's, and from the ninth stream on. A launch that
        splits K then allocates some.
        """
        if index != self.index:
            return None
        slot = op.stream_row(index)
        row = self.rows[slot] if slot < op.COUNTER_SLOTS else None
        self.latest = (stream, row)
        return row


def linear(prepared: Prepared, x, weight, weight_scale) -> torch.Tensor | None:
    """Do what `op.block_fp8_linear` does, where the dispatcher would do nothing but call us.

    That is for an ordinary tensor where no mode, transform or tracer of torch's watches: they would
    see the allocation of the output, and not what a kernel writes there.
    (Under torch.compile the caller asks `torch.compiler.is_dynamo_compiling()` first.)

    Args:
        prepared: The layer's.
        x: bf16 or fp16 `[M, K]`, any strides.
        weight: e4m3 `[N, K]`, contiguous. weight_scale: fp32 `[ceil(N/128), K/128]`, contiguous.

    Returns:
        `[M, N]` in x's dtype, fresh; None where the op has to be called.

    Raises:
        TypeError, ValueError: As `op.block_fp8_linear`, where such a call was not met before.
    """
    if (
        type(x) is not torch.Tensor
        or _dispatch_modes()
        or _functorch_transforms() is not None
        or _is_jit_tracing()
        or _function_modes()
    ):
        return None
    m, k = x.shape
    index = x.get_device()  # -1 for the CPU
    if prepared.generation != op.generation:
        prepared.decided.clear()
        prepared.latest = (None, None)
        prepared.generation = op.generation
    dtype, shape = x.dtype, weight.shape
    key = (m if m <= select.DECODE_M else select.bucket(m), shape, dtype, index)
    decided = prepared.decided.get(key)
    if decided is None or k != shape[1] or not m:
        decision: list[tuple] = []
        out = op.run(x, None, weight, weight_scale, dtype, prepared.counters, decision)
        if decision:
            (prepared.decided[key],) = decision
        return out
    run, config = decided
    rows, columns = x.stride()
    if columns != 1 or rows % 16 or x.data_ptr() % 16:
        x = op.aligned(x)
    if index < 0:
        return run(x, weight, weight_scale, None, dtype, config, None)
    stream = _current_stream(index)
    of, row = prepared.latest
    if of != stream or index != prepared.index:
        row = prepared.row(index, stream)
    if _current_device() == index:
        return run(x, weight, weight_scale, None, dtype, config, row)
    with torch.cuda.device(index):
        return run(x, weight, weight_scale, None, dtype, config, row)
