"""A Megatron `torch_dist` checkpoint read as if it were the Hugging Face one: the same blocks by the same names.

Megatron stores global tensors, whatever the layout: a parameter of all layers (and all experts) is one tensor with an
axis for each ("decoder.layers.mlp.linear_fc2.weight" [layers, out, in]), or one tensor a layer where layers differ or
`non_homogeneous_layers` is asked for ("decoder.layers.3.mlp.linear_fc2.weight"). Megatron: `TransformerBlock.
sharded_state_dict`, `SequentialMLP.sharded_state_dict`, and `sharded_state_dict_keys_map` of the layer specs.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_megatron.config import ConfigError
from gspo_megatron.weights.families import Family
from gspo_megatron.weights.plan import blocks_of, hf_shapes, whole_place
from gspo_megatron.weights.rules import Block, ModelShape
from gspo_megatron.weights.torch_dist_files import StoredTensor, TorchDistReader

_OTHER_NAMES = (  # what a layer spec with other modules calls the same parameter
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
    (r"\.self_attention\.(q|kv)_layernorm\.", r".self_attention.linear_\1_up_proj.layer_norm_"),
    (r"\.mtp_model_layer\.", ".transformer_layer."),
)
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_MODEL_KEYS = re.compile(r"(embedding|decoder|output_layer|mtp)\.")


class StoredName(NamedTuple):
    """`key` of a global tensor, and the place of one parameter on its leading axes."""

    key: str
    lead: tuple[int, ...]


def stored_names(canonical: str) -> Iterator[StoredName]:
    """Under which names checkpoints may hold the parameter of this canonical name (layers and experts from 0 on)."""
    names = [canonical]
    for pattern, other in _OTHER_NAMES:
        names += [re.sub(pattern, other, name) for name in names if re.search(pattern, name)]
    for name in names:
        for key, lead in _over_layers(name):
            yield from _over_experts(key, lead)


def _over_layers(name: str) -> Iterator[StoredName]:
    yield StoredName(name, ())
    match = re.match(r"(decoder|mtp)\.layers\.(\d+)\.", name)
    if match:
        yield StoredName(f"{match[1]}.layers.{name[match.end() :]}", (int(match[2]),))


def _over_experts(name: str, lead: tuple[int, ...]) -> Iterator[StoredName]:
    match = re.search(r"\.experts\.local_experts\.(\d+)\.", name)
    if not match:
        yield StoredName(name, lead)
        return
    before, after = name[: match.start()], name[match.end() :]
    yield StoredName(f"{before}.experts.experts.{after}", (*lead, int(match[1])))
    yield StoredName(f"{before}.experts.experts.{match[1]}.{after}", lead)


class MegatronReader:
    """Reads like `HFReader`. Raises ConfigError for what is no checkpoint, is damaged, or is of another model."""

    def __init__(self, directory: str | Path, family: Family, shape: ModelShape, key: str = "model.megatron"):
        self.directory, self._key = Path(directory), key
        try:
            self._reader = TorchDistReader(directory)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{key}: {error}; give a whole torch_dist checkpoint") from None
        blocks = blocks_of(family, shape, whole_place(shape))
        self._shapes = hf_shapes(family, shape)
        self._names = self._find(blocks, family)
        self._blocks: dict[str, list[Block]] = defaultdict(list)
        for parts in blocks.values():
            for block in parts:
                if block.hf is not None:
                    self._blocks[block.hf].append(block)

    def _find(self, blocks: dict[str, list[Block]], family: Family) -> dict[str, StoredName]:
        tensors, found, missing, wrong = self._reader.tensors, {}, [], []
        extent: dict[str, list[int]] = {}
        known = set()
        for param, parts in blocks.items():
            names = [name for name in stored_names(param) if name.key in tensors]
            known |= {name.key for name in names}
            if not names:
                missing.append(param)
                continue
            found[param] = name = names[0]
            fault = _shape_fault(param, parts, tensors[name.key], name)
            wrong += [fault] if fault else []
            most = extent.setdefault(name.key, [0] * len(name.lead))
            extent[name.key] = [max(a, b + 1) for a, b in zip(most, name.lead, strict=True)]
        wrong += [
            f"{key} is of {list(tensors[key].shape[: len(most)])} layers (and experts), the model has {most}"
            for key, most in extent.items()
            if list(tensors[key].shape[: len(most)]) != most
        ]
        unknown = [key for key in tensors if _MODEL_KEYS.match(key) and key not in known]
        faults = []
        if missing:
            faults.append(f"{len(missing)} parameters are missing, first {missing[0]}")
        if unknown:
            faults.append(
                f"{len(unknown)} tensors belong to no {family.architecture} of this config.json, first {unknown[0]}"
            )
        if wrong:
            faults.append(f"{len(wrong)} tensors have another shape, first {wrong[0]}")
        if faults:
            end = "it is a checkpoint of another model than the Hugging Face config.json describes"
            raise ConfigError([f"{self._key}: {self.directory}: {fault}; {end}" for fault in faults])
        return found

    @property
    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.tensors[self._names[self._blocks[name][0].param].key].dtype

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The block of `shape` from offset `start` on, in the file's dtype, on the CPU."""
        out = torch.empty(shape, dtype=self.dtype(name))
        self.read_into(name, start, out)
        return out

    def read_slices(self, name: str, slices: tuple[int | slice, ...]) -> Tensor:
        """`tensor[slices]` in the file's dtype, on the CPU; between the steps of a slice all is read."""
        bounds = [(s, s + 1) if isinstance(s, int) else (s.start, s.stop) for s in slices]
        inside = tuple(0 if isinstance(s, int) else slice(None, None, s.step) for s in slices)
        return self.read(name, tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))[inside]

    def read_into(self, name: str, start: tuple[int, ...], out: Tensor) -> None:
        """Copy the block of `out`'s shape from offset `start` on into `out`, cast to its dtype."""
        filled = 0
        for block in self._blocks[name]:
            part = block.cut_hf(start, out.shape)
            if part is None:
                continue
            origin = start if block.hf_index is None else start[1:]
            view = out if block.hf_index is None else out[block.hf_index - start[0]]
            view = part._replace(hf_index=None, hf_start=_relative(part, origin)).of_hf(view)
            self._read_param(block.param, part.param_start, view)
            filled += part.numel
        assert filled == out.numel(), f"{name}: {filled} of {out.numel()} elements are in the table"

    def _read_param(self, param: str, start: tuple[int, ...], view: Tensor) -> None:
        key, lead = self._names[param]
        for _ in lead:
            view = view.unsqueeze(0)
        try:
            self._reader.read_into(key, (*lead, *start), view)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{self._key}: {error}; copy the checkpoint again") from None


def _relative(part: Block, origin: tuple[int, ...]) -> tuple[int, ...]:
    """Where a block lies in a piece of its HF tensor that begins at `origin`, along the parameter's axes."""
    along = origin[::-1] if part.transposed else origin
    return tuple(a - b for a, b in zip(part.hf_start, along, strict=True))


def _shape_fault(param: str, parts: list[Block], tensor: StoredTensor, name: StoredName) -> str | None:
    """A stored vocabulary may be longer than the model's, by padding."""
    ends = [[low + size for low, size in zip(block.param_start, block.shape, strict=True)] for block in parts]
    expected = [max(end) for end in zip(*ends, strict=True)]
    found = list(tensor.shape[len(name.lead) :])
    longer = param in _VOCABULARY and found[1:] == expected[1:] and found[0] >= expected[0]
    if found == expected or longer:
        return None
    return f"{name.key} is {list(tensor.shape)}, of which a parameter takes {expected}, not {found}"
