"""Llama 3 to 3.3 (text): a plain decoder, from 3.1 on with rotary frequencies stretched for long contexts."""

from gspo_megatron.weights.families.table import DECODER, DENSE_MLP, Family

LLAMA = Family("LlamaForCausalLM", (*DECODER, *DENSE_MLP))
