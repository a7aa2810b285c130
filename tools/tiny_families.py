"""The families of make_tiny_model.py: classes in transformers, tiny sizes, and what published config.json files call
otherwise than transformers 5."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TinyFamily:
    config_class: str
    model_class: str
    sizes: dict[str, Any]
    """Fields of config.json."""
    spelling: dict[str, str] = field(default_factory=dict)
    """transformers 5's name of a field -> that of the published checkpoints, which it reads as well."""
    published: dict[str, Any] = field(default_factory=dict)
    """What the published config.json files have besides; SGLang reads some of it. None takes a field away."""


_DENSE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_HEAD = {"head_dim": 16}
_QWEN_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_NUM_EXPERTS = {"num_local_experts": "num_experts"}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 128,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
_LATENT_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
    "mscale_all_dim": 0.707, "original_max_position_embeddings": 128,
}  # fmt: skip
_KIMI_YARN = _LATENT_YARN | {"rope_theta": 50000.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_LATENT_SPELLING = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
_DERIVED = {"head_dim": None, "qk_head_dim": None, "moe_layer_freq": 1}
_NOAUX = _DERIVED | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

FAMILIES = {
    "qwen2": TinyFamily("Qwen2Config", "Qwen2ForCausalLM", _DENSE),
    "qwen2_moe": TinyFamily(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        _DENSE | _QWEN_MOE | {"norm_topk_prob": False, "shared_expert_intermediate_size": 48},
        _NUM_EXPERTS,
    ),
    "qwen3": TinyFamily("Qwen3Config", "Qwen3ForCausalLM", _DENSE | _HEAD),
    "qwen3_moe": TinyFamily("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _DENSE | _HEAD | _QWEN_MOE, _NUM_EXPERTS),
    "llama": TinyFamily("LlamaConfig", "LlamaForCausalLM", _DENSE | _HEAD | {"rope_parameters": _LLAMA3}),
    "mixtral": TinyFamily(
        "MixtralConfig",
        "MixtralForCausalLM",
        _DENSE | {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "glm4_moe": TinyFamily(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        _DENSE
        | _HEAD
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 0,
        },
        {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    ),
    "gpt_oss": TinyFamily(
        "GptOssConfig",
        "GptOssForCausalLM",
        _DENSE
        | _HEAD
        | {
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek_v2": TinyFamily(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        _DENSE | _LATENT | {"topk_method": "group_limited_greedy", "rope_parameters": _LATENT_YARN},
        _LATENT_SPELLING,
        _DERIVED | {"scoring_func": "softmax"},
    ),
    "deepseek_v3": TinyFamily(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _DENSE | _LATENT | {"num_nextn_predict_layers": 0, "rope_parameters": _LATENT_YARN},
        _LATENT_SPELLING,
        _NOAUX,
    ),
    "kimi_k2": TinyFamily(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _DENSE
        | _LATENT
        | {"num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1, "rope_parameters": _KIMI_YARN},
        _LATENT_SPELLING,
        _NOAUX | {"model_type": "kimi_k2"},
    ),
}
"""Name for --family -> family."""
