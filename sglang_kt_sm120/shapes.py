"""The block-FP8 linear layers of models: named shape sets, and what one rank holds of them.

Tensor parallelism splits N of a column-parallel layer and K of a row-parallel one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

BLOCK = 128


@dataclass(frozen=True)
class Linear:
    """One layer's weight, `[n, k]`.

    Attributes:
        name: As the model's code calls it.
        split: What tensor parallelism divides: "n" (column parallel), "k" (row parallel) or "".
        parts: Merged column-parallel layers: `(outputs, smallest shard)` of each part that is split
            by itself. Key and value heads have a smallest shard (one head): with more ranks than
            heads each rank holds a copy.
    """

    name: str
    n: int
    k: int
    split: str = ""
    parts: tuple[tuple[int, int], ...] = ()

    def shard(self, tp: int) -> Linear:
        """Return the layer that one of `tp` ranks holds.

        Raises:
            ValueError: What is split does not divide, or leaves a shard that is no multiple of 128,
                which sglang refuses to load.
        """
        if tp == 1 or not self.split:
            return self
        parts = self.parts or ((getattr(self, self.split), 0),)
        sizes = [max(size // tp, smallest) for size, smallest in parts]
        for (size, smallest), shard in zip(parts, sizes, strict=True):
            if (size % tp and shard != smallest) or shard % BLOCK:
                raise ValueError(
                    f"{self.name}: {self.split.upper()} = {size} over {tp} ranks is {size / tp:g}, "
                    "no multiple of the 128-wide weight block; sglang refuses to load it"
                )
        return replace(self, **{self.split: sum(sizes)}, parts=())


def mla(hidden, heads, q_rank, kv_rank=512, nope=128, rope=64, v=128) -> list[Linear]:
    """Return the attention linears of DeepSeek's multi-head latent attention."""
    return [
        Linear("fused_qkv_a_proj_with_mqa", q_rank + kv_rank + rope, hidden),
        Linear("q_b_proj", heads * (nope + rope), q_rank, "n"),
        Linear("kv_b_proj", heads * (nope + v), kv_rank, "n"),
        Linear("o_proj", hidden, heads * v, "k"),
    ]


def gqa(hidden, heads, kv_heads, head_dim, gate=False) -> list[Linear]:
    """Return the attention linears of grouped-query attention (`gate`: an output gate in q)."""
    queries, kv = heads * head_dim * (2 if gate else 1), kv_heads * head_dim
    parts = ((queries, 0), (kv, head_dim), (kv, head_dim))
    return [
        Linear("qkv_proj", queries + 2 * kv, hidden, "n", parts),
        Linear("o_proj", hidden, heads * head_dim, "k"),
    ]


def mlp(name, hidden, intermediate) -> list[Linear]:
    """Return gate_up_proj and down_proj of a gated MLP."""
    return [
        Linear(f"{name}.gate_up_proj", 2 * intermediate, hidden, "n", ((intermediate, 0),) * 2),
        Linear(f"{name}.down_proj", hidden, intermediate, "k"),
    ]


#: Sources: the models' public config.json; DeepSeek-V4-Flash from vLLM's tuned-table names for the
#: RTX PRO 6000; Qwen3.6-27B from sglang issue 33629; GLM-5.3-Flash from the defaults of
#: `Glm5NextTextConfig` in sglang-kt 0.7.2 (its linear-attention layers are not block FP8).
SHAPE_SETS: dict[str, list[Linear]] = {
    "deepseek-r1": [
        *mla(7168, 128, 1536),
        *mlp("mlp", 7168, 18432),
        *mlp("shared_experts", 7168, 2048),
    ],
    "kimi-k2": [*mla(7168, 64, 1536), *mlp("mlp", 7168, 18432), *mlp("shared_experts", 7168, 2048)],
    "qwen3.6-27b": [
        *mlp("mlp", 5120, 17408),
        Linear("linear_attn.in_proj_qkvz", 16384, 5120, "n"),
        Linear("linear_attn.out_proj", 5120, 6144, "k"),
        *gqa(5120, 24, 4, 256, gate=True),
    ],
    "glm-5.3-flash": [
        *mla(4096, 64, 1536, 512, nope=256, rope=0, v=256),
        *mlp("mlp", 4096, 12288),
        *mlp("shared_experts", 4096, 2048),
    ],
    "minimax-m2": gqa(3072, 48, 8, 128),
    "deepseek-v4-flash": [
        Linear("wq_a", 1024, 4096),
        Linear("wkv", 512, 4096),
        Linear("wq_b", 32768, 1024, "n"),
        Linear("wo_b", 4096, 8192, "k"),
        Linear("wo_a", 8192, 1024, "n"),
        Linear("shared_experts.gate_up_proj", 4096, 4096, "n"),
        Linear("shared_experts.down_proj", 4096, 2048, "k"),
    ],
}


def shard(linears: list[Linear], tp: int) -> list[Linear]:
    """Return every layer's shard for `tp` ranks; ValueError names the first that does not fit."""
    return [linear.shard(tp) for linear in linears]


def fitting_tp(linears: list[Linear], sizes=(1, 2, 4, 8, 16)) -> list[int]:
    """Return the tensor-parallel sizes for which every layer's shard is a multiple of 128."""

    def fits(tp: int) -> bool:
        try:
            return bool(shard(linears, tp))
        except ValueError:
            return False

    return [tp for tp in sizes if fits(tp)]


def unique(linears: list[Linear]) -> list[Linear]:
    """Return the layers without those whose (n, k) came before, keeping the order."""
    seen: dict[tuple[int, int], Linear] = {}
    for linear in linears:
        seen.setdefault((linear.n, linear.k), linear)
    return list(seen.values())
