"""Triton's interpreter with correct FP8 and bf16 casts.

Triton's own conversion drops carries when it rounds to e4m3 (31.1 becomes 16), wraps above 464,
reads e4m3's NaN as 480 and truncates fp32 to bf16; its fma rounds twice. Triton 3.9's makes an
integer block of a scalar comparison, which it then refuses as a mask. `enable()` replaces these,
the conversions by torch's.
It must run before anything imports triton, so interpreted tests live in a process of their own.
"""

from __future__ import annotations

import os
import sys


def enable(*, repair: bool = True) -> None:
    """Switch the interpreter on for this process; `repair=False` leaves its casts as they are.

    Raises:
        RuntimeError: triton is already imported, so the switch would have no effect.
    """
    if "triton" in sys.modules:
        raise RuntimeError("TRITON_INTERPRET must be set before triton is imported")
    os.environ["TRITON_INTERPRET"] = "1"
    if repair:
        from triton.runtime import interpreter

        interpreter._convert_float = _convert_float
        interpreter.InterpreterBuilder.create_fma = _fused_multiply_add
        interpreter.InterpreterBuilder.create_splat = _of_one_bit(
            interpreter.InterpreterBuilder.create_splat
        )
        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)


def _fused_multiply_add(builder, x, y, z):
    """x * y + z rounded once: in float64, where the product of two fp32 numbers is exact."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    assert x.data.dtype == np.float32
    exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return TensorHandle(exact.astype(np.float32), x.dtype.scalar)


def _of_one_bit(splat):
    """`splat` (a scalar to a block) that keeps a truth value one, whatever type it is noted as."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def repaired(builder, block_type, scalar):
        if scalar.data.dtype == np.bool_:
            scalar = TensorHandle(scalar.data, tl.int1)
        return splat(builder, block_type, scalar)

    return repaired


def _with_index(patch):
    """`patch` (of tl.tensor) with an `__index__` that NumPy 2.4 accepts for one-element arrays."""

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def _convert_float(data, source, target, rounding_mode=None):
    """`data` (bits or floats of triton type `source`) as the bits of `target`, to nearest even."""
    import numpy as np
    import torch

    types = {
        "fp8e4nv": torch.float8_e4m3fn,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp64": torch.float64,
    }
    bits = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32)}
    bits[8] = (np.int64, torch.int64)
    width = np.dtype(data.dtype).itemsize
    values = torch.from_numpy(np.ascontiguousarray(data).view(bits[width][0]).copy())
    values = values.view(types[source.name])
    if target.name == "fp8e4nv":
        # The hardware's conversion saturates and keeps NaN.
        values = values.float()
        values = torch.where(values.isnan(), values, values.clamp(-448.0, 448.0))
    converted = values.to(types[target.name])
    width = converted.element_size()
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[width]
    return converted.view(bits[width][1]).numpy().view(unsigned).reshape(data.shape)
