"""What trainer ranks run where values are not finite."""

import numpy as np
import torch
from policy_runs import make_config, open_mesh

from gspo_megatron.algorithm.losses import LossOutput, gspo
from gspo_megatron.algorithm.packing import pack
from gspo_megatron.backend.mesh import CollectiveError
from gspo_megatron.backend.policy import Policy
from gspo_megatron.batches import MicroBatch, mini_batch_loss
from gspo_megatron.config import GSPOConfig

POISON = 400
"""The token whose embedding becomes NaN."""


def micro_batch(samples: list[int], poisoned: int) -> MicroBatch:
    """Samples of 3 + 5 tokens, of which sample `poisoned` has the token."""
    generator = np.random.default_rng(0)
    pairs = [(generator.integers(0, 300, 3), generator.integers(0, 300, 5)) for _ in samples]
    if poisoned in samples:
        pairs[samples.index(poisoned)][0][1] = POISON
    packed = pack(pairs, {"rollout_log_probs": [[-1.0] * 5] * len(pairs)})
    return MicroBatch(packed, tuple(samples), torch.ones(len(samples)), torch.zeros(len(samples), dtype=torch.int64))


def infinite_gradient(index: int, log_probs: torch.Tensor) -> LossOutput:
    return LossOutput(log_probs.sum() * 1e36, torch.tensor(4.0), {})


def non_finite_updates(layout: dict, directory: str) -> tuple[str, str]:
    """The messages of this rank: of a gradient that overflows, and of NaN in the weights."""
    mesh = open_mesh(layout)
    policy = Policy(make_config(directory, mesh.parallel), mesh)
    first = 4 * mesh.data_rank
    batches = [micro_batch([first, first + 1], first + 3), micro_batch([first + 2, first + 3], first + 3)]
    packed = [batch.packed for batch in batches]
    messages = []
    try:
        policy.update(packed, infinite_gradient)
    except FloatingPointError as error:
        messages.append(str(error))
    with torch.no_grad():
        embedding = policy.params.get("embedding.word_embeddings.weight")
        if embedding is not None:
            embedding[POISON] = float("nan")
    old = [torch.full((batch.labels.numel(),), -1.0) for batch in packed]
    try:
        policy.update(packed, mini_batch_loss(gspo, GSPOConfig(), batches, old, mesh.describe()))
    except (FloatingPointError, CollectiveError) as error:
        messages.append(f"{type(error).__name__} {error}")
    gradient, nan = messages
    return gradient, nan
