"""Qwen2 and Qwen2.5: biases on query, key and value."""

from gspo_megatron.weights.families.table import DECODER, DENSE_MLP, QKV_BIAS, Family

QWEN2 = Family("Qwen2ForCausalLM", (*DECODER, QKV_BIAS, *DENSE_MLP))
