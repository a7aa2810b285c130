"""Qwen2-MoE: Qwen2 with routed experts and one that all tokens pass, behind a gate of its own."""

from typing import Any

from gspo_megatron.weights.families.table import (
    DECODER, DENSE_LAYERS, EXPERTS, QKV_BIAS, ROUTER, Family, L, M, Row, hidden, mlp, on_moe_layers, shared_ffn,
)  # fmt: skip
from gspo_megatron.weights.rules import replicated

_SHARED = (
    *mlp(f"{L}.mlp.shared_expert", f"{M}.mlp.shared_experts", shared_ffn, on_moe_layers),
    Row(
        (f"{L}.mlp.shared_expert_gate.weight",), f"{M}.mlp.shared_experts.gate_weight",
        replicated(lambda shape: 1, hidden), on_moe_layers,
    ),
)  # fmt: skip


def _faults(config: dict[str, Any]) -> list[str]:
    return [] if config.get("qkv_bias", True) else ["config.json has qkv_bias: false, which is not supported"]


QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM", (*DECODER, QKV_BIAS, ROUTER, *EXPERTS, *_SHARED, *DENSE_LAYERS), faults=_faults
)
