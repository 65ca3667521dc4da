"""sglang's stock Triton linear on a machine without sglang: its real kernels, its own defaults.

`STOCK_FP8_KERNEL` (default .host/stock/fp8_kernel.py) names sglang's file
srt/layers/quantization/fp8_kernel.py. Only its Triton kernels are taken from it: the rest of the
file wants sgl_kernel and half of sglang. The launches below repeat its launchers. Quantisation is
its Triton kernel; on a real host it is sgl_kernel's CUDA one, of the same cost.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SOURCE = Path(os.environ.get("STOCK_FP8_KERNEL", ROOT / ".host/stock/fp8_kernel.py"))
KERNELS = ("_per_token_group_quant_8bit", "_w8a8_block_fp8_matmul")
DEFAULT = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 32,
    "num_warps": 4,
    "num_stages": 3,
}


def load():
    """The stock kernels as a module with sglang's two function names, or None without the file."""
    if not SOURCE.is_file():
        return None
    text = SOURCE.read_text()
    wanted = [
        ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name in KERNELS
    ]
    path = Path(tempfile.mkdtemp()) / "stock_kernels.py"
    parts = "\n\n".join("@triton.jit\n" + part for part in wanted)
    path.write_text("import triton\nimport triton.language as tl\n\n\n" + parts + "\n")
    spec = importlib.util.spec_from_file_location("stock_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Stock:
    """The two functions that `bench.stock` calls. `tuned`: use sglang's own H200 files."""

    def __init__(self, module, *, tuned: bool = False):
        self.module, self.tuned = module, tuned
        self.files: dict = {}

    def config(self, m: int, n: int, k: int) -> dict:
        name = f"N={n},K={k},device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
        path = SOURCE.parent / "configs" / name
        if not self.tuned or not path.is_file():
            return DEFAULT
        if name not in self.files:
            self.files[name] = {int(key): v for key, v in json.loads(path.read_text()).items()}
        table = self.files[name]
        return table[min(table, key=lambda rows: abs(rows - m))]

    def per_token_group_quant_fp8(self, x, group):
        codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scales = torch.empty(
            (x.shape[0], x.shape[1] // group), dtype=torch.float32, device=x.device
        )
        self.module._per_token_group_quant_8bit[(x.numel() // group,)](
            x, codes, scales, group, group, 1e-10, -448.0, 448.0, BLOCK=group,
            num_warps=1, num_stages=1,
        )  # fmt: skip
        return codes, scales

    def w8a8_block_fp8_matmul_triton(self, a, b, a_scale, b_scale, block, output_dtype):
        (m, k), n = a.shape, b.shape[0]
        c = torch.empty((m, n), dtype=output_dtype, device=a.device)
        config = self.config(m, n, k)
        grid = (-(-m // config["BLOCK_SIZE_M"]) * -(-n // config["BLOCK_SIZE_N"]),)
        self.module._w8a8_block_fp8_matmul[grid](
            a, b, c, a_scale, b_scale, m, n, k, *block,
            a.stride(-2), a.stride(-1), b.stride(1), b.stride(0), c.stride(-2), c.stride(-1),
            a_scale.stride(-2), a_scale.stride(-1), b_scale.stride(1), b_scale.stride(0),
            **config, needs_masking=bool(k % config["BLOCK_SIZE_K"] != 0),
        )  # fmt: skip
        return c
