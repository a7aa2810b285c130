"""Blocks of tensors that lie in files as plain bytes, read by `pread`: only what is asked for is in memory.

Files are not mapped: mapped pages count as the process's memory, and a file that shrinks would kill it by a signal.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 8 << 20
"""What is read in one go where bytes can't go straight to where they belong; bounds the memory of a read."""
_MAX_OPEN = 64


class OpenFiles:
    """Descriptors of the files read last; reading is at absolute positions, so that order does not matter."""

    def __init__(self):
        self._descriptors: OrderedDict[Path, int] = OrderedDict()

    def descriptor(self, path: Path) -> int:
        """Raises OSError where the file can't be opened."""
        if path in self._descriptors:
            self._descriptors.move_to_end(path)
            return self._descriptors[path]
        if len(self._descriptors) >= _MAX_OPEN:
            os.close(self._descriptors.popitem(last=False)[1])
        self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __del__(self):
        self.close()


class Scratch:
    """Memory for one tensor after the other, which spares a page fault for every 4 KiB of new memory."""

    def __init__(self):
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def bytes(self, number: int) -> Tensor:
        """uint8 [number], uninitialised; good until the next call."""
        if len(self._bytes) < number:
            self._bytes = torch.empty(number, dtype=torch.uint8)
        return self._bytes[:number]


class RawTensor(NamedTuple):
    """A tensor whose elements lie one after the other (C order, little endian) from byte `offset` of `path` on."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read_into(self, files: OpenFiles, start: tuple[int, ...], out: Tensor) -> None:
        """Copy the block from offsets `start` on into `out`, whose shape says its size; values are cast to its dtype.

        Raises OSError where the file ends before.
        """
        assert len(start) == out.dim() == len(self.shape)
        for low, size, whole in zip(start, out.shape, self.shape, strict=True):
            assert 0 <= low and low + size <= whole, f"{start} and {tuple(out.shape)} are not within {self.shape}"
        if out.numel():
            _read(files.descriptor(self.path), self.path, self.offset, self.shape, self.dtype, start, out)

    def extent(self, start: Sequence[int], shape: Sequence[int]) -> tuple[int, int] | None:
        """(offset in the file, number) of the bytes of a block of whole rows; None for another block."""
        if any(start[1:]) or tuple(shape[1:]) != self.shape[1:]:
            return None
        row = prod(self.shape[1:]) * self.dtype.itemsize
        return self.offset + start[0] * row, shape[0] * row


def _read(descriptor: int, path: Path, offset: int, shape, dtype: torch.dtype, start, out: Tensor) -> None:
    if out.dim() == 0:
        return _read(descriptor, path, offset, (1,), dtype, (0,), out.view(1))
    row_shape = shape[1:]
    row_bytes = prod(row_shape) * dtype.itemsize
    offset += start[0] * row_bytes
    if out.dtype == dtype and out.shape[1:] == row_shape and out.device.type == "cpu" and out.is_contiguous():
        return read_bytes(descriptor, path, offset, out)
    if row_bytes > PIECE_BYTES:
        for row in range(out.shape[0]):
            _read(descriptor, path, offset + row * row_bytes, row_shape, dtype, start[1:], out[row])
        return None
    columns = tuple(slice(low, low + size) for low, size in zip(start[1:], out.shape[1:], strict=True))
    step = max(1, PIECE_BYTES // row_bytes)
    buffer = torch.empty((min(step, out.shape[0]), *row_shape), dtype=dtype)
    for low in range(0, out.shape[0], step):
        rows = buffer[: min(step, out.shape[0] - low)]
        read_bytes(descriptor, path, offset + low * row_bytes, rows)
        out[low : low + step].copy_(rows[(slice(None), *columns)])
    return None


def read_bytes(descriptor: int, path: Path, offset: int, out: Tensor) -> None:
    """Fill a contiguous CPU tensor with the bytes from `offset` on."""
    fill(descriptor, path, offset, as_bytes(out))


def fill(descriptor: int, path: Path, offset: int, data) -> None:
    """Fill a numpy array of bytes. Raises OSError where the file ends before."""
    number = os.preadv(descriptor, [data], offset)
    while number < len(data):  # the system reads at most 2 GiB at once
        more = os.preadv(descriptor, [data[number:]], offset + number)
        if not more:
            raise OSError(f"{path} ends at {offset + number} bytes, within a tensor: truncated while it was read")
        number += more


def as_bytes(tensor: Tensor):
    """The bytes of a contiguous CPU tensor, as a numpy array that shares its memory."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def torch_dtype_of(name: str, table: dict[str, torch.dtype], path: Path) -> torch.dtype:
    if name not in table:
        raise ValueError(
            f"{path} holds a tensor of type {name}, which is not supported; supported are {', '.join(table)}"
        )
    return table[name]
