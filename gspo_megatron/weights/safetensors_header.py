"""The header of a safetensors file, without torch: 8 bytes with its length, then JSON; the tensors lie behind it in any
order, without gaps.

Format: https://github.com/huggingface/safetensors.
"""

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """(name -> its entry, the byte of the file at which `data_offsets` begin to count).

    Raises ValueError for what is no safetensors file, is cut off or too long, or has tensors that come twice, overlap
    or leave gaps; OSError. What an entry says of type and shape is not looked at.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"no safetensors file, or cut off in its header ({size} bytes)")
        text = file.read(length)
    base = 8 + length
    try:
        header = json.loads(text, object_pairs_hook=_once_each)
        header.pop("__metadata__", None)
        places = sorted((*_offsets(entry), name) for name, entry in header.items())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its header can't be read ({error})") from None
    end = base
    for low, high, name in places:
        if base + low != end:
            raise ValueError(
                f"tensors that overlap, or gaps between them: {name} begins at byte {base + low}, not at {end}, where "
                "the tensor before it ends"
            )
        end = base + high
    if size != end:
        state = "truncated" if size < end else "too long"
        raise ValueError(f"{state}: {size} bytes, its header tells of {end}")
    return header, base


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; Python's own reader takes the last of two entries of one name without a word."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]} comes twice")
    return values


def _offsets(entry: dict[str, Any]) -> tuple[int, int]:
    low, high = entry["data_offsets"]
    if type(low) is not int or type(high) is not int or not 0 <= low <= high:
        raise ValueError(f"data_offsets of {entry['data_offsets']}")
    return low, high
