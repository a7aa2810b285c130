"""Blocks of tensors that lie in files as plain bytes, read by `pread`: only what is asked for is in memory.

Files are not mapped: mapped pages count as the process's memory, and a file that shrinks would kill it by a signal.
"""

import os
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from pathlib import Path

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


@dataclass(frozen=True)
class RawTensor:
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
        assert all(
            0 <= low and low + size <= whole for low, size, whole in zip(start, out.shape, self.shape, strict=True)
        )
        if out.numel():
            _read(files.descriptor(self.path), self.path, self.offset, self.shape, self.dtype, tuple(start), out)


def _read(descriptor, path: Path, offset: int, shape, dtype: torch.dtype, start, out: Tensor) -> None:
    if out.dim() == 0:
        return _read(descriptor, path, offset, (1,), dtype, (0,), out.view(1))
    row_shape, row_bytes = shape[1:], prod(shape[1:]) * dtype.itemsize
    offset += start[0] * row_bytes
    whole_rows = tuple(out.shape[1:]) == tuple(row_shape)
    if whole_rows and out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous():
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
    view = memoryview(as_bytes(out))
    while view:
        number = os.preadv(descriptor, [view], offset)
        if not number:
            raise OSError(f"{path} ends at {offset} bytes, within a tensor: truncated while it was read")
        view, offset = view[number:], offset + number


def as_bytes(tensor: Tensor):
    """The bytes of a contiguous CPU tensor, as a numpy array that shares its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def torch_dtype_of(name: str, table: dict[str, torch.dtype], path: Path) -> torch.dtype:
    if name not in table:
        raise ValueError(
            f"{path} holds a tensor of type {name}, which is not supported; supported are {', '.join(table)}"
        )
    return table[name]
