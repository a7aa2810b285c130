"""Fills a rank's parameters from Hugging Face files, reading the bytes of its own shards only."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from gspo_megatron.config import ConfigError
from gspo_megatron.weights.families import Family
from gspo_megatron.weights.hf_files import HFReader
from gspo_megatron.weights.plan import hf_shapes
from gspo_megatron.weights.rules import Block, ModelShape


def check_files(reader: HFReader, family: Family, shape: ModelShape) -> None:
    """Compare names and shapes in the files with the family's table; raises ConfigError that lists what differs."""
    expected = hf_shapes(family, shape)
    ignored = [re.compile(pattern) for pattern in family.ignored]
    if shape.tied_embeddings:
        ignored.append(re.compile(r"lm_head\.weight"))
    missing = sorted(expected.keys() - reader.names)
    unknown = sorted(n for n in reader.names - expected.keys() if not any(p.fullmatch(n) for p in ignored))
    faults = []
    if missing:
        faults.append(f"model.hf: {reader.directory}: {len(missing)} tensors are missing: {_some(missing)}")
    if unknown:
        faults.append(
            f"model.hf: {reader.directory}: {len(unknown)} tensors belong to no {family.architecture}: {_some(unknown)}"
        )
    for name in sorted(expected.keys() & reader.names):
        if reader.shape(name) != expected[name]:
            faults.append(
                f"model.hf: {name} is {list(reader.shape(name))} in the files, "
                f"but config.json says {list(expected[name])}"
            )
    if faults:
        raise ConfigError(faults[:20])


def load_parameters(params: Mapping[str, Tensor], blocks: Mapping[str, list[Block]], reader: HFReader) -> None:
    """Copy every block into its parameter (canonical global name -> tensor); padding becomes 0.

    Values are cast to the parameter's dtype. Raises AssertionError where a parameter is not filled to its last element
    or a block has no parameter: then table and model differ.
    """
    assert params.keys() == blocks.keys(), (
        f"no table row fills {sorted(params.keys() - blocks.keys())}, "
        f"the model has no {sorted(blocks.keys() - params.keys())}"
    )
    with torch.no_grad():
        for name, param in params.items():
            filled = sum(block.numel for block in blocks[name])
            assert filled == param.numel(), f"{name}: {filled} of {param.numel()} elements are filled"
            for block in blocks[name]:
                view = param[block_slices(block.param_start, block.shape)]
                if block.hf is None:
                    view.zero_()
                else:
                    view.copy_(reader.read(block.hf, block.hf_start, block.shape))


def block_slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
