"""gspo_megatron: GSPO for mixture-of-experts language models on Megatron-Core and SGLang."""

__version__ = "0.1.0"
