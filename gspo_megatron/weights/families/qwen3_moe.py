"""Qwen3-MoE: Qwen3 with routed experts, on all layers or on those that config.json says."""

from gspo_megatron.weights.families.table import DECODER, DENSE_LAYERS, EXPERTS, QK_NORMS, ROUTER, Family

QWEN3_MOE = Family("Qwen3MoeForCausalLM", (*DECODER, *QK_NORMS, ROUTER, *EXPERTS, *DENSE_LAYERS))
