"""What trainer ranks run for test_layouts.py: one update with every loss, of weights that stay where they are."""

import numpy as np
import torch

from gspo_megatron.algorithm.advantages import group_advantages
from gspo_megatron.algorithm.losses import LOSSES, reduce_metrics
from gspo_megatron.algorithm.objective import make_objective
from gspo_megatron.algorithm_config import GROUP_LOSSES, CorrectionConfig, RegularizerConfig
from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.policy import Policy
from gspo_megatron.batches import MicroBatch, RolloutArrays, mini_batch_loss, plan_rank
from gspo_megatron.config import (
    AdvantageConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from gspo_megatron.types import Rollout, Sample

CORRECTION = CorrectionConfig(token="truncate", token_cap=1.01, sequence="mask", sequence_low=0.9, off_policy="mask")


def make_rollout() -> RolloutArrays:
    """4 groups of 4 with responses of 0 to 20 tokens, some of them cut by the length limit."""
    random, samples = np.random.default_rng(7), []
    for group in range(4):
        prompt = tuple(random.integers(3, 500, 3 + group).tolist())
        for member in range(4):
            length = 0 if (group, member) == (1, 2) else int(random.integers(1, 21))
            ids = tuple(random.integers(3, 500, length).tolist())
            reason = "length" if member == 3 else "stop"
            samples.append(Sample(group, prompt, ids, (-6.2,) * length, float(random.normal()), reason, 0))
    return RolloutArrays.from_rollout(Rollout(tuple(samples)))


def with_policies_apart(micro_batch: MicroBatch, log_probs: torch.Tensor) -> torch.Tensor:
    """pi_old of a micro-batch, and mu written into it: up to 0.05 nats from pi_theta and 0.03 from each other, by a
    rule that only looks at the token and its position."""
    packed = micro_batch.packed
    wave = 7.0 * packed.labels + 3.0 * packed.position_ids
    old = torch.where(packed.loss_mask, log_probs.cpu() + 0.05 * wave.sin(), 0.0)
    packed.values["rollout_log_probs"] = torch.where(packed.loss_mask, old + 0.03 * wave.cos(), 0.0)
    return old


def make_config(model: str, parallel: dict, **sections) -> Config:
    return Config(
        model=ModelConfig(hf=model),
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(dtype="fp32", tokens_per_micro_batch=10_000),
        rollout=RolloutConfig(replay="unused"),
        **sections,
    )


def with_reference(model: str, parallel: dict, estimator: str) -> list[dict[str, float]]:
    """Three large updates of grpo with a divergence: its metric, the gradient norm, and whether the weights are
    bit for bit what they were after the reference had their place."""
    regularizer = RegularizerConfig(kl=1.0, kl_estimator=estimator)
    config = make_config(model, parallel, optimizer=OptimizerConfig(lr=1e-2, eps=1e-2), regularizer=regularizer)
    mesh = Mesh.create(config.parallel, seed=1, timeout_s=60)
    try:
        policy = Policy(config, mesh)
        return [_regularized_update(config, mesh, policy) for _ in range(3)]
    finally:
        mesh.close()


def _regularized_update(config: Config, mesh: Mesh, policy: Policy) -> dict[str, float]:
    arrays = make_rollout()
    (mini_batch,) = plan_rank(
        arrays, torch.linspace(-1, 1, 16), num_mini_batches=1, token_budget=10_000, data_rank=mesh.data_rank,
        data_size=mesh.data_size, parallel=config.parallel,
    )  # fmt: skip
    packed = [micro_batch.packed for micro_batch in mini_batch]
    old = policy.log_likelihoods(packed)
    before = {name: param.detach().clone() for name, param in policy.params.items()}
    for micro_batch, values in zip(mini_batch, policy.reference_log_likelihoods(packed), strict=True):
        micro_batch.packed.values["reference_log_probs"] = values
    unchanged = all(torch.equal(param, before[name]) for name, param in policy.params.items())
    objective = make_objective(LOSSES["grpo"][1], config)
    loss = mini_batch_loss(objective, LOSSES["grpo"][0](), mini_batch, old, mesh.describe(), mesh.context)
    result = policy.update(packed, loss)
    return {
        "unchanged": unchanged,
        "kl": float(result.metrics["regularizer/kl"] / result.metrics["regularizer/kl_count"]),
        "grad_norm": result.grad_norm,
    }


def all_losses(model: str, parallel: dict, least_micro_batches: int) -> dict[str, dict[str, float]]:
    """Loss name -> loss, gradient norm and metrics of one update; `overlong` is gspo without the truncated samples."""
    still = OptimizerConfig(lr=1e-30)  # below what a float32 weight can move by
    config = make_config(model, parallel, optimizer=still, correction=CORRECTION)
    mesh = Mesh.create(config.parallel, seed=1, timeout_s=60)
    try:
        policy = Policy(config, mesh)
        return {
            name: _update(name, config, mesh, policy, least_micro_batches)
            for name in [*LOSSES, "overlong", "all_overlong"]
        }
    finally:
        mesh.close()


def _update(name: str, config: Config, mesh: Mesh, policy: Policy, least_micro_batches: int) -> dict[str, float]:
    arrays = make_rollout()
    loss_name = "gspo" if name.endswith("overlong") else name
    config_type, loss = LOSSES[loss_name]
    advantages = group_advantages(arrays.rewards, arrays.groups, AdvantageConfig()).advantages
    (mini_batch,) = plan_rank(
        arrays, advantages, num_mini_batches=1, token_budget=10_000, data_rank=mesh.data_rank, data_size=mesh.data_size,
        parallel=config.parallel, least_micro_batches=least_micro_batches, whole_groups=name in GROUP_LOSSES,
        drop={"overlong": arrays.truncated, "all_overlong": np.ones(16, dtype=bool)}.get(name),
    )  # fmt: skip
    packed = [micro_batch.packed for micro_batch in mini_batch]
    log_probs = policy.log_likelihoods(packed)
    old = [with_policies_apart(micro_batch, values) for micro_batch, values in zip(mini_batch, log_probs, strict=True)]
    objective = make_objective(loss, config)
    settings = config_type(clip_low=0.01, clip_high=0.01) if loss_name in ("gspo", "gspo_token") else config_type()
    result = policy.update(packed, mini_batch_loss(objective, settings, mini_batch, old, mesh.describe(), mesh.context))
    metrics = {key: value for key, value in result.metrics.items() if not key.startswith(("gap", "loss"))}
    return {
        "loss_sum": float(result.metrics["loss_sum"]),
        "loss_count": float(result.metrics["loss_count"]),
        "grad_norm": result.grad_norm,
        **reduce_metrics(metrics),
    }
