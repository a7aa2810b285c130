"""One safetensors file written tensor by tensor, and read back to see that it holds what was written.

Format: https://github.com/huggingface/safetensors: 8 bytes length of the header, the header in JSON, which may
end in spaces, then the tensors without a gap. Readers view a tensor's bytes in its dtype, so that each must start at a
multiple of its item size.
"""

import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""torch's dtypes by their names in the format."""

_EMPTY_HEADER = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
_ENTRY = 128
"""Bytes of a header's entry beside the tensor's name: enough for 4 dimensions of 8 digits and offsets of 15."""
_READ_BYTES = 8 << 20


@dataclass
class ShardFile:
    """What is in a file: header entries as in the format, in the order of the bytes, and a CRC-32 of each tensor."""

    name: str
    entries: dict[str, dict] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    """Empty where none were asked for."""
    header_bytes: int = 0
    num_elements: dict[str, int] = field(default_factory=dict)
    """By dtype, as torch calls it (`bfloat16`)."""

    @property
    def data_bytes(self) -> int:
        return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in self.entries.values())

    @property
    def file_bytes(self) -> int:
        return 8 + self.header_bytes + self.data_bytes


class ShardWriter:
    """Tensors go to the file as they come: no more than one is held, on the CPU.

    The header's room, `header_bytes`, is set aside before the first tensor; see `has_room`.
    """

    def __init__(self, path: Path, header_bytes: int, checksums: bool):
        self.shard = ShardFile(path.name, header_bytes=-(-header_bytes // 8) * 8)
        self._checksums, self._offset = checksums, 0
        self._header_used = len(_encoded(_EMPTY_HEADER))
        self._file = path.open("wb", buffering=0)
        self._file.seek(8 + self.shard.header_bytes)

    def has_room(self, name: str, tensor: Tensor, shard_bytes: int) -> bool:
        """Whether the tensor can be added: within `shard_bytes` and the header's room, at a place that its dtype
        allows; always, to an empty file."""
        if not self.shard.entries:
            return True
        in_header = self._header_used + len(_encoded({name: self._entry(tensor)})) <= self.shard.header_bytes
        return in_header and self._offset + tensor.nbytes <= shard_bytes and self._offset % tensor.itemsize == 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Raises OSError where it can't be written, ValueError for a dtype that the format has not."""
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: safetensors has no {tensor.dtype}; it has {', '.join(map(str, DTYPES))}")
        entry, dtype = self._entry(tensor), str(tensor.dtype).removeprefix("torch.")
        data = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        _write_all(self._file, data)
        self._offset += len(data)
        self._header_used += len(_encoded({name: entry}))
        self.shard.entries[name] = entry
        self.shard.num_elements[dtype] = self.shard.num_elements.get(dtype, 0) + tensor.numel()
        if self._checksums:
            self.shard.checksums[name] = zlib.crc32(data)

    def _entry(self, tensor: Tensor) -> dict:
        offsets = [self._offset, self._offset + tensor.nbytes]
        return {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}

    def close(self, durable: bool) -> ShardFile:
        """Write the header; with `durable` the file is on disk when this returns."""
        header, room = _encoded(_EMPTY_HEADER | self.shard.entries), self.shard.header_bytes
        assert len(header) <= room, f"{self.shard.name}: a header of {len(header)} bytes in {room}"
        self._file.seek(0)
        _write_all(self._file, memoryview(room.to_bytes(8, "little") + header.ljust(room)))
        if durable:
            os.fsync(self._file.fileno())
        self._file.close()
        return self.shard

    def abandon(self) -> None:
        self._file.close()


def header_room(names: Iterable[str]) -> int:
    """Bytes that suffice for a header of these tensors."""
    return len(_encoded(_EMPTY_HEADER)) + sum(len(json.dumps(name)) + _ENTRY for name in names)


def verify(directory: Path, shard: ShardFile) -> None:
    """Read a file back, no more than 8 MiB of it at a time.

    Raises OSError, naming file and tensor, where it is not what was written: names, dtypes, shapes, sizes, checksums.
    """
    path = directory / shard.name
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size != shard.file_bytes:
            raise OSError(f"{path} has {size} bytes, {shard.file_bytes} were written")
        length = int.from_bytes(_read(file, 8), "little")
        header = json.loads(_read(file, length)) if length == shard.header_bytes else {}
        header.pop("__metadata__", None)
        if header != shard.entries:
            raise OSError(f"{path}: its header is not the one that was written")
        for name, entry in shard.entries.items():
            left, checksum = entry["data_offsets"][1] - entry["data_offsets"][0], 0
            while left:
                data = _read(file, min(left, _READ_BYTES))
                left, checksum = left - len(data), zlib.crc32(data, checksum)
            if checksum != shard.checksums[name]:
                raise OSError(f"{path}: {name} reads back with another checksum than was written")


def _read(file, number: int) -> bytes:
    data = file.read(number)
    if len(data) != number:
        raise OSError(f"{file.name} ended while it was read")
    return data


def _write_all(file, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _encoded(header: dict) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()
