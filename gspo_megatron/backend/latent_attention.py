"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) for the local layer spec."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from gspo_megatron.backend.attention import PackedAttention, RMSNorm


class ReplicatedLinear(nn.Module):
    """A projection without bias that every tensor rank holds whole and applies to its own part of the tokens.

    What Transformer Engine's layer spec uses for the down projections (`TELinear`, parallel_mode "duplicated"). The
    weight's gradient is added up over the tensor group by its attribute `sequence_parallel`.
    """

    def __init__(self, config, input_size: int, output_size: int):
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[S, 1, input_size] -> [S, 1, output_size]; no bias, as Megatron's linear layers answer it."""
        return F.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):
    """MLASelfAttention with replicated down projections.

    Megatron's local spec cuts them over the tensor ranks and gathers their output (`gather_from_tensor_model_parallel_
    region`), whose backward gives each rank its columns of its own gradient. For the rotary part of the key, which all
    heads share, that leaves out what the other ranks' heads say: a wrong gradient with tensor > 1, without an error
    (0.16.1 and 0.19.2). Replicated, it is gathered over the tokens, whose backward adds all heads up.
    """

    def __init__(self, config, submodules: MLASelfAttentionSubmodules, layer_number: int, *args, **kwargs):
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            raise ValueError("multi-latent attention on several tensor ranks needs parallel.sequence_parallel: true")
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, config.q_lora_rank)
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, latent)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, type]:
        """What 0.19 builds: the submodules as they are. By itself it would put a norm before the query projection where
        queries have no latent, which no model here has (`transformer/mla_qk_norm_config.py`)."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def latent_attention_spec() -> ModuleSpec:
    """Stands where the local spec has its own multi-latent attention."""
    # 0.16.1 tests its layers against a mock of Transformer Engine's linear layer, which is no class.
    multi_latent_attention.HAVE_TE = False
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )
