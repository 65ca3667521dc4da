"""torch.library.opcheck for ops with e4m3 arguments.

To see mutation, opcheck compares every argument before and after with `torch.allclose`, which has
no e4m3 kernel ("mul_cpu_reduced_float" not implemented). Here, and only here, one-byte floats are
compared as bytes for the duration of a check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@contextlib.contextmanager
def bytes_compare() -> Iterator[None]:
    """Let `torch.allclose` take e4m3 tensors, by comparing their bytes."""
    allclose = torch.allclose

    def compare(a, b, *args, **kwargs):
        if a.dtype.itemsize == 1 and a.is_floating_point():
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return allclose(a, b, *args, **kwargs)

    with mock.patch.object(torch, "allclose", compare):
        yield
