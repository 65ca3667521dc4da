"""The block-FP8 linear layers of a model, from its config.json.

What a model's code builds is read in the hosts' `srt/models` (sglang-kt 0.7.2, sglang 0.5.23) and
written down by `model_type`: a type that is not known here is an error, never a guess. Routed
experts are no linears: they go through the host's MoE kernel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kt_sm120 import shapes
from sglang_kt_sm120.shapes import BLOCK, Linear

#: Multi-head latent attention with DeepSeek's experts; an indexer where the config has one.
MLA = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2"}
#: Grouped-query attention and a gated MLP, in dense models.
DENSE = {"llama", "mistral", "qwen2", "qwen3", "qwen3_vl_text"}
#: The same with experts. Qwen's shared expert has a width of its own, GLM's DeepSeek's keys; the
#: last two have none.
QWEN_MOE = {"qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"}
MOE = {"glm4_moe", "minimax_m2", "mixtral"}
#: Gated delta nets between layers of grouped-query attention whose q carries an output gate.
HYBRID = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"}
FULL, LINEAR = ("full_attention", "sliding_attention"), "linear_attention"


@dataclass(frozen=True)
class _Part:
    """A layer, the checkpoint's module that it is made of, and the model's layers that have it."""

    linear: Linear
    module: str
    where: frozenset[int]


def from_model(path: str | Path, note: Callable[[str], None] = lambda text: None) -> list[Linear]:
    """Read a model's block-FP8 linears from its config.json.

    Args:
        path: The model's folder, or the file itself.
        note: Called with a sentence for each thing that is left out.

    Raises:
        FileNotFoundError: No config.json there.
        ValueError: Not a block-FP8 model, or an architecture whose layers are not known here.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        whole = json.loads(file.read_text())
        config = whole.get("text_config", whole)
        quant = whole.get("quantization_config") or config.get("quantization_config") or {}
        block = _block(quant, note)
        if block is None:
            raise ValueError(
                f"{file}: no block-FP8 weights in its quantization_config, so no layer of this "
                "model would be ours; this package serves [128, 128] block-FP8 models"
            )
        if block != [BLOCK, BLOCK]:
            raise ValueError(
                f"{file}: the weight block is {block}; this package serves [128, 128] block-FP8 "
                "models"
            )
        if "vision_config" in whole:
            note("the vision tower is left out: its layers are not read here")
        return _quantised(_parts(config), quant, note)
    except (json.JSONDecodeError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} is no model's config.json: {error}") from None
    except KeyError as error:
        raise ValueError(f"{file} has no {error}, which this model's layers depend on") from None
    except _Unknown as error:
        raise ValueError(
            f"{file}: {error}; give its layers one by one with --shape N,K, or a --set"
        ) from None


class _Unknown(Exception):
    """What a model is made of is not known here; the message names it."""


def _block(quant: dict, note: Callable[[str], None]) -> list[int] | None:
    """Return the weight block, of sglang's own FP8 format or of compressed-tensors' groups."""
    if "config_groups" not in quant:
        return quant.get("weight_block_size")
    blocks = []
    for name, group in quant["config_groups"].items():
        weights = group.get("weights") or {}
        if weights.get("type") == "float" and weights.get("strategy") == "block":
            blocks.append(weights.get("block_structure"))
            if group.get("targets", ["Linear"]) != ["Linear"]:
                note(f"group {name} is for {group['targets']} alone: listed as if for every linear")
        else:
            note(f"group {name} is left out: {weights.get('strategy')} is no block FP8")
    return blocks[0] if blocks and all(block == blocks[0] for block in blocks) else None


def _parts(config: dict[str, Any]) -> list[_Part]:
    kind, hidden = config.get("model_type"), config["hidden_size"]
    layers = frozenset(range(config["num_hidden_layers"]))
    if kind in MLA:
        attention = _latent(config, hidden, layers)
    elif kind in DENSE | QWEN_MOE | MOE | HYBRID:
        attention = _grouped(config, hidden, layers)
    else:
        raise _Unknown(f"the layers of model_type {kind!r} are not known here")
    return [*attention, *_feed_forward(config, hidden, layers)]


def _latent(config: dict, hidden: int, layers: frozenset[int]) -> list[_Part]:
    if not config.get("q_lora_rank"):
        raise _Unknown("multi-head latent attention without q_lora_rank is not known here")
    found = shapes.mla(
        hidden,
        config["num_attention_heads"],
        config["q_lora_rank"],
        config["kv_lora_rank"],
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    modules = ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]
    if config.get("index_topk"):  # nsa_indexer.py: replicated; its weights_proj is never quantised
        width = config["index_head_dim"]
        found += [
            Linear("indexer.wq_b", config["index_n_heads"] * width, config["q_lora_rank"]),
            Linear("indexer.wk", width, hidden),
        ]
        modules += ["indexer.wq_b", "indexer.wk"]
    return [
        _Part(linear, f"self_attn.{module}", layers)
        for linear, module in zip(found, modules, strict=True)
    ]


def _grouped(config: dict, hidden: int, layers: frozenset[int]) -> list[_Part]:
    hybrid = config["model_type"] in HYBRID
    types = _layer_types(config, hybrid)
    strange = set(types) - {*FULL, *([LINEAR] if hybrid else [])}
    if strange:
        raise _Unknown(f"layers of type {sorted(strange)} are not known here")
    delta = frozenset(index for index, kind in enumerate(types) if kind == LINEAR)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    gate = hybrid and config.get("attn_output_gate", True)
    qkv, o = shapes.gqa(hidden, heads, config["num_key_value_heads"], head_dim, gate)
    found = [
        _Part(qkv, "self_attn.q_proj", layers - delta),
        _Part(o, "self_attn.o_proj", layers - delta),
    ]
    return [*found, *_delta_net(config, hidden, delta)] if delta else found


def _layer_types(config: dict, hybrid: bool) -> list[str]:
    if config.get("layer_types"):
        return config["layer_types"]
    if not hybrid:
        return [FULL[0]] * config["num_hidden_layers"]
    every = config.get("full_attention_interval", 4)
    return [
        LINEAR if (index + 1) % every else FULL[0] for index in range(config["num_hidden_layers"])
    ]


def _delta_net(config: dict, hidden: int, where: frozenset[int]) -> list[_Part]:
    """Return a gated delta net's linears (qwen3_next.py, qwen3_5.py).

    Qwen3.5's checkpoints keep qkv and z apart: older hosts load them as two layers, newer ones as
    one, so all three are listed.
    """
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads = config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    qkvz = Linear(
        "linear_attn.in_proj_qkvz", 2 * (keys + values), hidden, "n",
        ((keys, 0), (keys, 0), (values, 0), (values, 0)),
    )  # fmt: skip
    out = _Part(Linear("linear_attn.out_proj", hidden, values, "k"), "linear_attn.out_proj", where)
    ba = Linear("linear_attn.in_proj_ba", 2 * heads, hidden, "n")
    if config["model_type"] == "qwen3_next":
        found = [(qkvz, "in_proj_qkvz"), (ba, "in_proj_ba")]
    else:
        parts = ((keys, 0), (keys, 0), (values, 0))
        qkv = Linear("linear_attn.in_proj_qkv", 2 * keys + values, hidden, "n", parts)
        z = Linear("linear_attn.in_proj_z", values, hidden, "n")
        found = [(qkvz, "in_proj_qkv"), (qkv, "in_proj_qkv"), (z, "in_proj_z"), (ba, "in_proj_b")]
    return [*(_Part(linear, f"linear_attn.{name}", where) for linear, name in found), out]


def _feed_forward(config: dict, hidden: int, layers: frozenset[int]) -> list[_Part]:
    """Return the dense MLP and the shared experts, each with the layers that have it."""
    kind = config["model_type"]
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    experts = next((config[name] for name in names if config.get(name)), 0)
    sparse = frozenset() if not experts else layers
    if experts and config.get("first_k_dense_replace"):
        sparse -= set(range(config["first_k_dense_replace"]))
    if experts and config.get("moe_layer_freq", 1) != 1:
        sparse -= {index for index in layers if index % config["moe_layer_freq"]}
    if experts and kind in QWEN_MOE | HYBRID:
        step = config.get("decoder_sparse_step", 1)
        sparse -= {index for index in layers if (index + 1) % step}
        sparse -= set(config.get("mlp_only_layers") or ())
    found = []
    if layers - sparse:
        found += _mlp("mlp", hidden, config["intermediate_size"], layers - sparse)
    if sparse and config.get("n_shared_experts"):
        width = config["n_shared_experts"] * config["moe_intermediate_size"]
        found += _mlp("shared_experts", hidden, width, sparse)
    if sparse and config.get("shared_expert_intermediate_size"):
        width = config["shared_expert_intermediate_size"]
        found += _mlp("shared_expert", hidden, width, sparse)
    return found


def _mlp(name: str, hidden: int, width: int, where: frozenset[int]) -> list[_Part]:
    gate_up, down = shapes.mlp(name, hidden, width)
    module = "mlp" if name == "mlp" else f"mlp.{name}"
    return [_Part(gate_up, f"{module}.gate_proj", where), _Part(down, f"{module}.down_proj", where)]


def _quantised(parts: Iterable[_Part], quant: dict, note: Callable[[str], None]) -> list[Linear]:
    """Return the parts that the checkpoint quantises in at least one layer; note the others."""
    names = ("modules_to_not_convert", "ignored_layers", "ignore")
    entries = [entry for name in names for entry in quant.get(name) or ()]
    found = []
    for part in parts:
        if all(_skipped(f"layers.{index}.{part.module}", entries) for index in part.where):
            note(f"{part.linear.name} is left out: this checkpoint does not quantise it")
        else:
            found.append(part.linear)
    return found


def _skipped(name: str, entries: list[str]) -> bool:
    """True where an entry names the module or what holds it; "re:" is a regular expression."""
    for entry in entries:
        if entry.startswith("re:"):
            if re.match(entry[3:], f"model.{name}"):
                return True
        elif f".{re.sub(r'^((model|language_model)[.])+', '', entry)}." in f".{name}.":
            return True
    return False
