"""Adam's state saved and loaded as megatron-core itself does, with whole buffers on every rank: a reference."""

import contextlib
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state

from gspo_megatron.backend.checkpoint import LAYOUT_FREE, _by_name, _parts
from gspo_megatron.backend.pending_save import PendingSave
from gspo_megatron.backend.policy import Policy


def shards_of(policy: Policy, is_loading: bool) -> dict:
    metadata = {**LAYOUT_FREE, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    model = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _by_name(policy.chunks)}
    state = {}
    for index, part in enumerate(_parts(policy._optimizer)):
        with padding_kept(part):
            state[index] = part.sharded_param_state_fully_reshardable(model, is_loading, metadata)
    return {**model, "optimizer": state}


@contextlib.contextmanager
def padding_kept(part):
    """Megatron drops the padding between buckets when it gathers, and counts it when it cuts parameters out."""
    gather = part.get_parameter_state_dp_zero

    def with_padding(values, buckets):
        pieces = values.split([bucket.numel_unpadded for bucket in buckets])
        padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buckets]
        return torch.cat([F.pad(piece, (0, number)) for piece, number in zip(pieces, padding, strict=True)])

    def gather_with_padding(*args, **kwargs):
        state = gather(*args, **kwargs)
        for index, buffer in enumerate(part.buffers):
            for tensors in state[index].values():
                for key in tensors.keys() - {"numel_unpadded"}:
                    tensors[key] = with_padding(tensors[key], buffer.buckets)
        return state

    part.get_parameter_state_dp_zero = gather_with_padding
    try:
        yield
    finally:
        del part.get_parameter_state_dp_zero


def begin_save(policy: Policy, directory: Path) -> PendingSave:
    live = [tensor for _, chunk in _by_name(policy.chunks) for tensor in (*chunk.parameters(), *chunk.buffers())]
    shards = {**shards_of(policy, is_loading=False), "progress": {"adam_steps": 1, "scheduler_updates": 1}}
    return PendingSave(shards, directory, policy.mesh.data_with_context, live, lambda planned: None)


def load_state(policy: Policy, directory: Path) -> None:
    """Adam's state only."""
    loaded = dist_checkpointing.load(shards_of(policy, is_loading=True), str(directory))
    for index, part in enumerate(_parts(policy._optimizer)):
        for number, tensors in loaded["optimizer"][index].items():
            own = {"step": torch.tensor(1.0)}  # torch's Adam has it in its state, and it is not stored
            loaded["optimizer"][index][number] = {**tensors, **own}
        set_states = part._set_main_param_and_optimizer_states
        part._set_main_param_and_optimizer_states = lambda param, tensors, set_states=set_states: set_states(
            param, {**tensors, "step": torch.tensor(1.0)}
        )
        part.load_parameter_state_from_fully_reshardable(loaded["optimizer"][index])
        del part._set_main_param_and_optimizer_states


def state_of(policy: Policy) -> list[torch.Tensor]:
    """What this rank holds of Adam's state, without the steps."""
    values = []
    for part in _parts(policy._optimizer):
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                state = part.optimizer.state[param]
                values += [param.detach(), *(state[key] for key in ("exp_avg", "exp_avg_sq") if key in state)]
    return values
