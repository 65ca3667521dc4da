"""One file per backend. Each offers

    run(x, weight, weight_scale, x_scale, out_dtype, config, counters, *, arch, pdl) -> Tensor

with x `[M, K]` (bf16/fp16, or e4m3 when x_scale `[M, K/128]` is given), weight e4m3 `[N, K]`,
weight_scale fp32 `[ceil(N/128), K/128]`; the result is a fresh `[M, N]` in out_dtype.
"""
