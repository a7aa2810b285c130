"""Hugging Face checkpoint directories: slices of tensors read, and shards written with an index of what was written."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gspo_megatron.config import ConfigError
from gspo_megatron.weights.raw_files import OpenFiles, RawTensor
from gspo_megatron.weights.safetensors_files import read_safetensors_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises ConfigError naming `model.hf` where it is missing or no JSON object."""
    return read_json(Path(directory) / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's file. Raises ConfigError naming `model.hf`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model.hf: {path.parent} has no {path.name}; give a Hugging Face checkpoint") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.hf: {path} is not JSON ({error}); copy the checkpoint again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"model.hf: {path} is not a JSON object; copy the checkpoint again")
    return values


class HFReader:
    """Reads blocks of tensors from the safetensors files of a checkpoint; only the bytes of a block are read, and none
    stay in memory. Anything but safetensors is refused, never unpickled.

    Raises ConfigError for a missing or broken file.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._files = OpenFiles()
        self._headers: dict[str, dict[str, RawTensor]] = {}
        self._file_of = self._find_files()

    def _find_files(self) -> dict[str, str]:
        index = self.directory / INDEX
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise ConfigError(f"model.hf: {index} has no weight_map of names to files; copy the checkpoint again")
            for file in sorted(set(weight_map.values())):
                if Path(file).name != file:
                    raise ConfigError(f"model.hf: {index} names {file!r}, which lies outside the directory")
                if not (self.directory / file).exists():
                    raise ConfigError(f"model.hf: {self.directory}: the index names {file}, which is missing")
            return weight_map
        if not (self.directory / SINGLE).exists():
            raise ConfigError(
                f"model.hf: {self.directory}: neither {INDEX} nor {SINGLE}; give a safetensors checkpoint"
            )
        return dict.fromkeys(self._header(SINGLE), SINGLE)

    def _header(self, file: str) -> dict[str, RawTensor]:
        if file not in self._headers:
            try:
                self._headers[file] = read_safetensors_header(self.directory / file)
            except (ValueError, OSError) as error:
                raise ConfigError(
                    f"model.hf: {self.directory / file} can't be read: {error}; copy the checkpoint again"
                ) from None
        return self._headers[file]

    def _tensor(self, name: str) -> RawTensor:
        file = self._file_of[name]
        header = self._header(file)
        if name not in header:
            raise ConfigError(
                f"model.hf: {self.directory}: {name} is not in {file}, where the index has it; copy the checkpoint again"
            )
        return header[name]

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    @property
    def files(self) -> list[Path]:
        return [self.directory / file for file in sorted(set(self._file_of.values()))]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The block of `shape` from offset `start` on, in the file's dtype, on the CPU."""
        out = torch.empty(shape, dtype=self.dtype(name))
        self.read_into(name, start, out)
        return out

    def read_into(self, name: str, start: tuple[int, ...], out: Tensor) -> None:
        """Copy the block of `out`'s shape from offset `start` on into `out`, cast to its dtype."""
        try:
            self._tensor(name).read_into(self._files, start, out)
        except OSError as error:
            raise ConfigError(f"model.hf: {self.directory}: {name} can't be read: {error}") from None


def write_hf_checkpoint(
    tensors: Iterable[tuple[str, Tensor]], directory: str | Path, reference: str | Path, shard_bytes: int = 5 << 30
) -> Path:
    """Write tensors as safetensors shards with config, generation config and tokenizer files of `reference`.

    config.json gets the dtype of what was written, by the key that it has. All goes to a directory beside the target
    which is renamed when it is whole, so that a half-written checkpoint never has the target's name; a checkpoint
    already there is replaced. Memory is bounded by one shard. Raises ValueError for a name that comes twice, or no
    tensor at all.
    """
    target, config = Path(directory), read_hf_config(reference)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    num_elements: Counter[torch.dtype] = Counter()
    shards = _write_shards(_counted(tensors, num_elements), partial, shard_bytes)
    _name_shards(shards, partial)
    for file in sorted(Path(reference).iterdir()):
        is_index = file.name.endswith(".index.json")  # of the reference's own weights
        if file.is_file() and file.suffix in (".json", ".txt", ".jinja", ".model") and not is_index:
            shutil.copyfile(file, partial / file.name)
    _say_dtype(config, num_elements, partial / "config.json")
    for file in partial.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old)
    else:
        partial.rename(target)
    return target


def _counted(tensors: Iterable[tuple[str, Tensor]], num_elements: Counter) -> Iterator[tuple[str, Tensor]]:
    names = set()
    for name, tensor in tensors:
        if name in names:
            raise ValueError(f"{name} comes twice: one of the two would be lost")
        names.add(name)
        num_elements[tensor.dtype] += tensor.numel()
        yield name, tensor
    if not names:
        raise ValueError("no tensors to write")


def _say_dtype(config: dict[str, Any], num_elements: Counter, path: Path) -> None:
    """transformers and SGLang load a checkpoint in the dtype of its config.json, whatever its tensors are in."""
    dtype = str(num_elements.most_common(1)[0][0]).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    if any(config.get(key) != dtype for key in keys):
        path.write_text(json.dumps(config | dict.fromkeys(keys, dtype), indent=2, ensure_ascii=False) + "\n", "utf-8")


def _write_shards(tensors, partial: Path, shard_bytes: int) -> list[dict[str, int]]:
    """Writes shard files by number; returns the names and bytes in each."""
    shards: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        file = partial / f"{len(shards)}.safetensors"
        save_file(held, file, metadata={"format": "pt"})
        file.chmod(partial.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
        shards.append({name: tensor.nbytes for name, tensor in held.items()})
        held.clear()

    for name, tensor in tensors:
        if held and sum(other.nbytes for other in held.values()) + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
    flush()
    return shards


def _name_shards(shards: list[dict[str, int]], partial: Path) -> None:
    if len(shards) == 1:
        (partial / "0.safetensors").rename(partial / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (partial / f"{number}.safetensors").rename(partial / file)
        weight_map |= dict.fromkeys(names, file)
    total = sum(sum(names.values()) for names in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (partial / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def torch_dtype(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
