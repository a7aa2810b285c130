"""Hugging Face checkpoint directories: slices of tensors read, and shards written with an index of what was written."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gspo_megatron.config import ConfigError

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
    """Reads blocks of tensors from the safetensors files of a checkpoint; only the bytes of a block are touched.

    Raises ConfigError for a missing or broken file.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._open: dict[str, Any] = {}
        self._file_of = self._find_files()

    def _find_files(self) -> dict[str, str]:
        index = self.directory / INDEX
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise ConfigError(f"model.hf: {index} has no weight_map of names to files; copy the checkpoint again")
            for file in sorted(set(weight_map.values())):
                if not (self.directory / file).exists():
                    raise ConfigError(f"model.hf: {self.directory}: the index names {file}, which is missing")
            return weight_map
        if not (self.directory / SINGLE).exists():
            raise ConfigError(
                f"model.hf: {self.directory}: neither {INDEX} nor {SINGLE}; give a safetensors checkpoint"
            )
        return dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"model.hf: {self.directory / file} can't be read: {error}") from None
        return self._open[file]

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        try:
            return self._handle(file).get_slice(name)
        except SafetensorError as error:
            raise ConfigError(
                f"model.hf: {self.directory}: {name} is not in {file}, where the index has it ({error}); "
                "copy the checkpoint again"
            ) from None

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The block of `shape` from offset `start` on, in the file's dtype, on the CPU."""
        return self._slice(name)[tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))]


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
