"""`Sm120Fp8LinearMethod`, for models and tools that name their linear method; imports sglang.

A served model needs nothing of this: host.py reaches its layers wherever they are made.
"""

from __future__ import annotations

from sglang.srt.layers.quantization import fp8

from sglang_kt_sm120 import host
from sglang_kt_sm120.linear import Sm120BlockFp8Linear

host.install()


class Sm120Fp8LinearMethod(fp8.Fp8LinearMethod):
    """sglang's `Fp8LinearMethod` with `Sm120BlockFp8Linear`, whatever dispatch would answer.

    Args:
        quant_config: sglang's `Fp8Config` of a block-FP8 checkpoint, as its own method takes it.
    """

    def __init__(self, quant_config):
        super().__init__(quant_config)
        if not isinstance(self.w8a8_block_fp8_linear, Sm120BlockFp8Linear):
            self.w8a8_block_fp8_linear = Sm120BlockFp8Linear(self.w8a8_block_fp8_linear)
