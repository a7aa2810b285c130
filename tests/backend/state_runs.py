"""What trainer ranks run in test_optimizer_state.py: the same state saved and loaded in our way and in Megatron's."""

from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gspo_megatron.backend import optimizer_state
from gspo_megatron.backend.checkpoint import CheckpointError, _parts
from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.optimizer_state import StateSpace
from gspo_megatron.backend.policy import Policy
from gspo_megatron.backend.stored_state import StoredElements
from tests.backend import megatron_gather
from tests.backend.checkpoint_runs import go_on, move_expert_biases, open_policy


class HostMemory(TorchDispatchMode):
    """Counts the bytes of tensors in host memory that are made inside and still there; `most` at one time."""

    def __init__(self):
        super().__init__()
        self.most, self._known = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _on_host(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _on_host(leaf) and leaf.untyped_storage()._cdata not in before:
                storage = leaf.untyped_storage()
                self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._known.values()))
        return result


def _on_host(value) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def make_directory(mesh: Mesh, directory: str) -> Path:
    if mesh.rank == 0:
        Path(directory).mkdir()
    mesh.barrier("the directory")
    return Path(directory)


def num_cut(policy: Policy) -> int:
    """Parameters of which this rank holds a part only."""
    held = [one for ranges in StateSpace(_parts(policy._optimizer))._held.values() for one in ranges]
    return sum(one.stop - one.start < one.param.numel() for one in held)


def save_both_ways(
    layout: dict, model: str, ours: str, megatrons: str, dtype: str, ddp: dict, exchange_bytes: int
) -> dict:
    """Most bytes of host memory beside the model in each way, and how many parameters are cut by a rank's borders."""
    optimizer_state.EXCHANGE_BYTES = exchange_bytes
    policy, mesh = open_policy(layout, model, dtype, ddp)
    go_on(policy, mesh, [1])
    move_expert_biases(policy, 0.5)
    most = {}
    for name, directory in (("ours", ours), ("megatrons", megatrons)):
        path = make_directory(mesh, directory)
        with HostMemory() as memory:
            begin = policy.begin_save if name == "ours" else lambda path: megatron_gather.begin_save(policy, path)
            pending = begin(path)
        most[name] = memory.most
        pending.write()
        pending.finish(60)
    cut = num_cut(policy)
    mesh.close()
    return {**most, "cut": cut}


def load_and_save(layout: dict, model: str, directory: str, again: str, dtype: str) -> dict:
    """Load a checkpoint of another layout in our way and in Megatron's, and save it again."""
    policy, mesh = open_policy(layout, model, dtype)
    go_on(policy, mesh, [7])
    for tensor in megatron_gather.state_of(policy):
        tensor.fill_(7.0)  # what is not read would be seen
    with HostMemory() as memory:
        policy.load(Path(directory), same_layout=False)
    ours = [tensor.clone() for tensor in megatron_gather.state_of(policy)]
    for tensor in megatron_gather.state_of(policy):
        tensor.zero_()
    megatron_gather.load_state(policy, Path(directory))
    equal = [torch.equal(a, b) for a, b in zip(ours, megatron_gather.state_of(policy), strict=True)]
    policy.save(make_directory(mesh, again))
    weights = sum(param.numel() * param.itemsize for chunk in policy.chunks for param in chunk.parameters())
    result = {"equal": equal, "most": memory.most, "weights": weights, "elements": sum(one.numel() for one in ours)}
    mesh.close()
    return result


def fail_to_read(layout: dict, model: str, directory: str, dtype: str) -> str:
    """Rank 1 can't read a file when it is asked for elements; what each rank is told."""
    policy, mesh = open_policy(layout, model, dtype)
    if mesh.rank == 1:

        def fail(self, out):
            raise OSError("the disk is gone")

        StoredElements.read_into = fail
    try:
        policy.load(Path(directory), same_layout=True)
        said = "nothing"
    except CheckpointError as error:
        said = str(error)
    mesh.close()
    return said
