"""Megatron's and torch's loading of `torch_dist` checkpoints without running code from them.

Both unpickle: .metadata with any class that it names, the objects in .distcp files too
(`DefaultLoadPlanner.load_bytes`, torch/distributed/checkpoint/default_planner.py), and common.pt with torch's own short
list.
"""

import contextlib
import io
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from gspo_megatron.backend.pending_save import CheckpointError
from gspo_megatron.weights.torch_dist_files import TorchDistReader


@contextlib.contextmanager
def no_code_from(directory: Path) -> Iterator[TorchDistReader]:
    """Inside, what is loaded from `directory` is tensors and plain values; yields a reader of it. Raises CheckpointError
    for anything else."""
    load_bytes = DefaultLoadPlanner.load_bytes
    try:
        reader = TorchDistReader(directory)  # reads .metadata by an unpickler that knows what a checkpoint needs
        DefaultLoadPlanner.load_bytes = _load_plain
        yield reader
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{directory}: common.pt holds more than tensors and plain values; not loaded") from error
    except ValueError as error:
        raise CheckpointError(f"{error}") from error
    finally:
        DefaultLoadPlanner.load_bytes = load_bytes


def _load_plain(planner: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """In place of `load_bytes`, which does the same with `weights_only=False`."""
    key = read_item.dest_index.fqn
    try:
        loaded = torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{key} holds more than tensors and plain values; not loaded") from error
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[key], loaded)
    else:
        planner.state_dict[key] = loaded
