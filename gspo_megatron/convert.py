"""What both conversions share: the ranks that do it, the progress bar, the verification, the command line's end."""

import contextlib
import datetime
import gc
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.config import ConfigError
from gspo_megatron.weights.families import FAMILIES, Family, unsupported
from gspo_megatron.weights.hf_files import read_hf_config
from gspo_megatron.weights.partial import PartialDirectory
from gspo_megatron.weights.plan import hf_dtypes
from gspo_megatron.weights.raw_files import PIECE_BYTES, as_bytes
from gspo_megatron.weights.rules import ModelShape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TIMEOUT_S = 3600.0
"""Bound on waiting for another rank's files."""
REFUSED = 2
"""Exit status of a conversion that was refused or could not be done."""


class Reader(Protocol):
    """What gives blocks of HF tensors: `HFReader`, `MegatronReader`."""

    @property
    def names(self) -> Set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def read_into(self, name: str, start: tuple[int, ...], out: Tensor) -> None: ...


@dataclass(frozen=True)
class Ranks:
    """The processes that share a conversion: one, or those that torchrun started."""

    rank: int = 0
    size: int = 1

    @classmethod
    @contextlib.contextmanager
    def join(cls) -> Iterator["Ranks"]:
        """By torchrun's environment, over gloo; alone without it."""
        if "RANK" not in os.environ:
            yield cls()
            return
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
        try:
            yield cls(dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()

    def share(self, things: Sequence) -> Sequence:
        """Those of this rank, one in turn for each."""
        return things[self.rank :: self.size]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def read_family(directory: Path, option: str) -> tuple[dict[str, Any], Family, ModelShape]:
    """config.json, the family it names, and its sizes. Raises ConfigError naming the command line's `option`."""
    try:
        hf = read_hf_config(directory)
    except ConfigError as error:
        raise renamed(error, option) from None
    architecture = (hf.get("architectures") or ["(none)"])[0]
    if architecture not in FAMILIES:
        raise ConfigError(f"{option}: {directory}: {unsupported(architecture)}")
    try:
        return hf, FAMILIES[architecture], ModelShape.from_hf(hf)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{option}: {directory}/config.json lacks or misspells a size ({error})") from None


def renamed(error: ConfigError, option: str) -> ConfigError:
    """The same faults under the command line's name."""
    return ConfigError([fault.replace("model.hf: ", f"{option}: ", 1) for fault in error.faults])


def output_dtypes(reader: Reader, family: Family, shape: ModelShape, dtype: str | None) -> dict[str, torch.dtype]:
    """HF name -> type to write, in the family's order: the source's, or `dtype` for those of the type that most
    elements have. What a model keeps in fp32 beside bf16 (an expert bias, say) stays as it is, whatever the cast.

    Raises ConfigError for types that are not supported.
    """
    kept = hf_dtypes(family, shape, "", "fp32")
    found = {name: reader.dtype(name) for name in kept}
    for name, kind in found.items():
        if kind not in DTYPES.values():
            raise ConfigError(f"{name} is {kind}: quantized checkpoints are not supported; give one in {list(DTYPES)}")
    if dtype is None:
        return found
    main = most_common(reader, found)
    return {name: DTYPES[dtype] if kind == main and not kept[name] else kind for name, kind in found.items()}


def most_common(reader: Reader, dtypes: dict[str, torch.dtype]) -> torch.dtype:
    """The type of most elements."""
    elements: Counter[torch.dtype] = Counter()
    for name, dtype in dtypes.items():
        elements[dtype] += prod(reader.shape(name))
    return elements.most_common(1)[0][0]


def pieces(reader: Reader, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor in `dtype` by rows of at most PIECE_BYTES, each in the same buffer."""
    shape = reader.shape(name)
    rows = max(1, PIECE_BYTES // max(1, prod(shape[1:]) * dtype.itemsize)) if shape else 1
    buffer = torch.empty((min(rows, shape[0]), *shape[1:]) if shape else (), dtype=dtype)
    for low in range(0, shape[0], rows) if shape else (0,):
        piece = buffer[: min(rows, shape[0] - low)] if shape else buffer
        reader.read_into(name, (low,) + (0,) * (len(shape) - 1) if shape else (), piece)
        refuse_infinite(reader, name, piece)
        yield piece


def refuse_infinite(reader: Reader, name: str, piece: Tensor) -> None:
    """Raises ConfigError where a cast to fp16, whose largest number is 65504, made a value of this tensor infinite."""
    if piece.dtype == torch.float16 != reader.dtype(name) and not torch.isfinite(piece).all():
        raise ConfigError(
            f"--dtype fp16: {name} has values beyond {torch.finfo(torch.float16).max:g}, or that are no numbers; give bf16"
        )


def tensor_hash(reader: Reader, name: str, dtype: torch.dtype) -> str:
    digest = hashlib.sha256()
    for piece in pieces(reader, name, dtype):
        digest.update(as_bytes(piece))
    return digest.hexdigest()


def verify(
    source: Reader, written: Reader, dtypes: dict[str, torch.dtype], names: Sequence[str], advance: Callable
) -> None:
    """Raises ConfigError where a tensor that was written is not the source's, in the type it is to have."""
    for name in names:
        if written.dtype(name) != dtypes[name]:
            raise ConfigError(f"--verify: {name} is {written.dtype(name)} in what was written, not {dtypes[name]}")
        if tensor_hash(source, name, dtypes[name]) != tensor_hash(written, name, dtypes[name]):
            raise ConfigError(f"--verify: {name} is not in what was written as it was in the source; nothing is kept")
        advance(prod(source.shape(name)) * dtypes[name].itemsize)


@contextlib.contextmanager
def progress(what: str, num_bytes: int, ranks: Ranks) -> Iterator[Callable[[int], None]]:
    """A bar over bytes on rank 0, of its own share; yields what takes the bytes done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    if ranks.rank:
        yield lambda number: None
        return
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        label = what if ranks.size == 1 else f"{what} (rank 0 of {ranks.size})"
        task = bar.add_task(label, total=num_bytes)
        yield lambda number: bar.advance(task, number)


def run_tool(convert: Callable[[], str]) -> int:
    """The exit status: 0 after `convert`, whose answer rank 0 prints; 2 after an error of the user's."""
    gc.freeze()  # else every full collection walks a million objects that the imports left, a quarter of a second
    first = os.environ.get("RANK", "0") == "0"
    try:
        answer = convert()
    except ConfigError as error:
        for fault in error.faults:
            where = "" if first else f"rank {os.environ['RANK']}: "
            print(f"error: {where}{fault}", file=sys.stderr)
        return REFUSED
    if first:
        print(answer)
    return 0


def with_fault(description: str, partial: PartialDirectory) -> str:
    """What a dry run says, and why the same command without it would be refused."""
    fault = partial.target_fault()
    return f"{description}\n  refused: {fault}" if fault else description


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
