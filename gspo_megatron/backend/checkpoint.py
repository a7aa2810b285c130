"""A policy on disk: weights, optimizer, schedule and generators of all ranks, in Megatron's `torch_dist` format.

Weights and optimizer state are stored by global tensor (`fully_reshardable` in megatron-core's
`optimizer/distrib_optimizer.py`: fp32 parameter, first and second moment, each shaped as the parameter), so that any
layout can read them. What is no tensor of the model does not go through Megatron's `load_state_dict`, whose shape
depends on the layout and which treats torch's Adam wrongly (see `_restore_steps`).
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.optimizer_state import StateSpace
from gspo_megatron.backend.pending_save import CheckpointError, PendingSave, failures_named
from gspo_megatron.backend.safe_loading import no_code_from
from gspo_megatron.backend.stored_state import StoredElements, StoredTensor
from gspo_megatron.weights.torch_dist_files import TorchDistReader

__all__ = ["CheckpointError", "PendingSave", "load_policy", "save_policy"]

LAYOUT_FREE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "non_homogeneous_layers": True,  # one key a layer, so that a reader needs no more than one in memory
    "singleton_local_shards": False,
}
"""How Megatron is to describe shards: by global names and places, whatever the layout."""


def save_policy(
    directory: Path,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    mesh: Mesh,
) -> PendingSave:
    """Copy everything to host memory, to be written into the existing, empty `directory`. Collective.

    Memory: what this rank writes, once, which is the least there is: 12 bytes for each parameter of which it writes the
    state (fp32 parameter and Adam's moments; those that data-parallel ranks hold together are shared out among them),
    and its share of the weights. Beside it two buffers of EXCHANGE_BYTES at most. Raises CheckpointError.
    """
    space = StateSpace(_parts(optimizer))
    shards = _shards(chunks, space)
    shards["generators"] = _generator_object(_generators())
    shards["progress"] = {"adam_steps": _adam_steps(optimizer), "scheduler_updates": scheduler.num_steps}
    live = [tensor for _, chunk in _by_name(chunks) for tensor in (*chunk.parameters(), *chunk.buffers())]

    def fill(planned: Sequence[ShardedTensor]) -> None:
        with mesh.waiting_for("other ranks sending Adam's state"):
            space.fill(planned, mesh.device)

    return PendingSave(shards, directory, _sharing_ranks(optimizer, mesh), live, fill)


def load_policy(
    directory: Path,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    mesh: Mesh,
    same_layout: bool,
) -> None:
    """Fill model, optimizer and schedule from what `save_policy` wrote, with `same_layout` the generators too.

    Collective. Memory: the weights of this rank once more at most; Adam's state is read to where it belongs. The
    optimizer's settings (learning rate, betas, ...) stay those of the running configuration. Raises CheckpointError for
    a checkpoint of another model, or one that can't be read.
    """
    settings = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.param_groups]
    for part in _parts(optimizer):
        if not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()
    shards = _shards(chunks, StateSpace(_parts(optimizer)))
    described = shards.pop("optimizer")
    if same_layout:
        shards["generators"] = _generator_object(None)
    with no_code_from(directory) as reader, failures_named():
        loaded = dist_checkpointing.load(shards, str(directory))
    for name, chunk in _by_name(chunks):
        chunk.load_state_dict(loaded[name])
    _load_state(reader, optimizer, described, mesh)
    progress = loaded["progress"]
    _restore_steps(optimizer, progress["adam_steps"])
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
    scheduler.num_steps = progress["scheduler_updates"]
    scheduler.step(0)
    if same_layout:
        _set_generators(loaded["generators"])


def _shards(chunks: Sequence[nn.Module], space: StateSpace) -> dict[str, Any]:
    """Name -> what this rank holds of each global tensor; Adam's state in the places that `space` knows."""
    metadata = {**LAYOUT_FREE, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    model = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _by_name(chunks)}
    return {**model, "optimizer": {part: space.describe(part, model, metadata) for part in range(space.num_parts)}}


def _sharing_ranks(optimizer: MegatronOptimizer, mesh: Mesh) -> dist.ProcessGroup:
    """Who shares the writing of what all hold: the copies of the dense parameters, and where tensor ranks hold copies
    of experts these too. Megatron finds who writes what in a time that grows with the group."""
    dense = set(dist.get_process_group_ranks(mesh.data_with_context))
    if all(dense.issuperset(dist.get_process_group_ranks(part.data_parallel_group)) for part in _parts(optimizer)):
        return mesh.data_with_context
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


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


def _load_state(reader: TorchDistReader, optimizer: MegatronOptimizer, described: dict[int, Any], mesh: Mesh) -> None:
    """Raises CheckpointError on all ranks where one can't read."""
    fault = None
    try:
        for index, part in enumerate(_parts(optimizer)):
            stored = {
                number: {key: StoredTensor(reader, tensor) for key, tensor in tensors.items()}
                for number, tensors in described[index].items()
            }
            _load_part(part, stored)
    except (ValueError, OSError) as error:
        fault = f"rank {mesh.rank}: {error}"
    faults = [one for one in mesh.gather_objects(fault, "other ranks reading Adam's state") if one]
    if faults:
        raise CheckpointError("; ".join(faults))


def _load_part(part: MegatronOptimizer, state: dict[int, dict[str, StoredTensor]]) -> None:
    """Have megatron-core say which elements of which tensor belong where, and read them to there. Its own way of
    setting them wants them in memory, and torch's `step` with them, which it does not store (KeyError: 'step')."""
    set_states = part._set_main_param_and_optimizer_states
    converts = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8

    def read(param: nn.Parameter, elements: dict[str, StoredElements]) -> None:
        if converts:  # the state is of other types, or scaled
            set_states(param, {key: stored.read() for key, stored in elements.items()})
            return
        own = part._get_main_param_and_optimizer_states(param)
        for key, stored in elements.items():
            stored.read_into(own[key].detach())

    part._set_main_param_and_optimizer_states = read
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
