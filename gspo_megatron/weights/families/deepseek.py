"""DeepSeek-V2 and V3, and Kimi-K2, which is a V3: multi-latent attention, shared experts, dense first layers."""

from typing import Any

from gspo_megatron.weights.families.table import (
    DENSE_LAYERS, EMBEDDING, EXPERTS, FINAL, MA, NORMS, ROUTER, A, Family, L, M, Row, experts, hidden, mlp,
    on_moe_layers, shared_ffn, sigmoid_router_faults,
)  # fmt: skip
from gspo_megatron.weights.rules import ModelShape, column_parallel, replicated, row_parallel, vector


def _down(shape: ModelShape) -> int:
    return shape.kv_lora + shape.qk_rope


def _queries(shape: ModelShape) -> int:
    return shape.num_heads * (shape.qk_nope + shape.qk_rope)


def _keys_values(shape: ModelShape) -> int:
    return shape.num_heads * (shape.qk_nope + shape.v_head)


def _values(shape: ModelShape) -> int:
    return shape.num_heads * shape.v_head


def _q_lora(shape: ModelShape) -> int:
    return shape.q_lora


def _kv_lora(shape: ModelShape) -> int:
    return shape.kv_lora


def _has_q_lora(shape: ModelShape, layer: int | None) -> bool:
    return shape.q_lora > 0


def _no_q_lora(shape: ModelShape, layer: int | None) -> bool:
    return shape.q_lora == 0


def _has_shared(shape: ModelShape, layer: int | None) -> bool:
    return shape.is_moe(layer) and shape.shared_ffn > 0


# both down projections next to each other: SGLang joins them, and forgets one that comes without the other
LATENT_ATTENTION = (
    Row((f"{A}.q_proj.weight",), f"{MA}.linear_q_proj.weight", column_parallel(_queries, hidden), _no_q_lora),
    Row((f"{A}.q_a_proj.weight",), f"{MA}.linear_q_down_proj.weight", replicated(_q_lora, hidden), _has_q_lora),
    Row((f"{A}.kv_a_proj_with_mqa.weight",), f"{MA}.linear_kv_down_proj.weight", replicated(_down, hidden)),
    Row((f"{A}.q_a_layernorm.weight",), f"{MA}.q_layernorm.weight", vector(_q_lora), _has_q_lora),
    Row((f"{A}.q_b_proj.weight",), f"{MA}.linear_q_up_proj.weight", column_parallel(_queries, _q_lora), _has_q_lora),
    Row((f"{A}.kv_a_layernorm.weight",), f"{MA}.kv_layernorm.weight", vector(_kv_lora)),
    Row((f"{A}.kv_b_proj.weight",), f"{MA}.linear_kv_up_proj.weight", column_parallel(_keys_values, _kv_lora)),
    Row((f"{A}.o_proj.weight",), f"{MA}.linear_proj.weight", row_parallel(hidden, _values)),
)
_DECODER = (
    EMBEDDING, *NORMS, *LATENT_ATTENTION, *DENSE_LAYERS, ROUTER, *EXPERTS,
    *mlp(f"{L}.mlp.shared_experts", f"{M}.mlp.shared_experts", shared_ffn, _has_shared), *FINAL,
)  # fmt: skip
EXPERT_BIAS = Row(
    (f"{L}.mlp.gate.e_score_correction_bias",), f"{M}.mlp.router.expert_bias", vector(experts),
    on_moe_layers, keep_fp32=True,
)  # fmt: skip
"""Added to the router's scores to choose experts by, not to weight them with."""


def _yarn_faults(config: dict[str, Any]) -> list[str]:
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if rope.get("rope_type", rope.get("type", "default")) != "yarn":
        return []
    needed = {"factor", "original_max_position_embeddings"}
    known = needed | {"rope_type", "type", "rope_theta", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    faults = [f"config.json has no {key}.{name}; copy it from the model's source" for name in needed - rope.keys()]
    faults += [f"config.json has {key}.{name}, which yarn has no use for here" for name in sorted(rope.keys() - known)]
    if rope.get("mscale_all_dim") and not rope.get("mscale"):
        faults.append(f"config.json has {key}.mscale_all_dim without mscale; give both")
    return faults


def _common_faults(config: dict[str, Any], **allowed: tuple[Any, ...]) -> list[str]:
    allowed |= {"moe_layer_freq": (None, 1), "rope_interleave": (None, True)}
    faults = [
        f"config.json has {name}: {config.get(name)!r}, which is not supported; supported: "
        + " or ".join(repr(value) for value in values if value is not None)
        for name, values in allowed.items()
        if config.get(name) not in values
    ]
    groups, kept = config.get("n_group") or 1, config.get("topk_group") or 1
    if (config.get("n_routed_experts") or 0) % groups:
        faults.append(f"config.json has n_group: {groups}, which does not divide n_routed_experts")
    if kept > groups:
        faults.append(f"config.json has topk_group: {kept}, more than n_group: {groups}")
    return faults + _yarn_faults(config)


def _v2_faults(config: dict[str, Any]) -> list[str]:
    return _common_faults(
        config,
        topk_method=(None, "greedy", "group_limited_greedy"),
        scoring_func=(None, "softmax"),
        norm_topk_prob=(None, False),
    )


def _v3_faults(config: dict[str, Any]) -> list[str]:
    allowed = dict(topk_method=(None, "noaux_tc"), scoring_func=(None, "sigmoid"))
    return _common_faults(config, **allowed) + sigmoid_router_faults(config)


_FUSIONS = (
    (r"\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.", ".self_attn.fused_qkv_a_proj_with_mqa."),
    (r"\.(mlp|shared_experts)\.(gate|up)_proj\.", r".\1.gate_up_proj."),
    (r"\.mlp\.experts\.\d+\.(gate|up)_proj\.weight", ".mlp.experts.w13_weight"),
    (r"\.mlp\.experts\.\d+\.down_proj\.weight", ".mlp.experts.w2_weight"),
)
DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM", _DECODER, engine_fusions=_FUSIONS, rope_types=("default", "yarn"), faults=_v2_faults
)
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM", (*_DECODER, EXPERT_BIAS), engine_fusions=_FUSIONS, rope_types=("default", "yarn"),
    faults=_v3_faults,
)  # fmt: skip
