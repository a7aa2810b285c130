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

from gspo_megatron.weights.torch_dist_files import METADATA


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


def write_chunk(file: BinaryIO, tensor: Tensor) -> tuple[int, int]:
    """Append a contiguous tensor, as torch.save writes it; (offset, length) in bytes. Raises OSError."""
    offset, safe = file.tell(), _Failsafe(file)
    torch.save(tensor, safe)
    if safe.error is not None:
        raise safe.error
    return offset, file.tell() - offset


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Inside, torch.save computes no CRC32, which would take longer than writing; no reader of torch's looks at it."""
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
