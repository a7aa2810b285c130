"""What a family's table is made of: rows, sizes, and the rows that most families share.

A row is `HF name(s), Megatron name, rule` and serves both directions. In names stand
  `{L}`  the layer, from 0 on; in an HF name of a multi-token-prediction row, the layer behind the last as which it is
         stored
  `{M}`  the multi-token-prediction layer, from 0 on (Megatron names only)
  `{E}`  the expert, from 0 on; an HF name that ends in `[{E}]` is that expert's slice of a tensor with all of them
Megatron names are those of the local layer spec, counted over the whole model; `names.canonical_name` brings
Transformer Engine's names to them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gspo_megatron.weights.rules import (
    ModelShape,
    Rule,
    gated,
    qkv,
    qkv_bias,
    replicated,
    row_parallel,
    vector,
    vocabulary,
)

Exists = Callable[[ModelShape, int | None], bool]
"""(sizes, layer from 0 on, None for a row of no layer) -> whether the model has the row's parameter there."""


@dataclass(frozen=True)
class Row:
    hf: tuple[str, ...]
    megatron: str
    rule: Rule
    exists: Exists = lambda shape, layer: True
    keep_fp32: bool = False
    """Outside the trainer the tensors are fp32 whatever the training dtype, say a router's selection bias."""

    def where(self, exists: Exists) -> "Row":
        """The same row where `exists` says so too."""
        first = self.exists
        return replace(self, exists=lambda shape, layer: first(shape, layer) and exists(shape, layer))

    @property
    def is_expert(self) -> bool:
        return "{E}" in self.megatron

    @property
    def is_layer(self) -> bool:
        return "{L}" in self.megatron

    @property
    def is_mtp(self) -> bool:
        return "{M}" in self.megatron


ENGINE_QKV = (r"\.self_attn\.[qkv]_proj\.", ".self_attn.qkv_proj.")


@dataclass(frozen=True)
class Family:
    """One architecture. `models` names settings of config.json that this family computes and others refuse (see
    `model_files.py`); `engine_fusions` is what SGLang joins into one parameter, (pattern, replacement) on HF names."""

    architecture: str
    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    """Patterns of HF tensors that hold nothing to be trained."""
    engine_fusions: tuple[tuple[str, str], ...] = (
        ENGINE_QKV,
        (r"\.(mlp|shared_expert|shared_experts)\.(gate|up)_proj\.", r".\1.gate_up_proj."),
        (r"\.mlp\.experts\.\d+\.(gate|up)_proj\.weight", ".mlp.experts.w13_weight"),
        (r"\.mlp\.experts\.\d+\.down_proj\.weight", ".mlp.experts.w2_weight"),
    )
    models: tuple[str, ...] = ()
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    faults: Callable[[dict[str, Any]], list[str]] = lambda config: []
    """What in a config.json of this family is not supported, one line each, beyond what `model_files.py` finds."""

    def engine_name(self, hf: str) -> str:
        """The parameter of SGLang's model that holds this HF tensor."""
        for pattern, replacement in self.engine_fusions:
            hf = re.sub(pattern, replacement, hf)
        return hf

    @property
    def is_moe(self) -> bool:
        return any(row.is_expert for row in self.rows)

    @property
    def has_expert_biases(self) -> bool:
        return any(row.is_expert and row.megatron.endswith(".bias") for row in self.rows)


def on_moe_layers(shape: ModelShape, layer: int | None) -> bool:
    return shape.is_moe(layer)


def on_dense_layers(shape: ModelShape, layer: int | None) -> bool:
    return not shape.is_moe(layer)


def hidden(shape: ModelShape) -> int:
    return shape.hidden


def head(shape: ModelShape) -> int:
    return shape.head_dim


def query(shape: ModelShape) -> int:
    return shape.num_heads * shape.head_dim


def num_heads(shape: ModelShape) -> int:
    return shape.num_heads


def ffn(shape: ModelShape) -> int:
    return shape.ffn


def moe_ffn(shape: ModelShape) -> int:
    return shape.moe_ffn


def shared_ffn(shape: ModelShape) -> int:
    return shape.shared_ffn


def experts(shape: ModelShape) -> int:
    return shape.num_experts


def mlp(
    hf: str,
    megatron: str,
    width: Callable[[ModelShape], int],
    exists: Exists = lambda shape, layer: True,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Row, ...]:
    """A gated MLP of `width`; `names` of its gate, up and down projections."""
    gate, up, down = (f"{hf}.{name}.weight" for name in names)
    return (
        Row((gate, up), f"{megatron}.linear_fc1.weight", gated(width), exists),
        Row((down,), f"{megatron}.linear_fc2.weight", row_parallel(hidden, width), exists),
    )


def sigmoid_router_faults(config: dict[str, Any]) -> list[str]:
    """What Megatron's sigmoid router (`moe_utils.py`, topk_routing_with_score_function) does otherwise than config.json
    asks for."""
    faults, top = [], config.get("num_experts_per_tok", 0)
    if not config.get("norm_topk_prob", True) or top < 2:
        faults.append("config.json asks for weights that are not normalised over several experts: not supported")
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups > 1 and top // chosen != 2:
        faults.append(
            f"config.json has num_experts_per_tok {top} and topk_group {chosen}: a group is scored by its best two "
            "experts, in Megatron by as many as come to a group, here not 2"
        )
    return faults


L, M = "model.layers.{L}", "decoder.layers.{L}"
"""A layer in HF's and in Megatron's names."""
A, MA = f"{L}.self_attn", f"{M}.self_attention"

EMBEDDING = Row(("model.embed_tokens.weight",), "embedding.word_embeddings.weight", vocabulary)
FINAL = (
    Row(("model.norm.weight",), "decoder.final_layernorm.weight", vector(hidden)),
    Row(("lm_head.weight",), "output_layer.weight", vocabulary),
)
NORMS = (
    Row((f"{L}.input_layernorm.weight",), f"{M}.input_layernorm.weight", vector(hidden)),
    Row((f"{L}.post_attention_layernorm.weight",), f"{M}.pre_mlp_layernorm.weight", vector(hidden)),
)
ATTENTION = (
    Row((f"{A}.q_proj.weight", f"{A}.k_proj.weight", f"{A}.v_proj.weight"), f"{MA}.linear_qkv.weight", qkv),
    Row((f"{A}.o_proj.weight",), f"{MA}.linear_proj.weight", row_parallel(hidden, query)),
)
DECODER = (EMBEDDING, *NORMS, *ATTENTION, *FINAL)
"""What a pre-norm decoder with grouped-query attention has besides its MLPs."""
QKV_BIAS = Row((f"{A}.q_proj.bias", f"{A}.k_proj.bias", f"{A}.v_proj.bias"), f"{MA}.linear_qkv.bias", qkv_bias)
QK_NORMS = (
    Row((f"{A}.q_norm.weight",), f"{MA}.q_layernorm.weight", vector(head)),
    Row((f"{A}.k_norm.weight",), f"{MA}.k_layernorm.weight", vector(head)),
)
ROUTER = Row((f"{L}.mlp.gate.weight",), f"{M}.mlp.router.weight", replicated(experts, hidden), on_moe_layers)
DENSE_MLP = mlp(f"{L}.mlp", f"{M}.mlp", ffn)
DENSE_LAYERS = mlp(f"{L}.mlp", f"{M}.mlp", ffn, on_dense_layers)
"""The MLPs of a mixture-of-experts model's layers without experts."""
EXPERTS = mlp(f"{L}.mlp.experts.{{E}}", f"{M}.mlp.experts.local_experts.{{E}}", moe_ffn, on_moe_layers)
