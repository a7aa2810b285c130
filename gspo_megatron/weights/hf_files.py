"""Hugging Face checkpoint directories, read: JSON files and slices of tensors. `hf_writer.py` writes them."""

import json
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.config import ConfigError
from gspo_megatron.weights.raw_files import OpenFiles, RawTensor, fill
from gspo_megatron.weights.safetensors_files import read_safetensors_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = (".bin", ".pt", ".pth")
"""How files of weights end that loading would run code from."""


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises ConfigError naming `model.hf` where it is missing or no JSON object."""
    return read_json(Path(directory) / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's file. Raises ConfigError naming `model.hf`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model.hf: {path.parent} has no {path.name}; give a Hugging Face checkpoint") from None
    except OSError as error:
        raise ConfigError(f"model.hf: {path} can't be read ({error.strerror}); give a readable checkpoint") from None
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
            pickles = sorted(path.name for path in self.directory.glob("*") if path.suffix in PICKLES)
            refused = f"; {pickles[0]} is a pickle, which is never loaded: convert it to safetensors" if pickles else ""
            raise ConfigError(
                f"model.hf: {self.directory}: neither {INDEX} nor {SINGLE}; give a safetensors checkpoint{refused}"
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
    def names(self) -> Set[str]:
        return self._file_of.keys()

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

    def read_rows(self, name: str, start: Sequence[int], shape: Sequence[int], dtype: torch.dtype, out) -> bool:
        """Read a block's bytes into a numpy array of bytes, if it consists of whole rows in this dtype; else False."""
        tensor = self._tensor(name)
        extent = tensor.extent(start, shape) if tensor.dtype == dtype and shape else None
        if extent is None:
            return False
        offset, number = extent
        assert number == len(out), f"{name}: {number} bytes for {len(out)}"
        try:
            fill(self._files.descriptor(tensor.path), tensor.path, offset, out)
        except OSError as error:
            raise ConfigError(f"model.hf: {self.directory}: {name} can't be read: {error}") from None
        return True

    def read_slices(self, name: str, slices: tuple[int | slice, ...]) -> Tensor:
        """`tensor[slices]` in the file's dtype, on the CPU; between the steps of a slice all is read."""
        bounds = [(s, s + 1) if isinstance(s, int) else (s.start, s.stop) for s in slices]
        inside = tuple(0 if isinstance(s, int) else slice(None, None, s.step) for s in slices)
        start, shape = tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds)
        return self.read(name, start, shape)[inside]


def torch_dtype(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
