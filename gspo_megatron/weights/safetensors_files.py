"""The safetensors format (8 bytes with the length of a JSON header, the header, raw tensors), read and written by
pieces.

The library's own reader maps whole files, its writer wants all tensors of a file in memory; both fit a laptop's model.
"""

import json
import os
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gspo_megatron.weights.raw_files import RawTensor, as_bytes, torch_dtype_of
from gspo_megatron.weights.safetensors_header import read_header

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_safetensors_header(path: Path) -> dict[str, RawTensor]:
    """Name -> where its bytes are. Raises ValueError for a file that is no safetensors file, or cut off; OSError."""
    header, base = read_header(path)
    try:
        return {name: _raw_tensor(path, base, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"its header can't be read ({error})") from None


def _raw_tensor(path: Path, base: int, entry: dict[str, Any]) -> RawTensor:
    low, high = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), _DTYPES.get(entry["dtype"]) or torch_dtype_of(entry["dtype"], _DTYPES, path)
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError(f"a size of {size!r}")
    num_bytes = prod(shape) * dtype.itemsize
    if high - low != num_bytes:
        raise ValueError(f"{high - low} bytes for a tensor of {num_bytes}")
    return RawTensor(path, base + low, shape, dtype)


def write_safetensors_header(file: BinaryIO, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Begin a file of these tensors (name -> dtype, shape), whose bytes are to follow in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)


def write_pieces(file: BinaryIO, pieces: Iterable[Tensor]) -> None:
    """Append the bytes of contiguous CPU tensors."""
    for piece in pieces:
        file.write(as_bytes(piece))


def sync_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
