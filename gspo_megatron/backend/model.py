"""A GPTModel from a Hugging Face config.json: Megatron's configuration, layer spec and the model of this rank."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import LayerType
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from gspo_megatron.backend.attention import PackedAttention, RMSNorm
from gspo_megatron.backend.family_settings import family_rotary, family_settings
from gspo_megatron.backend.latent_attention import latent_attention_spec
from gspo_megatron.backend.log_likelihood import LogProbHead
from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.router import BestOfGroupRouter, set_router
from gspo_megatron.config import Config
from gspo_megatron.weights.hf_files import torch_dtype
from gspo_megatron.weights.rules import ModelShape

try:
    import transformer_engine  # noqa: F401

    HAVE_TRANSFORMER_ENGINE = True
except ImportError:
    HAVE_TRANSFORMER_ENGINE = False


def transformer_config(hf: dict[str, Any], config: Config, mesh: Mesh) -> TransformerConfig:
    """Megatron's configuration of the model in `hf` on this layout; `config.megatron.transformer` is laid over it."""
    shape, parallel = ModelShape.from_hf(hf), config.parallel
    dtype = torch_dtype(config.train.dtype)
    on_gpu, virtual = mesh.device.type == "cuda", parallel.virtual_pipeline > 1
    settings: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn or shape.moe_ffn,
        normalization="RMSNorm",
        layernorm_epsilon=hf.get("rms_norm_eps", 1e-6),
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if virtual else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor > 1,
        # Virtual stages need one length (see `Policy._pad_for_schedule`); then no shapes are exchanged.
        variable_seq_lengths=not virtual,
        moe_token_dispatcher_type="alltoall",  # 0.16.1 asks for it under variable lengths in dense models too
        # The loss comes as a sum with its count, so that the mean is over all sequences of the mini-batch, however cut.
        calculate_per_token_loss=True,
        # A batched exchange with one peer, which two ranks with virtual stages have both before and after them, swaps
        # what goes forward and what goes backward. On gloo it does so without virtual stages too.
        batch_p2p_comm=on_gpu and not virtual,
        overlap_p2p_comm=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=on_gpu and HAVE_TRANSFORMER_ENGINE,
    )
    if shape.num_experts:
        grouped = on_gpu and HAVE_TRANSFORMER_ENGINE
        settings |= dict(moe_grouped_gemm=grouped, moe_permute_fusion=grouped)
        settings["moe_enable_routing_replay"] = config.train.routing_replay
    factor = family_rotary(hf, shape).attention_factor
    if factor != 1.0:  # of queries and of keys; the fused rotary embedding of Transformer Engine knows none
        settings["softmax_scale"] = factor**2 / shape.head_dim**0.5
    settings |= family_settings(hf, shape)
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    return kind(**{**settings, **config.megatron.transformer})


def layer_spec(config: TransformerConfig, on_gpu: bool, is_moe: bool) -> ModuleSpec:
    """Transformer Engine's layer on GPUs where it is importable, else the local one with packed attention and our
    norm."""
    arguments = dict(
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm if is_moe else False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    if on_gpu and HAVE_TRANSFORMER_ENGINE:
        spec = get_gpt_layer_with_transformer_engine_spec(**arguments)
    else:
        spec = _with_our_modules(
            get_gpt_layer_local_spec(**arguments, normalization=config.normalization), config, is_moe
        )
    if is_moe and config.moe_router_group_topk and config.moe_router_score_function == "softmax":
        set_router(spec, BestOfGroupRouter)
    return spec


def _with_our_modules(spec: ModuleSpec, config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    """The local layer spec with attention and norms that know packed sequences, context and sequence parallelism."""
    attention = spec.submodules.self_attention.submodules
    if config.multi_latent_attention:
        spec.submodules.self_attention = latent_attention_spec()
    else:
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    if is_moe and config.add_bias_linear:
        _submodules_of(_submodules_of(spec.submodules.mlp).experts).linear_fc2 = ExpertOutput
    return spec


def _submodules_of(builder: Any) -> Any:
    """megatron-core 0.16.1 describes a module by a ModuleSpec, 0.19.2 some of them by a partial call of the class."""
    return builder.keywords["submodules"] if isinstance(builder, functools.partial) else builder.submodules


class ExpertOutput(RowParallelLinear):
    """An expert's second layer with a bias, which Megatron's MLP adds to the output in place (`transformer/mlp.py`).

    Autograd refuses that on what a reduction over a single rank hands through; a copy it allows.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


def block_spec(config: TransformerConfig, on_gpu: bool, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one model chunk of this pipeline stage and the final norm."""
    if on_gpu and HAVE_TRANSFORMER_ENGINE:
        from megatron.core.extensions.transformer_engine import TENorm as norm
    else:
        norm = RMSNorm
    specs = {is_moe: layer_spec(config, on_gpu, is_moe) for is_moe in (False, True)[: 1 + bool(config.num_moe_experts)]}
    frequency = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    layers = [specs[bool(frequency[layer])] for layer in _layers_to_build(config, vp_stage)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _layers_to_build(config: TransformerConfig, vp_stage: int | None) -> Sequence[int]:
    """Of this chunk, from 0 on over the whole model."""
    if config.pipeline_model_parallel_layout is not None:
        return config.pipeline_model_parallel_layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    offset = get_transformer_layer_offset(config, vp_stage)
    return range(offset, offset + get_num_layers_to_build(config, vp_stage))


class PolicyModel(GPTModel):
    """GPTModel whose last stage answers log-probs of labels, fp32 [T], in place of logits; in passes with a gradient
    and `with_entropy` [2, T], log-probs and entropies.

    Call it with input_ids, position_ids, labels and loss_mask [1, T], and packed_seq_params.
    """

    def __init__(self, *args, true_vocab_size: int, temperature: float, with_entropy: bool, **kwargs):
        super().__init__(*args, **kwargs)
        if self.post_process:
            self.output_layer = LogProbHead.adopt(self.output_layer, true_vocab_size, temperature, with_entropy)

    def _postprocess(self, hidden_states: Tensor, labels: Tensor, loss_mask: Tensor, **kwargs) -> Tensor:
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_states, labels[0], loss_mask[0], weight, self.pg_collection.tp)


def build_model(hf: dict[str, Any], config: Config, mesh: Mesh) -> list[PolicyModel]:
    """This rank's part of the model, with uninitialised weights (`weights.load` fills all of them).

    One model, or with virtual pipeline stages as many chunks, in the order in which a token meets them.
    """
    megatron, virtual = transformer_config(hf, config, mesh), config.parallel.virtual_pipeline
    if virtual == 1:
        return [_build_chunk(hf, config, megatron, mesh, None)]
    return [_build_chunk(hf, config, megatron, mesh, stage) for stage in range(virtual)]


def _build_chunk(
    hf: dict[str, Any], config: Config, megatron: TransformerConfig, mesh: Mesh, vp_stage: int | None
) -> PolicyModel:
    shape, last = ModelShape.from_hf(hf), config.parallel.virtual_pipeline - 1
    rotary = family_rotary(hf, shape)
    model = PolicyModel(
        megatron,
        block_spec(megatron, mesh.device.type == "cuda", vp_stage),
        vocab_size=shape.padded_vocab(config.parallel.tensor),
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=mesh.is_first_stage and vp_stage in (None, 0),
        post_process=mesh.is_last_stage and vp_stage in (None, last),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_percent=rotary.fraction,
        parallel_output=True,
        vp_stage=vp_stage,
        true_vocab_size=shape.vocab,
        temperature=config.rollout.temperature,
        with_entropy=config.regularizer.entropy != 0,
    )
    if megatron.add_bias_linear:
        _leave_communication_to_the_dispatcher(model)
    if not megatron.multi_latent_attention:  # whose layers have their own
        model.rotary_pos_emb.inv_freq = rotary.inv_freq.to(mesh.device)
    return model.to(mesh.device)


def _leave_communication_to_the_dispatcher(model: PolicyModel) -> None:
    """Of experts whose tensor-parallel group has one rank: with tensor > 1 and expert = 1 Megatron's local linear
    layers still pass through sequence parallelism's (empty) reduce-scatter, to whose output no bias can be added in
    place."""
    for name, module in model.named_modules():
        if ".experts." in name and hasattr(module, "explicit_expert_comm"):
            module.explicit_expert_comm = True
