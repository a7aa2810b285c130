"""What a model family needs of Megatron's TransformerConfig: one small function a family, from its config.json.

`transformer_config` in `model.py` lays these over the settings that all families share.
"""

from collections.abc import Callable
from typing import Any

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


def _qwen3(hf: HF, shape: ModelShape) -> dict[str, Any]:
    return dict(qk_layernorm=True)


def _qwen3_moe(hf: HF, shape: ModelShape) -> dict[str, Any]:
    return _qwen3(hf, shape) | experts(hf, shape, **softmax_router(hf, hf.get("norm_topk_prob", False)))


_SETTINGS: dict[str, Callable[[HF, ModelShape], dict[str, Any]]] = {
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}


def family_settings(hf: HF, shape: ModelShape) -> dict[str, Any]:
    """TransformerConfig fields of the family of `hf`, whose first architecture must be one of `FAMILIES`."""
    return _SETTINGS[hf["architectures"][0]](hf, shape)
