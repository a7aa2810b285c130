"""How Megatron itself would store a model: asked of a GPTModel without memory, through `sharded_state_dict`."""

import dataclasses
import io
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch.overrides import TorchFunctionMode

from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.model import build_model
from gspo_megatron.config import Config, MegatronConfig, ParallelConfig
from gspo_megatron.weights.families import canonical_name

_FACTORIES = {
    "tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like", "as_tensor", "rand",
    "randn", "randint", "linspace", "eye", "scalar_tensor",
}  # fmt: skip


_FILLERS = {
    "normal_",
    "uniform_",
    "zero_",
    "fill_",
    "zeros_",
    "ones_",
    "constant_",
    "trunc_normal_",
    "kaiming_uniform_",
}
"""In place, of torch.Tensor and torch.nn.init."""


class _WithoutMemory(TorchFunctionMode):
    """Inside, tensors are made on the meta device, whatever device Megatron names, and not filled."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _FILLERS:
            return args[0] if args else kwargs["tensor"]
        if name in _FACTORIES:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


@dataclass(frozen=True)
class StoredPart:
    """A rectangle of a parameter as it is stored: at `offset` of the global tensor `key`, on whose first axes layers
    and experts are counted. `param_start` and `shape` are in the whole parameter's own coordinates."""

    param: str
    """Canonical name, counted over the whole model."""
    param_start: tuple[int, ...]
    shape: tuple[int, ...]
    key: str
    key_shape: tuple[int, ...]
    lead: tuple[int, ...]


@dataclass(frozen=True)
class StoredObject:
    """What Megatron stores beside tensors: its key with its place, and the bytes of the value in a model just built."""

    key: str
    data: bytes


def stored_layout(hf: dict[str, Any], mesh: Mesh) -> tuple[list[StoredPart], list[StoredObject]]:
    """All tensors of the model of this config.json as Megatron's `torch_dist` format holds them, by the running
    version.

    `mesh` must be of one rank, or of several that all hold the whole model. Global tensors do not depend on a layout;
    what does is how they are cut.
    """
    assert mesh.parallel == ParallelConfig()
    with _WithoutMemory():
        config = Config(megatron=MegatronConfig(transformer={"perform_initialization": False}))
        (model,) = build_model(hf, config, dataclasses.replace(mesh, device=torch.device("meta")))
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    sizes = {name: tensor.numel() for name, tensor in named}
    parts, objects = [], []
    for name, entry in model.sharded_state_dict().items():
        param = canonical_name(name)
        tensors = list(nested_values({"": entry.build()})) if isinstance(entry, ShardedTensorFactory) else [entry]
        if isinstance(entry, ShardedObject):
            objects.append(_object(entry))
            continue
        found = [_part(param, tensor) for tensor in tensors if isinstance(tensor, ShardedTensor)]
        whole = sum(prod(part.shape) for part in found) == sizes[name]
        assert found and whole, f"{name}: parts of another size than {sizes[name]}"
        parts += found
    return parts, objects


def _part(param: str, tensor: ShardedTensor) -> StoredPart:
    lead = tensor.prepend_axis_num
    return StoredPart(
        param, tuple(tensor.global_offset[lead:]), tuple(tensor.local_shape), tensor.key,
        tuple(tensor.global_shape), tuple(tensor.global_offset[:lead]),
    )  # fmt: skip


def _object(entry: ShardedObject) -> StoredObject:
    return StoredObject(entry.unique_key, _NOTHING if entry.data is None else _object_bytes(entry.data))


def _object_bytes(value: Any) -> bytes:
    """What Megatron's torch strategy writes: a list of one value."""
    data = io.BytesIO()
    torch.save([value], data)
    return data.getvalue()


_NOTHING = _object_bytes(None)
