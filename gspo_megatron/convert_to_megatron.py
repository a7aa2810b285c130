"""A Hugging Face checkpoint -> Megatron's `torch_dist` format, chunk by chunk, as this machine's megatron-core names
it."""

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.stored_layout import StoredObject, StoredPart, stored_layout
from gspo_megatron.config import ConfigError, ParallelConfig
from gspo_megatron.convert import (
    TIMEOUT_S, Ranks, most_common, output_dtypes, pieces, progress, read_family,
    refuse_infinite, renamed, size_text, verify, with_fault,
)  # fmt: skip
from gspo_megatron.resume import HF_SUBDIRECTORY
from gspo_megatron.weights.families import Family
from gspo_megatron.weights.hf_files import SINGLE, HFReader, read_hf_config
from gspo_megatron.weights.hf_writer import copy_model_files
from gspo_megatron.weights.load import check_files, read_block
from gspo_megatron.weights.megatron_files import MegatronReader
from gspo_megatron.weights.partial import PartialDirectory
from gspo_megatron.weights.plan import blocks_of, whole_place
from gspo_megatron.weights.prediction_layers import PredictionLayers
from gspo_megatron.weights.raw_files import Scratch
from gspo_megatron.weights.rules import Block, ModelShape
from gspo_megatron.weights.safetensors_files import write_pieces, write_safetensors_header
from gspo_megatron.weights.torch_dist_writer import ChunkWriter, WrittenChunk, write_torch_dist_metadata

CHUNK_BYTES = 128 << 20
"""Larger chunks are cut further: a chunk is what is in memory."""


@dataclass(frozen=True)
class Options:
    """`tensor`, `pipeline`, `expert`, `expert_tensor`: the layout by whose shards chunks and files are cut."""

    hf: Path
    megatron: Path
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    dtype: str | None = None
    dry_run: bool = False
    verify: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Item:
    """One chunk to write: a rectangle of a parameter, and its place in the global tensor `key`."""

    key: str
    start: tuple[int, ...]
    param: str
    param_start: tuple[int, ...]
    shape: tuple[int, ...]
    """In the parameter; the chunk has an axis of one element more for each of `lead`."""
    lead: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def convert(options: Options) -> str:
    """Writes the checkpoint, all ranks sharing its files; what to tell the user. Raises ConfigError."""
    hf, family, shape = read_family(options.hf, "--hf")
    try:
        reader = HFReader(options.hf)
        check_files(reader, family, shape)
    except ConfigError as error:
        raise renamed(error, "--hf") from None
    partial = PartialDirectory(options.megatron, "--megatron", options.hf, options.overwrite)
    if not options.dry_run:
        partial.refuse_target()
    blocks = blocks_of(family, shape, whole_place(shape))
    cut = _cuts(family, shape, blocks, options)
    mesh = open_mesh()
    try:
        try:
            parts, objects = stored_layout(hf, mesh)
        except ConfigError as error:  # a setting of config.json that the model is not built with
            raise renamed(error, "--hf") from None
        plan = _Plan(reader, family, shape, blocks, cut, parts, options)
        if options.dry_run:
            return with_fault(plan.describe(), partial)
        return _write(plan, objects, partial, Ranks(mesh.rank, mesh.world_size), family)
    finally:
        mesh.close()


def open_mesh() -> Mesh:
    """Every rank holds the whole model: only files are shared out."""
    if "RANK" not in os.environ:
        return Mesh.alone()
    return Mesh.create(ParallelConfig(), seed=1, timeout_s=TIMEOUT_S)


def _cuts(family: Family, shape: ModelShape, blocks: dict[str, list[Block]], options: Options) -> dict[str, int | None]:
    """Canonical name -> the axis along which tensor parallelism cuts a parameter, whose `blocks` are given whole.

    Raises ConfigError for a layout that does not fit the model.
    """
    for name, size, whole in (
        ("pp", options.pipeline, shape.num_layers),
        ("ep", options.expert, shape.num_experts or 1),
    ):
        if size < 1 or size > whole or (name == "ep" and whole % size):
            raise ConfigError(f"--{name} {size}: the model has {whole} {'layers' if name == 'pp' else 'experts'}")
    if min(options.tensor, options.expert_tensor) < 1:
        raise ConfigError("--tp and --etp must be at least 1")
    place = replace(whole_place(shape), tensor_size=options.tensor, expert_tensor_size=options.expert_tensor)
    try:
        sizes = {param: _size(parts) for param, parts in blocks_of(family, shape, place).items()}
    except ValueError as error:
        raise ConfigError(f"--tp {options.tensor} --etp {options.expert_tensor}: {error}") from None
    axes = {}
    for param, parts in blocks.items():
        differ = [axis for axis, (a, b) in enumerate(zip(sizes[param], _size(parts), strict=True)) if a != b]
        axes[param] = differ[0] if differ else None
    return axes


def _size(parts: Sequence[Block]) -> tuple[int, ...]:
    ends = [[low + size for low, size in zip(block.param_start, block.shape, strict=True)] for block in parts]
    return tuple(max(end) for end in zip(*ends, strict=True))


class _Plan:
    """Which chunks go into which file, with everything known before the first byte is written."""

    def __init__(
        self,
        reader: HFReader,
        family: Family,
        shape: ModelShape,
        blocks: dict[str, list[Block]],
        cut: dict[str, int | None],
        parts: list[StoredPart],
        options: Options,
    ):
        self.reader, self.options, self._shape, self.blocks, self._cut = reader, options, shape, blocks, cut
        self._chunks, self._scratch = ChunkWriter(), Scratch()
        missing = blocks.keys() ^ {part.param for part in parts}
        assert not missing, f"Megatron's model and the family's table differ in {sorted(missing)[:5]}"
        sources = {param: [block.hf for block in found if block.hf] for param, found in blocks.items()}
        self.dtypes = output_dtypes(reader, family, shape, options.dtype)
        self.key_dtypes: dict[str, torch.dtype] = {}
        for part in parts:  # a global tensor has one type: the widest of what it is made of
            for hf in sources[part.param]:
                before = self.key_dtypes.get(part.key, self.dtypes[hf])
                self.key_dtypes[part.key] = torch.promote_types(before, self.dtypes[hf])
        for part in parts:
            self.dtypes |= {hf: self.key_dtypes[part.key] for hf in sources[part.param]}
        self.shapes = {part.key: (part.key_shape, self.key_dtypes[part.key]) for part in parts}
        self.files = self._files(parts)
        self.num_bytes = sum(item.num_bytes for items in self.files.values() for item in items)

    def _files(self, parts: list[StoredPart]) -> dict[str, list[Item]]:
        """File -> its chunks: one file for each layer, pipeline stage and expert-parallel rank."""
        units: dict[tuple[int, int], list[Item]] = defaultdict(list)
        for part in parts:
            stage, expert = self._home(part.param)
            units[stage * self.options.expert + expert, layer_of(part.param)] += self._items(part)
        names, numbers = {}, defaultdict(int)
        for (rank, layer), items in sorted(units.items()):
            names[f"__{rank}_{numbers[rank]}.distcp"] = items
            numbers[rank] += 1
        return names

    def _home(self, param: str) -> tuple[int, int]:
        """Pipeline stage and expert-parallel rank that a parameter lives on."""
        stages, layer = self.options.pipeline, layer_of(param)
        stage = layer * stages // self._shape.num_layers if layer >= 0 else 0
        if layer < 0 and not param.startswith("embedding."):
            stage = stages - 1
        expert = re.search(r"\.local_experts\.(\d+)\.", param)
        return stage, int(expert[1]) * self.options.expert // self._shape.num_experts if expert else 0

    def _items(self, part: StoredPart) -> Iterator[Item]:
        dtype, axis = self.key_dtypes[part.key], self._cut[part.param]
        is_expert = ".local_experts." in part.param
        number = self.options.expert_tensor if is_expert else self.options.tensor
        steps = list(part.shape)
        if axis is not None:
            steps[axis] = -(-part.shape[axis] // number)
        row = prod(steps[1:]) * dtype.itemsize
        steps[0] = max(1, min(steps[0], CHUNK_BYTES // row))
        for corner in product(*(range(0, size, step) for size, step in zip(part.shape, steps, strict=True))):
            size = tuple(min(a, b - c) for a, b, c in zip(steps, part.shape, corner, strict=True))
            param_start = tuple(a + b for a, b in zip(part.param_start, corner, strict=True))
            start = (*part.lead, *param_start)
            yield Item(part.key, start, part.param, param_start, size, len(part.lead), dtype)

    def source(self) -> dict[str, Any]:
        """What decides the bytes written, for a start that goes on."""
        options = {key: str(value) for key, value in asdict(self.options).items() if key not in ("verify", "overwrite")}
        files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in self.reader.files}
        return {
            "format": 1,
            "options": options,
            "config": read_hf_config(self.options.hf),
            "files": files,
            "keys": sorted(self.key_dtypes),
            "parts": len(self.files),
        }

    def describe(self) -> str:
        items = [item for part in self.files.values() for item in part]
        layers = {layer_of(item.param) for item in items} - {-1}
        biggest = max(sum(item.num_bytes for item in part) for part in self.files.values())
        return "\n".join(
            [
                f"would write {self.options.megatron}",
                f"  tensors: {len(self.dtypes)} of Hugging Face, {len(self.shapes)} of Megatron in {len(items)} chunks",
                f"  layers:  {len(layers)}",
                f"  bytes:   {self.num_bytes} ({size_text(self.num_bytes)})",
                f"  files:   {len(self.files)}, the largest {size_text(biggest)}",
            ]
        )

    def write_file(self, file: BinaryIO, name: str, advance: Callable[[int], None]) -> list:
        written = []
        for item in self.files[name]:
            data = self._scratch.bytes(item.num_bytes)
            self._fill(item, data)
            shape = (1,) * item.lead + item.shape
            place = self._chunks.write(file, data, shape, item.dtype)
            written.append(WrittenChunk(item.key, list(item.start), list(shape), *place))
            advance(item.num_bytes)
        return written

    def _fill(self, item: Item, data: Tensor) -> None:
        """Read a chunk's elements into `data`, uint8."""
        row, array, filled = item.num_bytes // (item.shape or (1,))[0], data.numpy(), 0
        for block in self.blocks[item.param]:
            part = block.cut(item.param_start, item.shape)
            if part is None:
                continue
            filled += part.numel
            start = _minus(part.param_start, item.param_start)
            if part.hf is not None and part.is_plain and not any(start[1:]) and part.shape[1:] == item.shape[1:]:
                rows = array[start[0] * row : (start[0] + part.shape[0]) * row]
                if self.reader.read_rows(part.hf, part.hf_start, part.shape, item.dtype, rows):
                    continue
            view = data.view(item.dtype).view(item.shape)[part._replace(param_start=start).param_slices]
            if part.hf is None:
                view.zero_()
            else:
                read_block(self.reader, part, view)
                refuse_infinite(self.reader, part.hf, view)
        assert filled == prod(item.shape), f"{item.param}: {filled} of {prod(item.shape)} elements are in the table"


def _minus(start: Sequence[int], origin: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(start, origin, strict=True))


def layer_of(param: str) -> int:
    """-1 outside the decoder's layers."""
    match = re.match(r"decoder\.layers\.(\d+)\.", param)
    return int(match[1]) if match else -1


def _write(plan: _Plan, objects: list[StoredObject], partial: PartialDirectory, ranks: Ranks, family) -> str:
    finished = partial.begin(plan.source()) if ranks.rank == 0 else 0
    ranks.barrier()
    mine = [name for name in ranks.share(list(plan.files)) if partial.finished(name) is None]
    num_bytes = sum(item.num_bytes for name in mine for item in plan.files[name])
    with progress("writing", num_bytes, ranks) as advance:
        for name in mine:
            partial.write(name, lambda file, name=name: plan.write_file(file, name, advance))
    ranks.barrier()  # rank 0 now reads what all ranks noted
    if ranks.rank == 0:
        _write_rest(plan, objects, partial)
    ranks.barrier()
    checked = ""
    if plan.options.verify:
        _verify(plan, partial, ranks, family)
        checked = f", {len(plan.dtypes)} tensors verified"
        ranks.barrier()
    if ranks.rank == 0:
        partial.finish()
    went_on = f" ({finished} were there from an earlier start)" if finished else ""
    return f"wrote {partial.target}: {size_text(plan.num_bytes)} in {len(plan.files)} files{went_on}{checked}"


def _write_rest(plan: _Plan, objects: list[StoredObject], partial: PartialDirectory) -> None:
    """The objects, the metadata, and the model's other files."""
    contents: dict[bytes, WrittenChunk] = {}

    def write_objects(file: BinaryIO) -> None:
        for item in objects:
            if item.data not in contents:  # most are empty: one copy serves all
                contents[item.data] = WrittenChunk(item.key, None, [], file.tell(), len(item.data))
                file.write(item.data)

    name = "__objects_0.distcp"
    partial.write(name, write_objects)
    with partial.failures_named():
        chunks = {file: [WrittenChunk(*chunk) for chunk in partial.finished(file)] for file in plan.files}
        places = {item.key: (name, contents[item.data]) for item in objects}
        common = {"content_metadata": {"non_homogeneous_layers": False, "singleton_local_shards": False}}
        write_torch_dist_metadata(partial.path, plan.shapes, chunks, places, common)
        shutil.rmtree(partial.path / HF_SUBDIRECTORY, ignore_errors=True)
        (partial.path / HF_SUBDIRECTORY).mkdir()
        dtype = str(most_common(plan.reader, plan.dtypes)).removeprefix("torch.")
        copy_model_files(plan.options.hf, read_hf_config(plan.options.hf), dtype, partial.path / HF_SUBDIRECTORY)
        _write_prediction_layers(plan.options.hf, partial.path / HF_SUBDIRECTORY)


def _write_prediction_layers(hf: Path, directory: Path) -> None:
    """Multi-token-prediction layers, which Megatron's files do not have here, go beside config.json for the way
    back."""
    layers = PredictionLayers(hf)
    if not layers.shapes:
        return
    with (directory / SINGLE).open("wb") as file:
        write_safetensors_header(file, {n: (layers.reader.dtype(n), shape) for n, shape in layers.shapes.items()})
        for name in layers.shapes:
            write_pieces(file, pieces(layers.reader, name, layers.reader.dtype(name)))


def _verify(plan: _Plan, partial: PartialDirectory, ranks: Ranks, family) -> None:
    try:
        written = MegatronReader(partial.path, family, plan._shape, "--verify")
        mine = ranks.share(sorted(plan.dtypes))
        total = sum(prod(plan.reader.shape(name)) * plan.dtypes[name].itemsize for name in mine)
        with progress("verifying", total, ranks) as advance:
            verify(plan.reader, written, plan.dtypes, mine, advance)
    except ConfigError:
        partial.discard()
        raise
