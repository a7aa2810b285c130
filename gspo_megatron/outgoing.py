"""The policy's weights on their way out: what all ranks do for a sync, by `weights.transport`."""

from collections.abc import Callable
from pathlib import Path

from gspo_megatron.backend.policy import Policy
from gspo_megatron.config import Config
from gspo_megatron.rollout.transports.disk import FILE_TRANSPORTS, write_version
from gspo_megatron.rollout.weight_sync import Tensors


def weights_dir(config: Config) -> Path:
    """Where transports by files write weight versions."""
    return Path(config.weights.dir or Path(config.run.dir) / "weights").absolute()


def outgoing_weights(policy: Policy, config: Config, version: int) -> Callable[[], Tensors]:
    """Collective. What rank 0 hands to `WeightSync`, as often as it likes: for transports by files the directory of a
    checkpoint, which all ranks write here. Raises HFWriteError on all ranks where one can't write."""
    if config.weights.transport not in FILE_TRANSPORTS:
        return policy.hf_tensors
    tensors = policy.hf_tensors("all")
    written = write_version(
        tensors, weights_dir(config), version, config.model.hf, policy.hf_shapes, writers=policy.mesh
    )
    return lambda: written


def bring_to_rank_zero(policy: Policy, config: Config) -> None:
    """What the other ranks do each time rank 0 sends `outgoing_weights`."""
    if config.weights.transport not in FILE_TRANSPORTS:
        for _ in policy.hf_tensors():
            pass
