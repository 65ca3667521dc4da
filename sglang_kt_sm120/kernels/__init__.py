"""The Triton kernels. Importing this package imports torch and triton, and nothing of ours."""

from __future__ import annotations

from .direct import direct
from .parts import as_it_is
from .pipelined import pipelined
from .quant import quantise
from .stream import read
from .tiled import tiled

__all__ = ["as_it_is", "direct", "pipelined", "quantise", "read", "tiled"]
