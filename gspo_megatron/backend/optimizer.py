"""Megatron's DDP, distributed Adam and learning-rate schedule, from our settings."""

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from torch import nn

from gspo_megatron.config import Config, ParallelConfig
from gspo_megatron.weights.hf_files import torch_dtype


def wrap_for_training(chunks: Sequence[nn.Module], config: Config) -> list[DistributedDataParallel]:
    """bf16 wrapper where it is due, then DDP with the distributed optimizer's buffers and fp32 gradient sums."""
    megatron = chunks[0].config
    settings = dict(use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True)
    ddp_config = DistributedDataParallelConfig(**{**settings, **config.megatron.ddp})
    wrapped = []
    for chunk in chunks:
        _mark_parameters(chunk, config.parallel)
        if config.train.dtype == "bf16":
            chunk = _half_precision(chunk)
        wrapped.append(DistributedDataParallel(megatron, ddp_config, chunk))
    megatron.finalize_model_grads_func = finalize_model_grads
    return wrapped


def _half_precision(chunk: nn.Module) -> nn.Module:
    """Megatron's wrapper, which casts all to bf16, with the fp32 buffers (a router's expert_bias) as they were: rounded
    to bf16 they would choose other experts. Routers keep them fp32 from there on (`_maintain_float32_expert_bias`)."""
    held = {name: buffer.clone() for name, buffer in chunk.named_buffers() if buffer.dtype == torch.float32}
    wrapped = Float16Module(chunk.config, chunk)
    for name, buffer in chunk.named_buffers():
        if name in held:
            buffer.data = held[name]
    return wrapped


def _mark_parameters(model: nn.Module, parallel: ParallelConfig) -> None:
    """Say over which ranks gradients are summed and counted in the norm, where Megatron does not.

    Experts are reduced over the expert-data group wherever that is not the dense one. megatron-core 0.16.1 does so with
    expert parallelism only (`tensor_parallel/layers.py`, attribute `allreduce`). With tensor > 1, expert 1 and
    expert_tensor 1 every tensor rank feeds a whole expert its part of the tokens, and without this mark the ranks'
    gradients are never added up: experts drift apart without an error. 0.19 marks them itself.
    """
    own_group = parallel.expert > 1 or parallel.expert_tensor != parallel.tensor
    for name, param in model.named_parameters():
        if ".experts." in name:
            if own_group:
                param.allreduce = False
            # Both versions take the bias of linear_fc2 for one that all tensor ranks hold alike: its gradients would be
            # added up over different experts, and all but rank 0's left out of the norm.
            param.sequence_parallel, param.tensor_model_parallel = False, True
        elif name.endswith(".softmax_offset"):  # sinks, one a head
            param.tensor_model_parallel = True


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], config: Config
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam whose fp32 state is cut over the data-parallel ranks, and its schedule counted in optimizer updates."""
    ours = config.optimizer
    dtype = torch_dtype(config.train.dtype)
    settings = dict(
        optimizer="adam",
        lr=ours.lr,
        min_lr=min(ours.min_lr, ours.lr),
        weight_decay=ours.weight_decay,
        adam_beta1=ours.beta1,
        adam_beta2=ours.beta2,
        adam_eps=ours.eps,
        clip_grad=ours.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**settings, **config.megatron.optimizer}), list(chunks))
    num_updates = config.train.steps * config.train.updates_per_rollout
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if ours.warmup_steps else ours.lr,
        max_lr=ours.lr,
        min_lr=min(ours.min_lr, ours.lr),
        lr_warmup_steps=ours.warmup_steps,
        lr_decay_steps=max(num_updates, ours.warmup_steps + 1),
        lr_decay_style=ours.schedule,
        start_wd=ours.weight_decay,
        end_wd=ours.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
