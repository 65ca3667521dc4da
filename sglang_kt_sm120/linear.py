"""What sglang calls for every block-FP8 layer on SM12x: `Sm120BlockFp8Linear`, one per layer."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from sglang_kt_sm120 import checks, eager, scales, select

logger = logging.getLogger("sglang_kt_sm120")
BLOCK_SIZE = [select.BLOCK, select.BLOCK]
# Dynamo, which traces what is not called, takes this for True; of all else that traces the eager
# path sees for itself. (`torch.compiler.is_compiling` costs two calls more.)
_is_dynamo_compiling, _is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled


class Sm120BlockFp8Linear:
    """The callable that takes the place of sglang's own block-FP8 linear function.

    It keeps sglang's function (`stock`) for what it does not serve, and what one layer needs at run
    time (`prepared`). `prepare` is called when the layer's weights are in place, again after every
    reload; `__call__` does no checks that belong there.
    """

    def __init__(self, stock: Callable):
        self.stock = stock
        self.prepared: eager.Prepared | None = None
        self.__name__ = "sm120_block_fp8_linear"  # sglang prints the function's name

    def __repr__(self) -> str:
        return f"{type(self).__name__}(stock={getattr(self.stock, '__name__', self.stock)})"

    def prepare(self, weight: torch.nn.Parameter, weight_scale: torch.nn.Parameter) -> None:
        """Check a loaded layer, convert scales that are not fp32, allocate what run time needs.

        Args:
            weight: e4m3 `[N, K]`.
            weight_scale: One scale per 128 x 128 block: fp32 `[ceil(N/128), ceil(K/128)]`, or UE8M0
                (see scales.py), whose `.data` is then replaced by the same values in fp32.

        Raises:
            TypeError, ValueError: The layer is no block-FP8 layer that any kernel could serve; the
                message holds its shape and what was expected.
        """
        if weight.dim() != 2 or weight.dtype is not checks.E4M3:
            checks.check_weight(weight, weight_scale)
        n, k = weight.shape
        converted = scales.to_fp32(weight_scale.data, n, k)
        if converted.data_ptr() != weight_scale.data_ptr():
            weight_scale.data = converted
            weight_scale.format_ue8m0 = False
        checks.check_weight(weight, weight_scale)
        if not weight.is_contiguous():
            raise ValueError(
                f"weight [{n}, {k}] has strides {list(weight.stride())}; expected [{k}, 1]"
            )
        if not weight_scale.is_contiguous() or weight_scale.data_ptr() % 16:  # see op.aligned
            weight_scale.data = weight_scale.data.clone(memory_format=torch.contiguous_format)
        index = weight.get_device()
        kept = self.prepared
        if kept is None or kept.shape != weight.shape or kept.index != index:
            self.prepared = eager.Prepared(n, k, weight.device)
        elif kept.counters is not None:
            kept.counters.zero_()  # what a paused server left there is anybody's guess

    @property
    def counters(self) -> torch.Tensor | None:
        """The split-K counters of this layer, None before `prepare` and on the CPU."""
        return None if self.prepared is None else self.prepared.counters

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        block_size: list[int],
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        **newer,
    ) -> torch.Tensor:
        """Return `input @ dequantised(weight).T + bias`, as sglang's linear functions do.

        Args:
            input: bf16 or fp16 `[..., K]`, any strides; or e4m3 when `input_scale` is given.
            weight: e4m3 `[N, K]`.
            block_size: `[128, 128]`; any other block goes to sglang's own function.
            weight_scale: fp32 `[ceil(N/128), K/128]`.
            input_scale: fp32 `[..., K/128]` of an input that is quantised already, any strides; the
                output is then bf16. Rows beyond the input's own (padding) are ignored.
            bias: `[N]` in the output dtype.
            **newer: Arguments of newer hosts. `act_scale_ue8m0` changes nothing on SM12x (stock
                uses fp32 activation scales there too) and `weight_bf16` belongs to another block
                size; one that is not known sends the call to sglang's own function.

        Raises:
            TypeError: An fp32 input.
            RuntimeError: The input requires grad; these layers are for inference.
        """
        if newer or block_size != BLOCK_SIZE:
            unknown = newer.keys() - {"act_scale_ue8m0", "weight_bf16"}
            if unknown or list(block_size) != BLOCK_SIZE:
                return self.stock(
                    input=input, weight=weight, block_size=block_size, weight_scale=weight_scale,
                    input_scale=input_scale, bias=bias, **newer,
                )  # fmt: skip
        if _is_grad_enabled() and input.requires_grad:
            raise RuntimeError(
                "sglang_kt_sm120: block-FP8 layers are for inference and have no gradient; "
                "call them under torch.no_grad() or torch.inference_mode()"
            )
        flat = input.dim() == 2
        x = input if flat else input.reshape(-1, input.shape[-1])
        output = None
        if input_scale is None:
            if self.prepared is not None and not _is_dynamo_compiling():
                output = eager.linear(self.prepared, x, weight, weight_scale)
            if output is None:
                output = torch.ops.sglang_kt_sm120.block_fp8_linear(
                    x, weight, weight_scale, self.counters
                )
        else:
            if input_scale.dim() > 2 and input_scale.shape[:-1] != input.shape[:-1]:
                raise ValueError(
                    f"sglang_kt_sm120: scales {list(input_scale.shape)} do not lie beside the rows "
                    f"of input {list(input.shape)}"
                )
            x_scale = input_scale.reshape(-1, input_scale.shape[-1])[: x.shape[0]]
            output = torch.ops.sglang_kt_sm120.fp8_gemm_nt_groupwise(
                x, weight, x_scale, weight_scale, torch.bfloat16, self.counters
            )
        if bias is not None:
            output += bias
        return output if flat else output.view(*input.shape[:-1], weight.shape[0])
