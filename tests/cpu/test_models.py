"""The layers of a config.json, against what the hosts' model code builds."""

from __future__ import annotations

import json

import pytest

from sglang_kt_sm120 import models

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
#: The public config.json of Qwen3-Next-80B-A3B-Instruct-FP8, as far as it matters here.
NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48,
    "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "full_attention_interval": 4,
    "num_experts": 512, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "quantization_config": FP8,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36,
    "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "quantization_config": FP8,
}  # fmt: skip
V32 = {
    "model_type": "deepseek_v32", "hidden_size": 7168, "num_hidden_layers": 61,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "n_routed_experts": 256, "first_k_dense_replace": 3, "num_attention_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
    "quantization_config": FP8,
}  # fmt: skip
QWEN3_LAYERS = {
    "qkv_proj": (6144, 4096), "o_proj": (4096, 4096), "mlp.gate_up_proj": (24576, 4096),
    "mlp.down_proj": (4096, 12288),
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """Return a function: config and changes -> ({name: (n, k)}, notes)."""

    def function(config, **changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        notes = []
        found = models.from_model(tmp_path, notes.append)
        names = [layer.name for layer in found]
        assert len(set(names)) == len(names)
        return {layer.name: (layer.n, layer.k) for layer in found}, notes

    return function


def test_qwen3_next_has_a_gate_delta_nets_and_a_shared_expert(read):
    layers, notes = read(NEXT)
    assert layers == {
        "qkv_proj": (2 * 4096 + 2 * 512, 2048),
        "o_proj": (2048, 4096),
        "linear_attn.in_proj_qkvz": (2 * 2048 + 2 * 4096, 2048),
        "linear_attn.in_proj_ba": (64, 2048),
        "linear_attn.out_proj": (2048, 4096),
        "shared_expert.gate_up_proj": (1024, 2048),
        "shared_expert.down_proj": (2048, 512),
    }
    assert notes == []
    assert read(NEXT, attn_output_gate=False)[0]["qkv_proj"] == (4096 + 2 * 512, 2048)
    assert "mlp.gate_up_proj" in read(NEXT, mlp_only_layers=[0])[0]


def test_deepseek_v32_has_an_indexer(read):
    layers, _ = read(V32)
    assert layers["indexer.wq_b"] == (64 * 128, 1536)
    assert layers["indexer.wk"] == (128, 7168)
    assert len(layers) == 4 + 2 + 2 + 2
    assert len(read(V32, model_type="deepseek_v3", index_topk=None)[0]) == 8


def test_qwen3_5_keeps_qkv_and_z_apart_on_older_hosts(read):
    text = NEXT | {"model_type": "qwen3_5_moe_text"}
    layers, notes = read({"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}})
    assert layers["linear_attn.in_proj_qkv"] == (8192, 2048)
    assert layers["linear_attn.in_proj_z"] == (4096, 2048)
    assert layers["linear_attn.in_proj_qkvz"] == (12288, 2048)
    assert any("vision tower" in note for note in notes)


@pytest.mark.parametrize("types", [None, ["full_attention"] * 36, ["sliding_attention"] * 36])
def test_a_dense_qwen3(read, types):
    assert read(QWEN3, layer_types=types) == (QWEN3_LAYERS, [])


def _compressed(**changes):
    weights = {
        "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128],
    } | changes  # fmt: skip
    group = {"weights": weights, "input_activations": {"strategy": "group"}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def test_compressed_tensors_block_fp8(read):
    assert read(QWEN3, quantization_config=_compressed()) == (QWEN3_LAYERS, [])
    for other in ({"strategy": "channel"}, {"block_structure": [64, 64]}, {"type": "int"}):
        with pytest.raises(ValueError, match=r"this package serves \[128, 128\]"):
            read(QWEN3, quantization_config=_compressed(**other))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_what_the_checkpoint_does_not_quantise_is_left_out_and_named(read, prefix, key):
    delta = [index for index in range(48) if (index + 1) % 4]
    entries = [f"{prefix}layers.{index}.linear_attn.in_proj_ba" for index in delta]
    entries += ["lm_head", "mlp.gate", f"{prefix}layers.0.linear_attn.out_proj"]
    layers, notes = read(NEXT, quantization_config=FP8 | {key: entries})
    assert "linear_attn.in_proj_ba" not in layers
    assert {"linear_attn.out_proj", "shared_expert.gate_up_proj"} <= set(layers)
    assert notes == ["linear_attn.in_proj_ba is left out: this checkpoint does not quantise it"]
    layers, _ = read(NEXT, quantization_config=FP8 | {key: entries[1:]})
    assert "linear_attn.in_proj_ba" in layers, "one layer of 36 still has it"


def test_regular_expressions_of_compressed_tensors(read):
    quant = _compressed() | {"ignore": ["lm_head", "re:.*self_attn.*"]}
    layers, notes = read(QWEN3, quantization_config=quant)
    assert set(layers) == {"mlp.gate_up_proj", "mlp.down_proj"}
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN3, {"model_type": "brand_new"}, "'brand_new'"),
        (QWEN3, {"model_type": None}, "None"),
        (QWEN3, {"layer_types": ["linear_attention"] * 36}, "linear_attention"),
        (NEXT, {"layer_types": ["mamba"] * 48}, "mamba"),
        (V32, {"q_lora_rank": None}, "q_lora_rank"),
        (V32, {"index_n_heads": 64, "index_head_dim": None}, "config.json"),
    ],
)
def test_what_is_not_known_is_an_error(read, config, changes, message):
    with pytest.raises(ValueError, match=message):
        read(config, **changes)
