"""Qwen3: norms on query and key heads."""

from gspo_megatron.weights.families.table import DECODER, DENSE_MLP, QK_NORMS, Family

QWEN3 = Family("Qwen3ForCausalLM", (*DECODER, *QK_NORMS, *DENSE_MLP))
