"""The parts of a transformer layer that Megatron-Core's local spec lacks: packed attention, and a norm that knows
sequence parallelism. With Transformer Engine its own modules are used instead."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm whose weight gradient is reduced over the tensor group under sequence parallelism.

    Megatron's WrappedTorchNorm (`transformer/torch_norm.py`) refuses sequence parallelism; `finalize_model_grads` reduces
    the gradients of all parameters with the attribute `sequence_parallel`.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **kwargs):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class PackedAttention(nn.Module):
    """Causal attention over packed sequences, [T, heads, head_dim], by torch's scaled_dot_product_attention.

    Stands where the local spec has `DotProductAttention` (`transformer/dot_product_attention.py`), which takes neither
    packed sequences nor their variable lengths without padding.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None, **kwargs
    ):
        super().__init__()
        if attention_type != "self" or (attention_dropout or config.attention_dropout):
            raise ValueError("PackedAttention is self-attention without dropout; set megatron.transformer.attention_dropout: 0")
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, attn_mask_type=AttnMaskType.causal,
        attention_bias=None, packed_seq_params=None, **kwargs,
    ) -> Tensor:  # fmt: skip
        """query [T, heads, d], key and value [T, kv heads, d] -> [T, heads * d]."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed_seq_params with qkv_format 'thd'")
        num_tokens = query.shape[0]
        query, key, value = (x.reshape(num_tokens, -1, x.shape[-1]).transpose(0, 1) for x in (query, key, value))
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        outputs = [
            F.scaled_dot_product_attention(
                query[None, :, start:stop], key[None, :, start:stop], value[None, :, start:stop],
                is_causal=True, scale=self.softmax_scale, enable_gqa=key.shape[0] != query.shape[0],
            )[0]
            for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
            if stop > start
        ]  # fmt: skip
        return torch.cat(outputs, dim=1).transpose(0, 1).reshape(num_tokens, -1)
