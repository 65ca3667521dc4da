"""Shape sets, tensor-parallel shards, and the layers of a config.json."""

from __future__ import annotations

import json

import pytest

from sglang_kt_sm120 import models, shapes

R1 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def write(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(R1 | changes))
    return tmp_path


def test_deepseek_r1_from_its_config_is_the_named_set(tmp_path):
    assert models.from_model(write(tmp_path)) == shapes.SHAPE_SETS["deepseek-r1"]


def test_deepseek_r1_has_the_reports_layer():
    assert shapes.SHAPE_SETS["deepseek-r1"][0] == shapes.Linear(
        "fused_qkv_a_proj_with_mqa", 2112, 7168
    )


def test_every_k_is_a_multiple_of_the_block():
    for layers in shapes.SHAPE_SETS.values():
        assert all(layer.k % 128 == 0 for layer in layers)


def test_shards_at_8():
    got = {(s.n, s.k) for s in shapes.shard(shapes.SHAPE_SETS["deepseek-r1"], 8)}
    assert got == {
        (2112, 7168), (3072, 1536), (4096, 512), (7168, 2048), (4608, 7168), (7168, 2304),
        (512, 7168), (7168, 256),
    }  # fmt: skip


def test_kv_heads_are_copied_when_ranks_outnumber_them():
    (qkv, _) = shapes.shard(shapes.gqa(4096, 32, 4, 128), 8)
    assert qkv.n == (4 + 1 + 1) * 128


@pytest.mark.parametrize(("n", "tp"), [(1280, 4), (64, 8)])
def test_a_shard_that_is_no_multiple_of_128_is_refused(n, tp):
    with pytest.raises(ValueError, match=rf"{n / tp:g}, no multiple of the 128"):
        shapes.Linear("x", n, 1024, "n").shard(tp)


def test_merged_parts_are_split_each_by_itself():
    """gate and up of 192 each: 2 x 192 / 2 ranks = 192 would pass as a whole, 96 + 96 does not."""
    gate_up, _ = shapes.mlp("mlp", 1024, 192)
    with pytest.raises(ValueError, match=r"96"):
        gate_up.shard(2)
    assert shapes.fitting_tp(shapes.mlp("mlp", 1024, 1280)) == [1, 2]


def test_other_blocks_and_unknown_layers_are_refused(tmp_path):
    other = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    with pytest.raises(ValueError, match=r"\[32, 32\]"):
        models.from_model(write(tmp_path, quantization_config=other))
    with pytest.raises(ValueError, match="no block-FP8 weights"):
        models.from_model(write(tmp_path, quantization_config=None))
    for text, message in (("[1]", "no model's config"), ("{", "no model's config")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            models.from_model(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in R1.items() if k != "hidden_size"})
    )
    with pytest.raises(ValueError, match="hidden_size"):
        models.from_model(tmp_path)
    with pytest.raises(FileNotFoundError):
        models.from_model(tmp_path / "nowhere.json")
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in R1.items() if k != "kv_lora_rank"})
    )
    with pytest.raises(ValueError, match=r"kv_lora_rank"):
        models.from_model(tmp_path)
