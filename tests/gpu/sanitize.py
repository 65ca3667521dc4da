"""A short run of every kernel for compute-sanitizer (memcheck, racecheck): small and complete.

compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # or what lies beyond a tensor is torch's own

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from sglang_kt_sm120 import bench, heuristic
from sglang_kt_sm120.backends import triton as backend

VARIANTS = {
    name: value for name, value in vars(heuristic).items() if isinstance(value, heuristic.Config)
}


def main():
    arch = None if torch.cuda.get_device_capability() == (12, 0) else "sm120"
    for n, k in ((200, 640),):
        weight = (torch.randn(n, k, device="cuda") * 60).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-n // 128), k // 128, device="cuda") * 0.02 + 1e-3
        counters = torch.zeros(64, dtype=torch.int32, device="cuda")
        for name, variant in VARIANTS.items():
            for m in {1, variant.block_m - 3, variant.block_m}:
                x = torch.randn(m, k, device="cuda").bfloat16()
                splits = min(3, -(-k // 128 // variant.unroll))
                field = "split_order" if variant.kernel == "tiled" else "splits"
                order = splits if field == "splits" or variant.split_order else 0
                config = replace(variant, **{field: order})
                out = backend.run(
                    x, weight, scale, None, x.dtype, config, counters, arch=arch, pdl=True
                )
                case = bench.Case(name, m, n, k, x, [weight], [scale], counters)
                assert bench.relative_error(out, bench.reference(case, 0)) < 3e-3, (name, m, n, k)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
