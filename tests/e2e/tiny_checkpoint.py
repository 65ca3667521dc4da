"""Small random block-FP8 checkpoints that sglang loads as it loads the published ones.

`deepseek_v3` keeps DeepSeek-R1's q_lora_rank and kv_lora_rank, so `fused_qkv_a_proj_with_mqa` has
R1's awkward N = 1536 + 576 = 2112; everything else is small.

Random weights decode near-ties, and any change of summation order decides some of them otherwise.
What a layer adds to the residual stream is therefore kept small (`BRANCH`), as training does: the
next token then follows from the layers' results, and not from their last bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

BRANCH = 1 / 8

COMMON = {
    "vocab_size": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 8192,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
QWEN3 = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
}
DEEPSEEK_V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "rope_theta": 10000.0,
}
#: The same model where no layer is block-FP8.
DEEPSEEK_V3_BF16 = {key: DEEPSEEK_V3[key] for key in DEEPSEEK_V3 if key != "quantization_config"}
CONFIGS = {"qwen3": QWEN3, "deepseek_v3": DEEPSEEK_V3, "deepseek_v3_bf16": DEEPSEEK_V3_BF16}


def linears(config: dict) -> dict[str, tuple[int, int]]:
    """Return name -> (N, K) of every weight that the published checkpoint has in block-FP8."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    shapes: dict[str, tuple[int, int]] = {}

    def mlp(name: str, width: int) -> None:
        shapes[f"{name}.gate_proj"] = shapes[f"{name}.up_proj"] = (width, hidden)
        shapes[f"{name}.down_proj"] = (hidden, width)

    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        if config["model_type"] == "qwen3":
            width, groups = config["head_dim"], config["num_key_value_heads"]
            shapes[f"{attention}.q_proj"] = (heads * width, hidden)
            shapes[f"{attention}.k_proj"] = shapes[f"{attention}.v_proj"] = (groups * width, hidden)
            shapes[f"{attention}.o_proj"] = (hidden, heads * width)
            mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
        nope, rope, value = (
            config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        shapes[f"{attention}.q_a_proj"] = (q_rank, hidden)
        shapes[f"{attention}.q_b_proj"] = (heads * (nope + rope), q_rank)
        shapes[f"{attention}.kv_a_proj_with_mqa"] = (kv_rank + rope, hidden)
        shapes[f"{attention}.kv_b_proj"] = (heads * (nope + value), kv_rank)
        shapes[f"{attention}.o_proj"] = (hidden, heads * value)
        if index < config["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        mlp(f"{layer}.mlp.shared_experts", config["moe_intermediate_size"])
        for expert in range(config["n_routed_experts"]):
            mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
    return shapes


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes and one fp32 scale per 128 x 128 block (edges may be cut)."""
    n, k = weight.shape
    rows, columns = -(-n // 128), -(-k // 128)
    padded = torch.nn.functional.pad(weight, (0, columns * 128 - k, 0, rows * 128 - n))
    scale = padded.view(rows, 128, columns, 128).abs().amax((1, 3)).clamp_min(1e-12) / 448
    full = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return (weight / full).to(torch.float8_e4m3fn), scale


def write(kind: str, folder: str | Path, seed: int = 0) -> Path:
    """Write checkpoint `kind`, one of `CONFIGS`, into `folder`; return the folder."""
    from safetensors.torch import save_file

    config, folder = CONFIGS[kind], Path(folder)
    generator = torch.Generator().manual_seed(seed)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    tensors: dict[str, torch.Tensor] = {}

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def ones(name: str, width: int) -> None:
        tensors[f"{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)

    for name, (n, k) in linears(config).items():
        gain = BRANCH if name.endswith((".o_proj", ".down_proj")) else 1.0
        weight = random(n, k, scale=gain * k**-0.5)
        if "quantization_config" not in config:
            tensors[f"{name}.weight"] = weight.bfloat16()
            continue
        codes, scale = quantise_weight(weight)
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = codes, scale
    tensors["model.embed_tokens.weight"] = random(vocabulary, hidden).bfloat16()
    tensors["lm_head.weight"] = random(vocabulary, hidden, scale=hidden**-0.5).bfloat16()
    ones("model.norm", hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        ones(f"{layer}.input_layernorm", hidden)
        ones(f"{layer}.post_attention_layernorm", hidden)
        if kind == "qwen3":
            ones(f"{layer}.self_attn.q_norm", config["head_dim"])
            ones(f"{layer}.self_attn.k_norm", config["head_dim"])
            continue
        ones(f"{layer}.self_attn.q_a_layernorm", config["q_lora_rank"])
        ones(f"{layer}.self_attn.kv_a_layernorm", config["kv_lora_rank"])
        if index >= config["first_k_dense_replace"]:
            experts = config["n_routed_experts"]
            gate = random(experts, hidden, scale=hidden**-0.5).bfloat16()
            tensors[f"{layer}.mlp.gate.weight"] = gate
            tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(experts)

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


if __name__ == "__main__":
    import sys

    print(write(*sys.argv[1:3]))
