"""What trainer ranks run in these tests: real policies on tiny checkpoints, on a given layout."""

import random

import torch

from gspo_megatron.algorithm.losses import LossOutput
from gspo_megatron.algorithm.packing import pack
from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.policy import Policy
from gspo_megatron.config import (
    Config, ModelConfig, OptimizerConfig, ParallelConfig, RolloutConfig, TrainConfig,
)  # fmt: skip

VOCABULARY = 513
"""Odd, so that tensor ranks need padding."""


def sequences(vocabulary: int = VOCABULARY) -> list[list[tuple[list[int], list[int]]]]:
    """(prompt, response) pairs by micro-batch; one response is empty, and one micro-batch has no response at all."""
    generator = random.Random(1)

    def ids(length: int) -> list[int]:
        return [generator.randrange(vocabulary) for _ in range(length)]

    lengths = [[(3, 9), (7, 1), (5, 0)], [(1, 14)], [(4, 0)], [(6, 6), (2, 11)]]
    return [[(ids(prompt), ids(response)) for prompt, response in batch] for batch in lengths]


def make_config(
    directory: str, parallel: ParallelConfig, dtype="fp32", temperature=1.0, steps=10, **optimizer
) -> Config:
    """A learning rate of 0 and no clipping, unless `optimizer` says otherwise."""
    return Config(
        model=ModelConfig(hf=directory),
        parallel=parallel,
        train=TrainConfig(dtype=dtype, steps=steps, updates_per_rollout=1),
        optimizer=OptimizerConfig(**{"lr": 0.0, "clip_grad": 0.0, **optimizer}),
        rollout=RolloutConfig(temperature=temperature),
    )


def open_mesh(layout: dict) -> Mesh:
    return Mesh.create(ParallelConfig(**layout), seed=1, timeout_s=60)


def packed(mesh: Mesh, vocabulary: int = VOCABULARY) -> list:
    return [pack(batch, alignment=mesh.parallel.tensor) for batch in sequences(vocabulary)]


def log_prob_sum(micro_batches):
    """A loss that is the sum of all log-probs, counted by sequences."""

    def loss(index: int, log_probs: torch.Tensor) -> LossOutput:
        return LossOutput(log_probs.sum(), torch.tensor(float(micro_batches[index].num_sequences)), {})

    return loss


def log_probs_and_gradients(layout: dict, cases: list[tuple[str, float]]) -> list[dict]:
    """For every (checkpoint, temperature), on every rank: log-probs by response, their sums by sequence, and of a mean
    over sequences of summed log-probs the gradient's norm, and (rank 0) the gradient by HF names; numpy."""
    mesh, results = open_mesh(layout), []
    for directory, temperature in cases:
        policy = Policy(make_config(directory, mesh.parallel, temperature=temperature), mesh)
        micro_batches = packed(mesh)
        log_probs = policy.log_likelihoods(micro_batches)
        sums = policy.sequence_log_likelihoods(micro_batches)
        outside = sum(float(values[~batch.loss_mask].abs().sum()) for batch, values in zip(micro_batches, log_probs))
        first, second = (policy.update(micro_batches, log_prob_sum(micro_batches)) for _ in range(2))
        with torch.no_grad():
            for param in policy.params.values():
                param.copy_(param.main_grad)
        results.append(
            {
                "responses": [
                    response.numpy()
                    for batch, values in zip(micro_batches, log_probs, strict=True)
                    for response in batch.split(values)
                ],
                "sums": torch.cat(sums).numpy(),
                "outside": outside,
                "grad_norms": [first.grad_norm, second.grad_norm],
                "loss": float(first.metrics["loss_sum"]),
                "count": float(first.metrics["loss_count"]),
                "gradients": {name: tensor.clone().numpy() for name, tensor in policy.hf_tensors()},
            }
        )
    mesh.close()
    return results


def log_probs_by_dtype(directory: str) -> dict[str, list]:
    """dtype -> log-probs, gradient norm, type of the parameters, and the change of the log-probs' sum by 12 updates,
    each smaller than what bf16 tells apart from most of the weights."""
    mesh = open_mesh({})
    found = {}
    for dtype in ("fp32", "bf16"):
        policy = Policy(make_config(directory, mesh.parallel, dtype, lr=1e-4), mesh)
        micro_batches = packed(mesh)
        values = policy.log_likelihoods(micro_batches)
        results = [policy.update(micro_batches, log_prob_sum(micro_batches)) for _ in range(12)]
        moved = torch.cat(policy.log_likelihoods(micro_batches)).sum() - torch.cat(values).sum()
        kind = str(next(iter(policy.params.values())).dtype)
        found[dtype] = [torch.cat(values).numpy(), results[0].grad_norm, kind, float(moved)]
    mesh.close()
    return found


def update_with_metrics(layout: dict, directory: str) -> tuple[dict, float, float]:
    """Metrics of an update in which micro-batch i of data rank d reports numbers made of d and i."""
    mesh = open_mesh(layout)
    policy = Policy(make_config(directory, mesh.parallel, lr=1e-3), mesh)
    micro_batches = packed(mesh, 512)

    def loss(index: int, log_probs: torch.Tensor) -> LossOutput:
        value = torch.tensor(10.0 * mesh.data_rank + index)
        metrics = {"tokens": value, "low_min": value - 3, "high_max": value * 2, "negative_max": -value - 1}
        if index == 3:
            metrics["last_only"] = value
        return LossOutput(log_probs.sum() * 0 + value, torch.tensor(2.0), metrics)

    result = policy.update(micro_batches, loss)
    mesh.close()
    return {name: float(value) for name, value in result.metrics.items()}, result.grad_norm, result.learning_rate


def learning_rates(directory: str, schedules: list[dict], num_updates: int) -> list[list[float]]:
    mesh, results = open_mesh({}), []
    for schedule in schedules:
        policy = Policy(make_config(directory, mesh.parallel, steps=num_updates, **schedule), mesh)
        micro_batches = packed(mesh, 512)[1:2]
        updates = [policy.update(micro_batches, log_prob_sum(micro_batches)) for _ in range(num_updates)]
        results.append([update.learning_rate for update in updates])
    mesh.close()
    return results
