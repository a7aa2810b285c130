"""How the ranks are divided: the sizes that follow from `parallel` and the world size, in ranks."""

import math
from dataclasses import dataclass

from gspo_megatron.config import Config, ParallelConfig


@dataclass(frozen=True)
class Layout:
    world: int
    tensor: int
    pipeline: int
    context: int
    data: int
    """Copies of the dense part of the model."""
    expert: int
    expert_tensor: int
    expert_data: int
    """Copies of every expert."""
    sequences_per_update: int
    """Sequences of one mini-batch, all data-parallel ranks together."""


def world_step(parallel: ParallelConfig) -> int:
    """The smallest world size on which `parallel` fits; all others are its multiples."""
    dense = parallel.tensor * parallel.pipeline * parallel.context
    return math.lcm(dense, parallel.expert * parallel.expert_tensor * parallel.pipeline)


def layout_of(config: Config, world: int) -> Layout:
    """The layout on `world` ranks, which must be a multiple of `world_step`."""
    parallel, rollout = config.parallel, config.rollout
    assert world % world_step(parallel) == 0
    return Layout(
        world=world,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        data=world // (parallel.tensor * parallel.pipeline * parallel.context),
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        expert_data=world // (parallel.expert * parallel.expert_tensor * parallel.pipeline),
        sequences_per_update=rollout.prompts_per_step * rollout.samples_per_prompt // config.train.updates_per_rollout,
    )


def layout_text(config: Config, layout: Layout) -> str:
    """The layout and the batch sizes in words, for people."""
    rollout, train = config.rollout, config.train
    per_rank = layout.sequences_per_update / layout.data
    return "\n".join(
        [
            f"layout of {layout.world} ranks",
            f"  dense part: tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} "
            f"x data {layout.data}"
            + (f", {config.parallel.virtual_pipeline} model chunks a rank" * (config.parallel.virtual_pipeline > 1)),
            f"  experts:    expert {layout.expert} x expert_tensor {layout.expert_tensor} x pipeline {layout.pipeline} "
            f"x copies {layout.expert_data}",
            "batches",
            f"  one step:   {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = "
            f"{rollout.prompts_per_step * rollout.samples_per_prompt} sequences",
            f"  one update: {layout.sequences_per_update} sequences ({train.updates_per_rollout} updates a step), "
            f"{per_rank:g} a data-parallel rank",
            f"  one micro-batch: at most {train.tokens_per_micro_batch} tokens",
        ]
    )
