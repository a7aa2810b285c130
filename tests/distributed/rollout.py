"""One saved rollout of two steps with everything that could upset a split, and its settings."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gspo_megatron.algorithm.advantages import group_advantages
from gspo_megatron.batches import RolloutArrays
from gspo_megatron.config import (
    AdvantageConfig,
    Config,
    GSPOConfig,
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from gspo_megatron.rollout.records import load_rollout, save_rollout
from gspo_megatron.types import Rollout, Sample
from tests.distributed.cases import Case

NUM_STEPS, NUM_MINI_BATCHES, NUM_GROUPS, GROUP_SIZE = 2, 4, 8, 4
VOCAB = 512
EMPTY, SINGLE, MASKED = 2, 5, 8
"""Samples with an empty response, with one token, and with a span in the middle that is not trained on."""
EQUAL_GROUP = 3
"""A group of equal rewards: its advantages are 0."""
SPAN = slice(3, 9)


def make_rollout(step: int) -> Rollout:
    """8 groups of 4; prompts of 2 to 10 tokens, responses of 0 to 30."""
    random = np.random.default_rng(200 + step)
    samples = []
    for group in range(NUM_GROUPS):
        prompt = random.integers(3, VOCAB, random.integers(2, 11)).tolist()
        for _ in range(GROUP_SIZE):
            length = {EMPTY: 0, SINGLE: 1, MASKED: 14}.get(len(samples), int(random.integers(2, 31)))
            samples.append(
                Sample(
                    group=group,
                    prompt_ids=tuple(prompt),
                    response_ids=tuple(random.integers(3, VOCAB, length).tolist()),
                    rollout_log_probs=tuple(random.normal(-6.2, 0.3, length).tolist()),
                    reward=0.5 if group == EQUAL_GROUP else float(random.normal()),
                    finish_reason="stop",
                    weight_version=step,
                )
            )
    return Rollout(tuple(samples))


def save_rollouts(directory: Path) -> None:
    for step in range(NUM_STEPS):
        save_rollout(make_rollout(step), directory, step)


def load_arrays(directory: Path, step: int) -> tuple[RolloutArrays, Tensor]:
    """The samples of a saved step, and their advantages [M]."""
    arrays = RolloutArrays.from_rollout(load_rollout(directory, step))
    trained = arrays.trained.copy()
    first = arrays.response_bounds[MASKED]
    trained[first + SPAN.start : first + SPAN.stop] = False
    advantages = group_advantages(
        torch.as_tensor(arrays.rewards), torch.as_tensor(arrays.groups), AdvantageConfig()
    ).advantages
    return dataclasses.replace(arrays, trained=trained), advantages


LOSS = GSPOConfig()
OPTIMIZER = OptimizerConfig(lr=1e-4, beta1=0.9, beta2=0.98, eps=1e-2, clip_grad=1.0)
"""Adam divides by sqrt(v) + eps. With the usual tiny eps its first step is lr * sign(gradient), whatever the size of
the gradient: an element whose gradient is rounding noise would jump by lr in a random direction, and parameters could
not be compared. An eps above the gradients makes the step smooth in them, with the same code and state."""


def make_config(model: Path, case: Case, dtype: str = "fp32") -> Config:
    return Config(
        model=ModelConfig(hf=str(model)),
        parallel=ParallelConfig(**case.parallel),
        loss=LOSS,
        optimizer=OPTIMIZER,
        train=TrainConfig(
            steps=NUM_STEPS, updates_per_rollout=NUM_MINI_BATCHES, tokens_per_micro_batch=100_000, dtype=dtype
        ),
        rollout=RolloutConfig(temperature=0.8, replay="unused"),
        megatron=MegatronConfig(transformer=case.transformer),
    )
