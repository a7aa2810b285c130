"""Fills a rank's parameters from Hugging Face files, reading the bytes of its own shards only."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gspo_megatron.config import ConfigError
from gspo_megatron.weights.families import Family
from gspo_megatron.weights.hf_files import HFReader
from gspo_megatron.weights.plan import Place, hf_shapes, tensor_faults
from gspo_megatron.weights.rules import Block, ModelShape


def check_files(reader: HFReader, family: Family, shape: ModelShape, place: Place | None = None) -> None:
    """Raises ConfigError where names or shapes in the files are not those of the family's table; with `place` only what
    a rank there reads is looked at, and only files that hold something of it are opened."""
    names = reader.names
    if place is not None:
        expected = hf_shapes(family, shape, place)
        names = names & expected.keys()
        if len(names) == len(expected) and all(reader.shape(name) == size for name, size in expected.items()):
            return
    faults = tensor_faults({name: reader.shape(name) for name in names}, family, shape, place)
    if faults:
        raise ConfigError([f"model.hf: {str(reader.directory)!r}: {fault}" for fault in faults])


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
                view = param if block.shape == param.shape else param[block.param_slices]
                if block.hf is None:
                    view.zero_()
                else:
                    read_block(reader, block, view)


def read_block(reader: HFReader, block: Block, out: Tensor) -> None:
    """Copy what the files have of a block into `out`, in the parameter's orientation and `out`'s dtype."""
    if block.is_plain:
        reader.read_into(block.hf, block.hf_start, out)
    else:
        piece = reader.read_slices(block.hf, block.hf_slices)
        out.copy_(piece.T if block.transposed else piece)
