"""What changed between two checkpoints of one model, in a file that turns the one into the other, bit for bit.

After an optimizer step most bf16 values are what they were: a small change of the fp32 master weight rarely crosses a
rounding border. Per tensor and chunk the file holds the gaps between changed elements and their differences, as
integers of the element's size, both deflated; or all elements, where that is smaller. CRC-32 checksums of each tensor
before and after tell a wrong base and a damaged file.

The file: deflated blobs, then a JSON header, then 16 bytes: the header's length, its CRC-32, and a mark.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from gspo_megatron.weights.hf_files import HFReader
from gspo_megatron.weights.hf_writer import write_hf_checkpoint

CHUNK_ELEMENTS = 1 << 24
DEFLATE_LEVEL = 1
_MARK = b"dlt1"
_TRAILER = struct.Struct("<QI4s")
_WORDS = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_SAME, _SPARSE, _WHOLE = "same", "sparse", "whole"


class DeltaError(ValueError):
    """A delta that is damaged, or of another checkpoint than the one that it is applied to."""


@dataclass(frozen=True)
class Delta:
    """`num_changed` of `num_elements` are others; `file_bytes` tell it, where the checkpoint has `tensor_bytes`."""

    num_elements: int
    num_changed: int
    tensor_bytes: int
    file_bytes: int


def write_delta(old: Path, new: Path, path: Path, versions: tuple[int, int]) -> Delta:
    """Write what turns the checkpoint `old` into `new`, of the weight `versions` (from, to).

    `path` gets its name when the file is whole. Memory: two tensors. Raises DeltaError where the two hold other
    tensors, OSError where it can't be written: nothing half-written stays.
    """
    before, after = HFReader(old), HFReader(new)
    if before.names != after.names:
        differing = sorted(before.names ^ after.names)[:5]
        raise DeltaError(f"{old} and {new} hold other tensors: {differing}")
    partial = path.with_name(f".{path.name}.partial")
    entries, changed, elements, total = {}, 0, 0, 0
    try:
        with partial.open("wb") as file:
            for name in sorted(after.names):
                one, other = _words(before, name), _words(after, name)
                if one.dtype != other.dtype or before.shape(name) != after.shape(name):
                    raise DeltaError(f"{name} has another dtype or shape in {old} than in {new}")
                chunks, number = _write_chunks(file, one, other)
                entries[name] = {"chunks": chunks, "before": zlib.crc32(one), "after": zlib.crc32(other)}
                changed, elements, total = changed + number, elements + one.size, total + other.nbytes
            header = json.dumps({"from": versions[0], "to": versions[1], "tensors": entries}).encode()
            file.write(header + _TRAILER.pack(len(header), zlib.crc32(header), _MARK))
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return Delta(elements, changed, total, path.stat().st_size)


def apply_delta(base: Path, path: Path, target: Path) -> Path:
    """Write the checkpoint `target` from `base` and a delta; it gets its name when it is whole.

    Raises DeltaError, naming the tensor, where the base is another one or the file is damaged.
    """
    reader = HFReader(base)
    with path.open("rb") as file:
        header = _read_header(file, path)
        if set(header["tensors"]) != reader.names:
            raise DeltaError(f"{path} is not of the model in {base}: it tells of other tensors")
        shapes = {name: reader.shape(name) for name in reader.names}
        return write_hf_checkpoint(
            _changed_tensors(reader, header["tensors"], file, path), target, base, shapes=shapes, durable=False
        )


def delta_versions(path: Path) -> tuple[int, int]:
    """(from, to) of a delta. Raises DeltaError where it is not whole."""
    with path.open("rb") as file:
        header = _read_header(file, path)
    return header["from"], header["to"]


def _words(reader: HFReader, name: str) -> np.ndarray:
    """[elements] of a tensor as unsigned integers of its items' size."""
    shape = reader.shape(name)
    tensor = reader.read(name, (0,) * len(shape), shape).reshape(-1)
    return tensor.view(torch.uint8).numpy().view(_WORDS[tensor.element_size()])


def _write_chunks(file: BinaryIO, old: np.ndarray, new: np.ndarray) -> tuple[list[list], int]:
    """[kind, offset, sizes of the blobs, dtype of the gaps], and how many elements changed."""
    chunks, changed = [], 0
    for start in range(0, old.size, CHUNK_ELEMENTS):
        one, other = old[start : start + CHUNK_ELEMENTS], new[start : start + CHUNK_ELEMENTS]
        places = np.flatnonzero(one != other)
        changed += places.size
        if not places.size:
            chunks.append([_SAME, 0, [], ""])
            continue
        gaps = np.diff(places, prepend=0)
        gaps = gaps.astype(next(words for size, words in _WORDS.items() if int(gaps.max()) < 1 << (8 * size)))
        # most differences are one step up or down, which deflates better than the new values
        differences = other[places] - one[places]
        blobs = [zlib.compress(part.tobytes(), DEFLATE_LEVEL) for part in (gaps, differences)]
        kind = _SPARSE
        if sum(map(len, blobs)) >= other.nbytes:
            kind, blobs = _WHOLE, [other.tobytes()]
        chunks.append([kind, file.tell(), [len(blob) for blob in blobs], gaps.dtype.str])
        for blob in blobs:
            file.write(blob)
    return chunks, changed


def _read_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size >= _TRAILER.size:
        file.seek(size - _TRAILER.size)
        length, checksum, mark = _TRAILER.unpack(file.read(_TRAILER.size))
        if mark == _MARK and length <= size - _TRAILER.size:
            file.seek(size - _TRAILER.size - length)
            text = file.read(length)
            if zlib.crc32(text) == checksum:
                return json.loads(text)
    raise DeltaError(f"{path} is no whole delta file; have the weights written in full")


def _changed_tensors(
    reader: HFReader, entries: dict[str, Any], file: BinaryIO, path: Path
) -> Iterator[tuple[str, Tensor]]:
    for name, entry in entries.items():
        words = _words(reader, name)
        if zlib.crc32(words) != entry["before"]:
            raise DeltaError(f"{name} in {reader.directory} is not what {path} starts from")
        words = words.copy()
        try:
            for number, chunk in enumerate(entry["chunks"]):
                start = number * CHUNK_ELEMENTS
                _apply_chunk(file, words[start : start + CHUNK_ELEMENTS], *chunk)
        except (zlib.error, ValueError, IndexError) as error:
            raise DeltaError(f"{path}: {name} is damaged ({error})") from error
        if zlib.crc32(words) != entry["after"]:
            raise DeltaError(f"{path}: {name} comes out other than it was sent")
        yield name, torch.from_numpy(words.view(np.uint8)).view(reader.dtype(name)).reshape(reader.shape(name))


def _apply_chunk(file: BinaryIO, words: np.ndarray, kind: str, offset: int, sizes: list[int], gap_type: str) -> None:
    if kind == _SAME:
        return
    file.seek(offset)
    blobs = [file.read(size) for size in sizes]
    if kind == _WHOLE:
        words[:] = np.frombuffer(blobs[0], words.dtype)
        return
    gaps, differences = (zlib.decompress(blob) for blob in blobs)
    places = np.cumsum(np.frombuffer(gaps, gap_type).astype(np.int64))
    words[places] += np.frombuffer(differences, words.dtype)
