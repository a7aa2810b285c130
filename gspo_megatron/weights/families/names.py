"""Transformer Engine's names of Megatron parameters, by those of the local layer spec.

Megatron's specs (`models/gpt/gpt_layer_specs.py`): Transformer Engine joins a norm with the linear layer behind it, and
all experts of a rank into one module whose parameters are numbered (`TEGroupedMLP`).
"""

import re

_ENGINE_TO_LOCAL = (
    (r"\.self_attention\.linear_qkv\.layer_norm_weight$", ".input_layernorm.weight"),
    (r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight$", r".self_attention.\1_layernorm.weight"),
    (r"\.mlp\.linear_fc1\.layer_norm_weight$", ".pre_mlp_layernorm.weight"),
    (r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".mlp.experts.local_experts.\3.\1.\2"),
)


def canonical_name(name: str) -> str:
    """A Megatron parameter name as the local layer spec writes it; other names are returned as they are."""
    for pattern, replacement in _ENGINE_TO_LOCAL:
        name = re.sub(pattern, replacement, name)
    return name
