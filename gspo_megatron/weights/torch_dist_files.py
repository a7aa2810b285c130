"""Megatron's `torch_dist` checkpoints (PyTorch's distributed checkpoint format) read by pieces, without unpickling
code.

    .metadata      a pickle: global tensors (name, shape, type), the chunks they are cut into, and where each chunk lies
    __0_0.distcp   chunks one after the other, each as torch.save writes a tensor: a zip archive, its members stored

Both pickles are read by unpicklers that know a short list of classes and refuse everything else.
"""

import io
import os
import pickle
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_megatron.weights.raw_files import OpenFiles, RawTensor

METADATA = ".metadata"
_MOST_FRAME_BYTES = 64 << 10
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"} | {str(d)[len("torch.") :] for d in vars(torch).values() if isinstance(d, torch.dtype)},
    "collections": {"OrderedDict", "defaultdict"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs; not loaded")
        return super().find_class(module, name)


class Chunk(NamedTuple):
    """A rectangle of a global tensor, and the bytes in which it lies as torch.save wrote it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


class StoredTensor:
    """One global tensor of a checkpoint."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, chunks: list[Chunk]):
        self.shape, self.dtype = shape, dtype
        # Leading axes along which every chunk has one element (layers, experts) serve to find chunks quickly.
        widths = [max(sizes) for sizes in zip(*(chunk.shape for chunk in chunks), strict=True)]
        self._lead = next((axis for axis, width in enumerate(widths) if width != 1), len(widths))
        self._chunks: dict[tuple[int, ...], list[Chunk]] = defaultdict(list)
        for chunk in chunks:
            self._chunks[chunk.start[: self._lead]].append(chunk)

    def chunks(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Chunk]:
        """Those that may share an element with this block."""
        ranges = [range(low, low + size) for low, size in zip(start[: self._lead], shape[: self._lead], strict=True)]
        for place in product(*ranges):
            yield from self._chunks.get(place, ())


class TorchDistReader:
    """Blocks of global tensors by key. Raises ValueError for a directory that is no such checkpoint, or a broken
    one."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._files = OpenFiles()
        self._frames = Frames(self._files)
        self._located: dict[Chunk, RawTensor] = {}
        self.tensors = _read_metadata(self.directory)
        files = {
            chunk.file for tensor in self.tensors.values() for chunks in tensor._chunks.values() for chunk in chunks
        }
        self._sizes = {}
        for file in sorted(files):
            if Path(file).name != file or not (self.directory / file).is_file():
                raise ValueError(f"{self.directory}: {METADATA} names {file}, which is missing")
            self._sizes[file] = (self.directory / file).stat().st_size
        for key, tensor in self.tensors.items():
            for chunks in tensor._chunks.values():
                for chunk in chunks:
                    if chunk.offset + chunk.length > self._sizes[chunk.file]:
                        raise ValueError(
                            f"{self.directory / chunk.file} is truncated: {self._sizes[chunk.file]} bytes, {key} "
                            f"ends at {chunk.offset + chunk.length}"
                        )

    def read_into(self, key: str, start: tuple[int, ...], out: Tensor) -> None:
        """Copy the block of `out`'s shape from offset `start` on, cast to `out`'s dtype. Raises ValueError or OSError
        where the chunks do not hold it whole."""
        tensor, filled = self.tensors[key], 0
        for chunk in tensor.chunks(start, tuple(out.shape)):
            low = [max(a, b) for a, b in zip(start, chunk.start, strict=True)]
            high = [
                min(a + m, b + n)
                for a, m, b, n in zip(start, out.shape, chunk.start, chunk.shape, strict=True)
            ]  # fmt: skip
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            view = out[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))]
            inside = tuple(a - b for a, b in zip(low, chunk.start, strict=True))
            self._locate(key, chunk, tensor.dtype).read_into(self._files, inside, view)
            filled += view.numel()
        if filled != out.numel():
            raise ValueError(f"{self.directory}: {filled} of {out.numel()} elements of a block of {key} are there")

    def _locate(self, key: str, chunk: Chunk, dtype: torch.dtype) -> RawTensor:
        found = self._located.get(chunk)
        if found is None:
            path = self.directory / chunk.file
            try:
                start = self._frames.data_start(path, chunk.offset, chunk.length, chunk.shape, dtype)
            except ValueError as error:
                raise ValueError(f"{path}: {key} at byte {chunk.offset} can't be read ({error})") from None
            if len(self._located) > 4096:
                self._located.clear()
            found = self._located[chunk] = RawTensor(path, chunk.offset + start, chunk.shape, dtype)
        return found


class Frames:
    """What torch.save puts before and after the elements of a tensor.

    Tensors of one shape and type that were written without checksums have the same: it is read as a zip archive for the
    first of them, and compared for the others.
    """

    def __init__(self, files: OpenFiles):
        self._files = files
        self._known: dict[tuple, tuple[bytes, bytes] | None] = {}
        """None for a kind of tensor whose frames differ."""

    def data_start(self, path: Path, offset: int, length: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Where the elements begin in the `length` bytes from `offset` on. Raises ValueError for anything but one
        contiguous tensor of this shape and type, stored as it is; OSError."""
        kind, num_bytes = (length, shape, dtype), prod(shape) * dtype.itemsize
        known = self._known.get(kind)
        if known is not None:
            before, after = known
            if self._read(path, offset, len(before)) == before:
                if self._read(path, offset + length - len(after), len(after)) == after:
                    return len(before)
            self._known[kind] = None
        window = io.BufferedReader(_Window(self._files, path, offset, length), 4096)
        try:
            start = _find_data(window, shape, dtype)
        except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, EOFError, TypeError, IndexError) as error:
            raise ValueError(str(error)) from None
        end = start + num_bytes
        if kind not in self._known and length - num_bytes <= _MOST_FRAME_BYTES:
            self._known[kind] = (self._read(path, offset, start), self._read(path, offset + end, length - end))
        return start

    def frame(self, length: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
        """(before, after) of such a tensor, which `data_start` found."""
        return self._known[length, shape, dtype]

    def _read(self, path: Path, offset: int, number: int) -> bytes:
        return os.pread(self._files.descriptor(path), number, offset)


def _read_metadata(directory: Path) -> dict[str, StoredTensor]:
    path = directory / METADATA
    if not path.is_file():
        raise ValueError(f"{directory} has no {METADATA}: no torch_dist checkpoint")
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        places: dict[str, list[Chunk]] = defaultdict(list)
        sizes = {
            (key, tuple(chunk.offsets)): tuple(chunk.sizes)
            for key, entry in metadata.state_dict_metadata.items()
            for chunk in getattr(entry, "chunks", ())
        }
        for index, info in metadata.storage_data.items():
            if index.offset is None:
                continue
            if getattr(info, "transform_descriptors", None):
                raise ValueError(f"{index.fqn} is stored as {info.transform_descriptors}, which is not supported")
            start = tuple(index.offset)
            chunk = Chunk(start, sizes[index.fqn, start], info.relative_path, info.offset, info.length)
            places[index.fqn].append(chunk)
        return {
            key: StoredTensor(tuple(entry.size), entry.properties.dtype, places[key])
            for key, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }
    except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} can't be read ({error})") from None


class _Window(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, files: OpenFiles, path: Path, offset: int, length: int):
        self._descriptor, self._offset, self._length, self._at = files.descriptor(path), offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        number = os.preadv(self._descriptor, [view], self._offset + self._at) if view else 0
        self._at += number
        return number


def _find_data(window: io.BufferedReader, expected: tuple[int, ...], dtype: torch.dtype) -> int:
    """Where in the archive the elements begin. Raises ValueError for anything but one contiguous tensor."""
    with zipfile.ZipFile(window) as archive:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
    description = _content(window, members["data.pkl"])
    offset, shape, stride, storage = _TensorUnpickler(io.BytesIO(description)).load()
    if "byteorder" in members and _content(window, members["byteorder"]) != b"little":
        raise ValueError("a chunk is big-endian")
    member = members[f"data/{storage[1]}"]
    contiguous = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if any(a != b for a, b, size in zip(stride, contiguous, shape, strict=True) if size > 1):
        raise ValueError(f"a chunk is stored with strides {stride}, which is not supported")
    if shape != expected or storage[0] != dtype:
        raise ValueError(f"a chunk holds {storage[0]} {shape}, not {dtype} {expected}")
    if member.file_size < (offset + prod(shape)) * dtype.itemsize:
        raise ValueError("a chunk is cut off")
    return _start(window, member) + offset * dtype.itemsize


def _content(window: io.BufferedReader, member: zipfile.ZipInfo) -> bytes:
    """Without zipfile's look at the checksum, which torch.save may leave out."""
    window.seek(_start(window, member))
    return window.read(member.file_size)


def _start(window: io.BufferedReader, member: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin: after its local header, whose last fields are the lengths of a name and an
    extra."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError("a chunk is compressed, which is not supported")
    window.seek(member.header_offset + 26)
    lengths = window.read(4)
    return member.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


class _TensorUnpickler(pickle.Unpickler):
    """What torch.save wrote of one tensor -> (storage offset, shape, stride, (dtype, name of the storage))."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, stride, *_: (offset, tuple(shape), tuple(stride), storage)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensor needs; not loaded")

    def persistent_load(self, saved: Any) -> Any:
        return saved[1], saved[2]


_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
