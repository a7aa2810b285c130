"""A policy on disk: weights, optimizer, schedule and generators of all ranks, in Megatron's `torch_dist` format.

Weights and optimizer state are stored by global tensor (`fully_reshardable` in megatron-core's
`optimizer/distrib_optimizer.py`: fp32 parameter, first and second moment, each shaped as the parameter), so that any
layout can read them. What is no tensor of the model does not go through Megatron's `load_state_dict`, whose shape
depends on the layout and which treats torch's Adam wrongly (see `_restore_steps`).
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from gspo_megatron.backend.pending_save import CheckpointError, PendingSave, failures_named

__all__ = ["CheckpointError", "PendingSave", "load_policy", "save_policy"]

LAYOUT_FREE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "non_homogeneous_layers": True,  # one key a layer, so that a reader needs no more than one in memory
    "singleton_local_shards": False,
}
"""How Megatron is to describe shards: by global names and places, whatever the layout."""


def save_policy(
    directory: Path, chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
) -> PendingSave:
    """Copy everything to host memory, to be written into the existing, empty `directory`. Collective.

    Memory: on every rank the fp32 parameters and Adam's moments of what it holds of the model, whole (12 bytes a
    parameter, of all its data-parallel ranks' shares), and its share of the weights; twice that at the peak, for
    Megatron's writer copies what is cut out of a buffer. Raises CheckpointError.
    """
    shards = _shards(chunks, optimizer, is_loading=False)
    shards["generators"] = _generator_object(_generators())
    shards["progress"] = {"adam_steps": _adam_steps(optimizer), "scheduler_updates": scheduler.num_steps}
    live = [tensor for _, chunk in _by_name(chunks) for tensor in (*chunk.parameters(), *chunk.buffers())]
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return PendingSave(shards, directory, replicas, live)


def load_policy(
    directory: Path,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    same_layout: bool,
) -> None:
    """Fill model, optimizer and schedule from what `save_policy` wrote, with `same_layout` the generators too.

    Collective. The optimizer's settings (learning rate, betas, ...) stay those of the running configuration. Raises
    CheckpointError for a checkpoint of another model, or one that can't be read.
    """
    settings = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.param_groups]
    for part in _parts(optimizer):
        if not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()
    shards = _shards(chunks, optimizer, is_loading=True)
    if same_layout:
        shards["generators"] = _generator_object(None)
    with failures_named():
        loaded = dist_checkpointing.load(shards, str(directory))
    for name, chunk in _by_name(chunks):
        chunk.load_state_dict(loaded[name])
    for index, part in enumerate(_parts(optimizer)):
        _load_part(part, loaded["optimizer"][index])
    progress = loaded["progress"]
    _restore_steps(optimizer, progress["adam_steps"])
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
    scheduler.num_steps = progress["scheduler_updates"]
    scheduler.step(0)
    if same_layout:
        _set_generators(loaded["generators"])


def _shards(chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, is_loading: bool) -> dict[str, Any]:
    """Name -> what this rank holds of each global tensor."""
    metadata = {**LAYOUT_FREE, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    model = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _by_name(chunks)}
    state = {}
    for index, part in enumerate(_parts(optimizer)):
        with _padding_kept(part):
            state[index] = part.sharded_param_state_fully_reshardable(model, is_loading, metadata)
    return {**model, "optimizer": state}


def _by_name(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The models inside DDP and the bf16 wrapper."""
    for index, chunk in enumerate(chunks):
        while hasattr(chunk, "module"):
            chunk = chunk.module
        yield f"model{index}", chunk


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The distributed optimizers: one of the dense parameters, and one of the experts where these have replicas of
    their own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


@contextlib.contextmanager
def _padding_kept(part: MegatronOptimizer) -> Iterator[None]:
    """Inside, whole buffers are gathered with the padding between their buckets.

    megatron-core drops it (`get_parameter_state_dp_zero`) and then cuts parameters out at places that count it
    (`sharded_param_state_fully_reshardable`): with a second bucket, which tied embeddings on two pipeline stages have,
    and overlap_grad_reduce makes, every parameter after the first bucket is stored as a piece of its neighbours.
    """
    gather = part.get_parameter_state_dp_zero

    def gather_with_padding(*args, **kwargs):
        state = gather(*args, **kwargs)
        for index, buffer in enumerate(part.buffers if state is not None else ()):
            for tensors in state[index].values():
                for key in tensors.keys() - {"numel_unpadded"}:
                    tensors[key] = _with_padding(tensors[key], buffer.buckets)
        return state

    part.get_parameter_state_dp_zero = gather_with_padding
    try:
        yield
    finally:
        del part.get_parameter_state_dp_zero


def _with_padding(values: torch.Tensor, buckets: Sequence) -> torch.Tensor:
    if len(buckets) == 1:
        return values
    pieces = values.split([bucket.numel_unpadded for bucket in buckets])
    padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buckets]
    return torch.cat([F.pad(piece, (0, number)) for piece, number in zip(pieces, padding, strict=True)])


def _load_part(part: MegatronOptimizer, state: dict[int, dict[str, torch.Tensor]]) -> None:
    """megatron-core copies a loaded tensor into each entry of Adam's state, among them torch's `step`, which it does
    not store (KeyError: 'step'). Hand it the step that is there; `_restore_steps` sets it."""
    set_states = part._set_main_param_and_optimizer_states

    def with_step(param, tensors):
        group, order = part.model_param_group_index_map[param]
        own = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
        set_states(param, {**{key: own[key] for key in ("step",) if key in own}, **tensors})

    part._set_main_param_and_optimizer_states = with_step
    try:
        part.load_parameter_state_from_fully_reshardable(state)
    finally:
        del part._set_main_param_and_optimizer_states


def _adam_steps(optimizer: MegatronOptimizer) -> int:
    """Updates that Adam has made, the same for all parameters and ranks. Collective."""
    holders = [holder for part in _parts(optimizer) for holder in part.optimizer.state.values()]
    holders += [group for part in _parts(optimizer) for group in part.optimizer.param_groups]
    steps = {int(holder["step"]) for holder in holders if holder.get("step")}
    assert len(steps) <= 1, f"parameters were updated {sorted(steps)} times"
    most = torch.tensor(max(steps, default=0), device=torch.cuda.current_device())
    dist.all_reduce(most, dist.ReduceOp.MAX)  # a rank whose share holds no parameter knows no step
    return int(most)


def _restore_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    """torch's Adam counts in its state, Apex's and Transformer Engine's in its groups.

    Every parameter gets a tensor of its own: megatron-core's load_state_dict has all of them share one, which torch
    then counts up once a parameter.
    """
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.full_like(torch.as_tensor(state["step"]), float(steps))
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = steps


def _generator_object(states: dict[str, Any] | None) -> ShardedObject:
    rank, world = dist.get_rank(), dist.get_world_size()
    return ShardedObject("generators", states, (world,), (rank,), replica_id=0)


def _generators() -> dict[str, Any]:
    """All random generators of this process, in tensors and numbers only: loaded without unpickling code."""
    name, keys, *rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def _set_generators(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["megatron"])
