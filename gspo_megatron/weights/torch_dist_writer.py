"""Writes `torch_dist` checkpoints chunk by chunk: what `torch.distributed.checkpoint` writes from a whole state
dict."""

import contextlib
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties,
    TensorStorageMetadata,
)  # fmt: skip

from gspo_megatron.weights.raw_files import OpenFiles
from gspo_megatron.weights.torch_dist_files import METADATA, Frames


class WrittenChunk(NamedTuple):
    """`start` None says that it is no tensor but an object's bytes."""

    key: str
    start: list[int] | None
    shape: list[int]
    offset: int
    length: int


class _Failsafe:
    """A file for torch.save, whose writer would abort the process at an exception from `write`."""

    def __init__(self, file: BinaryIO):
        self._file, self.error = file, None

    def write(self, data) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """torch.save flushes after every tensor; the file is flushed when it is finished."""


class ChunkWriter:
    """Appends contiguous tensors to files, each in the bytes that torch.save gives it.

    torch.save itself writes the first of a shape and type. What it puts before and after the elements is the same for
    the next ones, which take three writes so, in place of some forty. Checksums are left out: they would differ, take
    longer than writing, and no reader of torch's looks at them.
    """

    def __init__(self):
        self._frames: dict[tuple[tuple[int, ...], torch.dtype], tuple[bytes, bytes]] = {}

    def write(self, file: BinaryIO, data: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
        """(offset, length) in bytes. `data` are the tensor's bytes, uint8; `file` is open under its name. Raises
        OSError."""
        offset = file.tell()
        frame = self._frames.get((shape, dtype))
        if frame is None:
            with _without_checksums():
                self._frames[shape, dtype] = _save(file, data, shape, dtype)
            return offset, file.tell() - offset
        before, after = frame
        file.write(before)
        file.write(data.numpy())
        file.write(after)
        return offset, len(before) + len(data) + len(after)


def _save(file: BinaryIO, data: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What torch.save wrote before and after the elements, read from the file."""
    offset, safe = file.tell(), _Failsafe(file)
    alone = torch.from_numpy(data.numpy())  # torch.save takes whole storages
    torch.save(alone.view(dtype).view(shape), safe)
    if safe.error is not None:
        raise safe.error
    file.flush()
    length, frames = file.tell() - offset, Frames(OpenFiles())
    frames.data_start(Path(file.name), offset, length, shape, dtype)
    return frames.frame(length, shape, dtype)


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Inside, torch.save computes no CRC32."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def write_torch_dist_metadata(
    directory: Path,
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
    chunks: dict[str, Sequence[WrittenChunk]],
    objects: dict[str, tuple[str, WrittenChunk]],
    common: dict[str, Any],
) -> None:
    """Finish a checkpoint whose chunks are written.

    `shapes`: key -> shape and type of a global tensor. `chunks`: file -> what is in it. `objects`: key -> file and
    place of its bytes, which several may share. `common` is Megatron's part that is no tensor (common.pt).
    """
    entries: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        for key, (shape, dtype) in shapes.items()
    }
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file, written in chunks.items():
        for chunk in written:
            if chunk.start is None:
                continue
            start = torch.Size(chunk.start)
            entry = entries[chunk.key]
            storage[MetadataIndex(chunk.key, start, len(entry.chunks))] = _StorageInfo(file, chunk.offset, chunk.length)
            entry.chunks.append(ChunkStorageMetadata(start, torch.Size(chunk.shape)))
    for key, (file, chunk) in objects.items():
        entries[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(file, chunk.offset, chunk.length)
    metadata = Metadata(entries, storage_data=storage, storage_meta=StorageMeta(), version="1.0.0")
    torch.save(common, directory / "common.pt")
    # megatron-core 0.16.1 asks for all four, 0.19.2 for the first two
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backends |= {"common_backend": "torch", "common_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(backends))
    with (directory / METADATA).open("wb") as file:
        pickle.dump(metadata, file)
