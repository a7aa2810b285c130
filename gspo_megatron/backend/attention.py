"""The parts of a transformer layer that Megatron-Core's local spec lacks: packed attention, and a norm that knows
sequence parallelism. With Transformer Engine its own modules are used instead."""

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from gspo_megatron.backend.context import GatherTokens, zigzag


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm whose weight gradient is reduced over the tensor group under sequence parallelism.

    Megatron's WrappedTorchNorm (`transformer/torch_norm.py`) refuses sequence parallelism; `finalize_model_grads`
    reduces the gradients of all parameters with the attribute `sequence_parallel`.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **kwargs):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class PackedAttention(nn.Module):
    """Causal attention over packed sequences, [S, heads, head_dim], by torch's scaled_dot_product_attention.

    Stands where the local spec has `DotProductAttention` (`transformer/dot_product_attention.py`), which takes neither
    packed sequences nor context parallelism. Under the latter every rank holds S = T / size of the T packed tokens in
    zigzag order (`backend/context.py`), and keys and values are gathered from the others.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None,
        cp_comm_type=None, pg_collection=None, **kwargs,
    ):  # fmt: skip
        super().__init__()
        if attention_type != "self" or (attention_dropout or config.attention_dropout):
            raise ValueError(
                "PackedAttention is self-attention without dropout; drop megatron.transformer.attention_dropout"
            )
        self.softmax_scale = softmax_scale
        self.group = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()
        self.window = None
        """How many keys a token sees, itself among them; None for all before it."""
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0] + 1
        # [heads of this rank] scores of the sinks, under the name that Megatron gives them
        self.register_parameter("softmax_offset", None)
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.zeros(num_heads, dtype=config.params_dtype))
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, attn_mask_type=AttnMaskType.causal,
        attention_bias=None, packed_seq_params=None, **kwargs,
    ) -> Tensor:  # fmt: skip
        """query [S, heads, d], key and value [S, kv heads, d] -> [S, heads * d]."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed_seq_params with qkv_format 'thd'")
        num_tokens = query.shape[0]
        query, key, value = (x.reshape(num_tokens, -1, x.shape[-1]) for x in (query, key, value))
        cu_seqlens, size = packed_seq_params.cu_seqlens_q, self.group.size()
        if size > 1:
            order = torch.cat([zigzag(cu_seqlens, rank, size) for rank in range(size)])
            both = GatherTokens.apply(torch.cat([key, value], dim=-1), order, self.group)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        bounds = cu_seqlens.tolist()
        outputs, done = [], 0
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
            for first, last in self._chunks(stop - start):
                rows = slice(done, done + last - first)
                outputs.append(self._attend(query[rows], key[start : start + last], value[start : start + last], first))
                done = rows.stop
        return torch.cat(outputs).reshape(num_tokens, -1)

    def _chunks(self, length: int) -> list[tuple[int, int]]:
        """(first, last + 1) token of each stretch of a sequence that this rank holds."""
        size, rank = self.group.size(), self.group.rank()
        if size == 1:
            return [(0, length)]
        chunk = length // (2 * size)
        return [(index * chunk, (index + 1) * chunk) for index in (rank, 2 * size - 1 - rank)]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
        """query [n, heads, d] of the tokens from `first` on, key and value of all up to the last of them."""
        num_queries, num_keys = query.shape[0], key.shape[0]
        mask, windowed = None, self.window is not None and num_keys > self.window
        if first or windowed or self.softmax_offset is not None:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(first)
            if windowed:
                mask = mask.triu(first - self.window + 1)
        if self.softmax_offset is not None:
            return self._attend_with_sink(query, key, value, mask)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )  # fmt: skip
        return output[0].transpose(0, 1)

    def _attend_with_sink(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Each head has a sink beside the keys, a score of its own that takes its share and gives no value
        (gpt-oss; StreamingLLM, arXiv 2309.17453). Holds the scores [heads, n, keys] in fp32."""
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scale = self.softmax_scale or query.shape[-1] ** -0.5
        scores = torch.einsum("qhd,khd->hqk", query, key).float() * scale
        scores = scores.masked_fill(~mask, float("-inf"))
        sink = self.softmax_offset.float()[:, None, None].expand(-1, scores.shape[1], 1)
        shares = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1].to(value.dtype)
        return torch.einsum("hqk,khd->qhd", shares, value)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For distributed checkpoints: sinks are cut over tensor ranks, like the heads."""
        if self.softmax_offset is None:
            return {}
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)
