"""A Megatron `torch_dist` checkpoint -> Hugging Face safetensors, tensor by tensor."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from gspo_megatron.checkpoints import MANIFEST
from gspo_megatron.config import ConfigError
from gspo_megatron.convert import (
    DTYPES, Ranks, Reader, most_common, output_dtypes, pieces, progress, read_family, renamed,
    size_text, verify, with_fault,
)  # fmt: skip
from gspo_megatron.resume import HF_SUBDIRECTORY, model_differences, model_of_checkpoint
from gspo_megatron.weights.hf_files import INDEX, SINGLE, HFReader, read_hf_config
from gspo_megatron.weights.hf_writer import copy_model_files
from gspo_megatron.weights.megatron_files import MegatronReader
from gspo_megatron.weights.partial import PartialDirectory
from gspo_megatron.weights.prediction_layers import PredictionLayers, with_number
from gspo_megatron.weights.safetensors_files import write_pieces, write_safetensors_header
from gspo_megatron.weights.torch_dist_files import METADATA


@dataclass(frozen=True)
class Options:
    """`reference`: a Hugging Face directory to take config.json and tokenizer from; None takes what came with the
    checkpoint. `shard_bytes`: largest shard, unless one tensor is larger."""

    megatron: Path
    hf: Path
    reference: Path | None = None
    dtype: str | None = None
    shard_bytes: int = 5 << 30
    dry_run: bool = False
    verify: bool = False
    overwrite: bool = False


def convert(options: Options, ranks: Ranks) -> str:
    """Writes the checkpoint, all ranks sharing its shards; what to tell the user. Raises ConfigError."""
    if not options.megatron.is_dir():
        raise ConfigError(f"--megatron: {options.megatron} is not a directory; give a torch_dist checkpoint")
    if not (options.megatron / METADATA).is_file():
        inside = sorted(str(path.parent) for path in options.megatron.glob(f"**/{METADATA}"))
        which = f"one, say {inside[-1]}" if inside else "a whole torch_dist checkpoint"
        raise ConfigError(f"--megatron: {options.megatron} has no {METADATA}: no torch_dist checkpoint; give {which}")
    partial = PartialDirectory(options.hf, "--hf", options.megatron, options.overwrite)
    if not options.dry_run:
        partial.refuse_target()
    reference, option = find_reference(options)
    _, family, shape = read_family(reference, option)
    reader = MegatronReader(options.megatron, family, shape, "--megatron")
    dtypes = output_dtypes(reader, family, shape, options.dtype)
    reader = _WithPredictionLayers(reader, reference)
    main = most_common(reader, {name: reader.dtype(name) for name in dtypes})
    for name in reader.carried:
        cast = options.dtype is not None and reader.dtype(name) == main
        dtypes[name] = DTYPES[options.dtype] if cast else reader.dtype(name)
    shards = plan_shards(reader, dtypes, options.shard_bytes)
    if options.dry_run:
        return with_fault(_describe(options, reader, dtypes, shards, shape.num_layers), partial)
    said = _write(_Plan(options, reference, reader, dtypes, shards), partial, ranks)
    other = _other_model(options.megatron, reference)
    return f"{said}\nnote: config.json is as --hf-reference {other}" if other else said


class _WithPredictionLayers:
    """The Megatron checkpoint's tensors and, behind them, the multi-token-prediction layers that came with it or are in
    the reference: Megatron's files have none."""

    def __init__(self, reader: MegatronReader, reference: Path):
        self._reader, layers = reader, PredictionLayers(reference)
        self._layers, self._copies, self.carried = layers.reader, layers.copies, sorted(layers.shapes)
        self.number = layers.number

    @property
    def names(self) -> set[str]:
        return self._reader.names | set(self.carried)

    def _where(self, name: str) -> tuple[Reader, str]:
        if name in self._copies:
            return self._reader, self._copies[name]
        return (self._layers if name in self.carried else self._reader), name

    def shape(self, name: str) -> tuple[int, ...]:
        reader, name = self._where(name)
        return reader.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        reader, name = self._where(name)
        return reader.dtype(name)

    def read_into(self, name: str, start: tuple[int, ...], out: torch.Tensor) -> None:
        reader, name = self._where(name)
        reader.read_into(name, start, out)


def find_reference(options: Options) -> tuple[Path, str]:
    """Where config.json and the tokenizer come from: --hf-reference, or what the checkpoint came with, from the
    converter (its folder `hf`) or from a run (model.hf in its run.json); and the option to name in messages."""
    if options.reference is not None:
        return options.reference, "--hf-reference"
    with_it = options.megatron / HF_SUBDIRECTORY
    if (with_it / "config.json").is_file():
        return with_it, "--megatron"
    try:
        run = json.loads((options.megatron / MANIFEST).read_text(encoding="utf-8"))
        directory = Path(run["config"]["model"]["hf"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--hf-reference: {options.megatron} came without config.json and tokenizer; give a Hugging Face directory "
            "of the model"
        ) from None
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"--hf-reference: the run's model.hf, {directory}, is not there any more; give where it is now"
        )
    other = _other_model(options.megatron, directory)
    if other:
        raise ConfigError(f"--hf-reference: the run's model.hf {other}; give the model that the run started from")
    return directory, "--hf-reference"


def _other_model(megatron: Path, reference: Path) -> str:
    """How config.json there differs from that of the checkpoint's own model, where that is known; empty if it doesn't.

    Names and shapes are checked against it; what shows in neither (rotary base, experts a token) would go unseen.
    """
    own = model_of_checkpoint(megatron)
    differences = model_differences(own, read_hf_config(reference)) if own else []
    said = ", ".join(f"{name} = {new} where the checkpoint's model has {old}" for name, old, new in differences[:5])
    return f"{reference} has {said}" if differences else ""


def plan_shards(reader: Reader, dtypes: dict[str, torch.dtype], shard_bytes: int) -> dict[str, list[str]]:
    """File -> names in it, in the family's order."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, dtype in dtypes.items():
        size = prod(reader.shape(name)) * dtype.itemsize
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors": names for number, names in enumerate(shards)}


@dataclass(frozen=True)
class _Plan:
    options: Options
    reference: Path
    reader: _WithPredictionLayers
    dtypes: dict[str, torch.dtype]
    shards: dict[str, list[str]]

    def num_bytes(self, names: list[str]) -> int:
        return sum(prod(self.reader.shape(name)) * self.dtypes[name].itemsize for name in names)

    def source(self) -> dict[str, Any]:
        """What decides the bytes written, for a start that goes on."""
        files = [file for file in sorted(self.options.megatron.iterdir()) if file.is_file()]
        return {
            "format": 1,
            "megatron": str(self.options.megatron),
            "config": read_hf_config(self.reference),
            "files": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
            "tensors": {name: str(dtype) for name, dtype in self.dtypes.items()},
            "shards": {file: len(names) for file, names in self.shards.items()},
        }

    def write_shard(self, file: BinaryIO, name: str, advance: Callable[[int], None]) -> dict[str, int]:
        """What is in it, in bytes by name."""
        entries = {tensor: (self.dtypes[tensor], self.reader.shape(tensor)) for tensor in self.shards[name]}
        write_safetensors_header(file, entries)
        for tensor, (dtype, _) in entries.items():
            write_pieces(file, pieces(self.reader, tensor, dtype))
            advance(self.num_bytes([tensor]))
        return {tensor: self.num_bytes([tensor]) for tensor in entries}


def _write(plan: _Plan, partial: PartialDirectory, ranks: Ranks) -> str:
    finished = partial.begin(plan.source()) if ranks.rank == 0 else 0
    ranks.barrier()
    mine = [file for file in ranks.share(list(plan.shards)) if partial.finished(file) is None]
    with progress("writing", sum(plan.num_bytes(plan.shards[file]) for file in mine), ranks) as advance:
        for name in mine:
            partial.write(name, lambda file, name=name: plan.write_shard(file, name, advance))
    ranks.barrier()
    if ranks.rank == 0:
        _write_rest(plan, partial)
    ranks.barrier()
    checked = ""
    if plan.options.verify:
        _verify(plan, partial, ranks)
        checked = f", {len(plan.dtypes)} tensors verified"
        ranks.barrier()
    if ranks.rank == 0:
        partial.finish()
    went_on = f" ({finished} were there from an earlier start)" if finished else ""
    size = size_text(plan.num_bytes(list(plan.dtypes)))
    return f"wrote {partial.target}: {size} in {len(plan.shards)} shards{went_on}{checked}"


def _write_rest(plan: _Plan, partial: PartialDirectory) -> None:
    """The index, from what was written, and the model's other files."""
    with partial.failures_named():
        written = {file: partial.finished(file) for file in plan.shards}
        if len(plan.shards) > 1:
            weight_map = {name: file for file, sizes in written.items() for name in sizes}
            total = sum(sum(sizes.values()) for sizes in written.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (partial.path / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        dtype = str(most_common(plan.reader, plan.dtypes)).removeprefix("torch.")
        config = with_number(read_hf_config(plan.reference), plan.reader.number)  # those that these files have
        copy_model_files(plan.reference, config, dtype, partial.path)


def _verify(plan: _Plan, partial: PartialDirectory, ranks: Ranks) -> None:
    try:
        mine = ranks.share(list(plan.dtypes))
        with progress("verifying", plan.num_bytes(list(mine)), ranks) as advance:
            verify(plan.reader, HFReader(partial.path), plan.dtypes, mine, advance)
    except ConfigError as error:
        partial.discard()
        raise renamed(error, "--verify") from None


def _describe(options: Options, reader: Reader, dtypes, shards: dict[str, list[str]], num_layers: int) -> str:
    sizes = [sum(prod(reader.shape(name)) * dtypes[name].itemsize for name in names) for names in shards.values()]
    return "\n".join(
        [
            f"would write {options.hf}",
            f"  tensors: {len(dtypes)}",
            f"  layers:  {num_layers}",
            f"  bytes:   {sum(sizes)} ({size_text(sum(sizes))})",
            f"  files:   {len(shards)} shards, the largest {size_text(max(sizes))}",
        ]
    )
