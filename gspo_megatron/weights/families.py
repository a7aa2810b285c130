"""Model families, each one table of rows `HF name(s), Megatron name, rule`; a row serves both directions.

`{L}` is the layer from 0 on, `{E}` the expert from 0 on. Megatron names are those of the local layer spec, counted over
the whole model; `canonical_name` brings Transformer Engine's names to them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from gspo_megatron.weights.rules import ModelShape, Rule, gated, qkv, replicated, row_parallel, vector, vocabulary


@dataclass(frozen=True)
class Row:
    hf: tuple[str, ...]
    megatron: str
    rule: Rule


@dataclass(frozen=True)
class Family:
    """`engine_fusions`: what SGLang joins into one parameter, as (pattern, replacement) on HF names."""

    architecture: str
    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    """Patterns of HF tensors that hold nothing to be trained."""
    engine_fusions: tuple[tuple[str, str], ...] = (
        (r"\.self_attn\.[qkv]_proj\.", ".self_attn.qkv_proj."),
        (r"\.mlp\.(gate|up)_proj\.", ".mlp.gate_up_proj."),
        (r"\.mlp\.experts\.\d+\.(gate|up)_proj\.weight", ".mlp.experts.w13_weight"),
        (r"\.mlp\.experts\.\d+\.down_proj\.weight", ".mlp.experts.w2_weight"),
    )

    def engine_name(self, hf: str) -> str:
        """The parameter of SGLang's model that holds this HF tensor."""
        for pattern, replacement in self.engine_fusions:
            hf = re.sub(pattern, replacement, hf)
        return hf


def _hidden(shape: ModelShape) -> int:
    return shape.hidden


def _head(shape: ModelShape) -> int:
    return shape.head_dim


def _query(shape: ModelShape) -> int:
    return shape.num_heads * shape.head_dim


def _ffn(shape: ModelShape) -> int:
    return shape.ffn


def _moe_ffn(shape: ModelShape) -> int:
    return shape.moe_ffn


def _experts(shape: ModelShape) -> int:
    return shape.num_experts


def _mlp(hf: str, megatron: str, ffn: Callable[[ModelShape], int]) -> tuple[Row, ...]:
    return (
        Row((f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), f"{megatron}.linear_fc1.weight", gated(ffn)),
        Row((f"{hf}.down_proj.weight",), f"{megatron}.linear_fc2.weight", row_parallel(_hidden, ffn)),
    )


_L, _M = "model.layers.{L}", "decoder.layers.{L}"
_A, _MA = f"{_L}.self_attn", f"{_M}.self_attention"

_QWEN3_COMMON = (
    Row(("model.embed_tokens.weight",), "embedding.word_embeddings.weight", vocabulary),
    Row((f"{_L}.input_layernorm.weight",), f"{_M}.input_layernorm.weight", vector(_hidden)),
    Row((f"{_A}.q_proj.weight", f"{_A}.k_proj.weight", f"{_A}.v_proj.weight"), f"{_MA}.linear_qkv.weight", qkv),
    Row((f"{_A}.q_norm.weight",), f"{_MA}.q_layernorm.weight", vector(_head)),
    Row((f"{_A}.k_norm.weight",), f"{_MA}.k_layernorm.weight", vector(_head)),
    Row((f"{_A}.o_proj.weight",), f"{_MA}.linear_proj.weight", row_parallel(_hidden, _query)),
    Row((f"{_L}.post_attention_layernorm.weight",), f"{_M}.pre_mlp_layernorm.weight", vector(_hidden)),
    Row(("model.norm.weight",), "decoder.final_layernorm.weight", vector(_hidden)),
    Row(("lm_head.weight",), "output_layer.weight", vocabulary),
)

FAMILIES: dict[str, Family] = {
    "Qwen3ForCausalLM": Family("Qwen3ForCausalLM", _QWEN3_COMMON + _mlp(f"{_L}.mlp", f"{_M}.mlp", _ffn)),
    "Qwen3MoeForCausalLM": Family(
        "Qwen3MoeForCausalLM",
        (
            *_QWEN3_COMMON,
            Row((f"{_L}.mlp.gate.weight",), f"{_M}.mlp.router.weight", replicated(_experts, _hidden)),
            *_mlp(f"{_L}.mlp.experts.{{E}}", f"{_M}.mlp.experts.local_experts.{{E}}", _moe_ffn),
        ),
    ),
}
"""HF architecture -> family."""

_ENGINE_TO_LOCAL = (  # Transformer Engine's fused and grouped modules, by the local spec's names
    (r"\.self_attention\.linear_qkv\.layer_norm_weight$", ".input_layernorm.weight"),
    (r"\.mlp\.linear_fc1\.layer_norm_weight$", ".pre_mlp_layernorm.weight"),
    (r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$", r".mlp.experts.local_experts.\2.\1.weight"),
)


def canonical_name(name: str) -> str:
    """A Megatron parameter name as the local layer spec writes it; other names are returned as they are."""
    for pattern, replacement in _ENGINE_TO_LOCAL:
        name = re.sub(pattern, replacement, name)
    return name
