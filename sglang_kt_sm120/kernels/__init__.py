"""The Triton kernels. Importing this package imports torch and triton, and nothing of ours."""

from __future__ import annotations

from .direct import direct
from .pipelined import pipelined
from .quant import quantise
from .stream import read
from .tiled import tiled

__all__ = ["direct", "pipelined", "quantise", "read", "tiled"]
