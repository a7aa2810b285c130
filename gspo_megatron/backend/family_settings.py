"""What a model family needs of Megatron's TransformerConfig: one small function a family, from its config.json.

`transformer_config` in `model.py` lays these over the settings that all families share.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.activations import quick_gelu

from gspo_megatron.backend.rope import Rotary, rotary
from gspo_megatron.weights.rules import ModelShape

HF = dict[str, Any]


def experts(hf: HF, shape: ModelShape, **router: Any) -> dict[str, Any]:
    """Settings of all mixture-of-experts families; `router` says how experts are chosen and weighted."""
    return dict(
        num_moe_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.moe_ffn,
        moe_layer_freq=[int(shape.is_moe(layer)) for layer in range(shape.num_layers)],
        moe_router_topk=hf["num_experts_per_tok"],
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        **router,
    )


def softmax_router(hf: HF, normalised: bool) -> dict[str, Any]:
    """Softmax over the chosen experts equals softmax over all, normalised over the chosen ones."""
    return dict(moe_router_score_function="softmax", moe_router_pre_softmax=not normalised)


def sigmoid_router(hf: HF) -> dict[str, Any]:
    """DeepSeek-V3's: chosen by sigmoid plus a bias, among the best groups, weighted by the sigmoids alone. The bias is
    held as it is: Megatron's own rule moves it by the load, which no loss asks for."""
    groups = hf.get("n_group") or 1
    return dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        moe_router_num_groups=groups if groups > 1 else None,
        moe_router_group_topk=hf.get("topk_group") if groups > 1 else None,
        moe_router_topk_scaling_factor=hf.get("routed_scaling_factor"),
    )


def _llama(hf: HF, shape: ModelShape) -> dict[str, Any]:
    return {}


def _qwen2(hf: HF, shape: ModelShape) -> dict[str, Any]:
    return dict(add_qkv_bias=True)


def _qwen2_moe(hf: HF, shape: ModelShape) -> dict[str, Any]:
    shared = dict(moe_shared_expert_intermediate_size=shape.shared_ffn, moe_shared_expert_gate=True)
    return _qwen2(hf, shape) | shared | experts(hf, shape, **softmax_router(hf, hf.get("norm_topk_prob", False)))


def _qwen3(hf: HF, shape: ModelShape) -> dict[str, Any]:
    return dict(qk_layernorm=True)


def _qwen3_moe(hf: HF, shape: ModelShape) -> dict[str, Any]:
    return _qwen3(hf, shape) | experts(hf, shape, **softmax_router(hf, hf.get("norm_topk_prob", False)))


def _mixtral(hf: HF, shape: ModelShape) -> dict[str, Any]:
    epsilon = dict(layernorm_epsilon=hf.get("rms_norm_eps", 1e-5))
    return epsilon | experts(hf, shape, **softmax_router(hf, normalised=True))


def _glm4_moe(hf: HF, shape: ModelShape) -> dict[str, Any]:
    attention = dict(add_qkv_bias=shape.attention_bias, qk_layernorm=shape.qk_norm)
    shared = dict(moe_shared_expert_intermediate_size=shape.shared_ffn or None)
    epsilon = dict(layernorm_epsilon=hf.get("rms_norm_eps", 1e-5))
    return attention | shared | epsilon | experts(hf, shape, **sigmoid_router(hf))


def _gpt_oss(hf: HF, shape: ModelShape) -> dict[str, Any]:
    """Megatron's quick GELU is x * sigmoid(1.702 x); gate and up projection are clamped, the latter moved by 1."""
    kinds = hf.get("layer_types") or ["sliding_attention", "full_attention"] * shape.num_layers
    sliding = [int(kind == "sliding_attention") for kind in kinds[: shape.num_layers]]
    windows = any(sliding) and hf.get("sliding_window")
    return dict(
        layernorm_epsilon=hf.get("rms_norm_eps", 1e-5),
        add_bias_linear=True,
        activation_func=quick_gelu,
        activation_func_clamp_value=hf.get("swiglu_limit", 7.0),
        glu_linear_offset=1.0,
        softmax_type="learnable",
        # Megatron counts keys before the token's own, Hugging Face with it
        window_size=(hf["sliding_window"] - 1, 0) if windows else None,
        window_attn_skip_freq=sliding if windows else None,
        **experts(hf, shape, **softmax_router(hf, normalised=True)),
    )


def _latent_attention(hf: HF, shape: ModelShape) -> dict[str, Any]:
    """Fields of MLATransformerConfig. Megatron takes the rotary part of queries and keys as pairs, as DeepSeek does."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    settings = dict(
        multi_latent_attention=True,
        qk_layernorm=True,
        q_lora_rank=shape.q_lora or None,
        kv_lora_rank=shape.kv_lora,
        qk_head_dim=shape.qk_nope,
        qk_pos_emb_head_dim=shape.qk_rope,
        v_head_dim=shape.v_head,
        rotary_base=rope.get("rope_theta") or hf.get("rope_theta") or 10000.0,
        apply_rope_fusion=False,  # Transformer Engine's is for yarn only
        softmax_scale=None,  # from the sizes and mscale_all_dim
    )
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        # the scale of scores is taken from these under either kind of rotary embedding
        return settings | dict(rope_type="rope", rotary_scaling_factor=1.0, mscale=1.0, mscale_all_dim=0.0)
    both = bool(rope.get("mscale") and rope.get("mscale_all_dim"))
    return settings | dict(
        rope_type="yarn",
        rotary_scaling_factor=rope["factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
        beta_fast=rope.get("beta_fast") or 32,
        beta_slow=rope.get("beta_slow") or 1,
        mscale=rope["mscale"] if both else 1.0,
        mscale_all_dim=rope["mscale_all_dim"] if both else 0.0,
    )


def _deepseek(hf: HF, shape: ModelShape, router: dict[str, Any]) -> dict[str, Any]:
    shared = dict(moe_shared_expert_intermediate_size=shape.shared_ffn or None)
    return _latent_attention(hf, shape) | shared | experts(hf, shape, **router)


def _deepseek_v2(hf: HF, shape: ModelShape) -> dict[str, Any]:
    limited = hf.get("topk_method") == "group_limited_greedy"
    router = softmax_router(hf, normalised=False) | dict(
        moe_router_topk_scaling_factor=hf.get("routed_scaling_factor"),
        moe_router_num_groups=hf["n_group"] if limited else None,
        moe_router_group_topk=hf["topk_group"] if limited else None,
    )
    return _deepseek(hf, shape, router)


def _deepseek_v3(hf: HF, shape: ModelShape) -> dict[str, Any]:
    return _deepseek(hf, shape, sigmoid_router(hf))


_SETTINGS: dict[str, Callable[[HF, ModelShape], dict[str, Any]]] = {
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "LlamaForCausalLM": _llama,
    "MixtralForCausalLM": _mixtral,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GptOssForCausalLM": _gpt_oss,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
}
_ROTARY_DEFAULTS = {
    "MixtralForCausalLM": dict(default_theta=1e6),
    "Glm4MoeForCausalLM": dict(default_fraction=0.5),
    "GptOssForCausalLM": dict(default_theta=150000.0),
}
"""Where a family's config.json may leave out a number that is not the usual one."""


def family_rotary(hf: HF, shape: ModelShape) -> Rotary:
    """The rotary embedding of the family of `hf`. Raises ConfigError for one that is not supported."""
    return rotary(hf, shape.qk_rope or shape.head_dim, **_ROTARY_DEFAULTS.get(hf["architectures"][0], {}))


def family_settings(hf: HF, shape: ModelShape) -> dict[str, Any]:
    """TransformerConfig fields of the family of `hf`, whose first architecture must be one of `FAMILIES`."""
    return _SETTINGS[hf["architectures"][0]](hf, shape)
