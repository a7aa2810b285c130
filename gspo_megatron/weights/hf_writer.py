"""A Hugging Face checkpoint written by one process or by many at once, each the tensors that it has.

All goes to a directory beside the target, which gets the target's name when it is whole and on disk: a half-written
checkpoint never has it, and one that was there before stays until then.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from gspo_megatron.weights.hf_files import INDEX, SINGLE, read_hf_config
from gspo_megatron.weights.partial import sync, take_name
from gspo_megatron.weights.prediction_layers import PredictionLayers, with_number
from gspo_megatron.weights.shard_file import ShardFile, ShardWriter, header_room, verify

SHARD_BYTES = 5 << 30
_HEADER_BYTES, _MOST_HEADER_BYTES = 64 << 10, 1 << 20
"""Room for a shard's header where the names are not known before, and at most; a shard that fills it ends there."""


_MODEL_FILES = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".py")
_MORE_TEMPLATES = "additional_chat_templates"
"""A folder for those beside chat_template.jinja (transformers, `utils/__init__.py`, CHAT_TEMPLATE_DIR)."""


class Writers(Protocol):
    """The processes that write together: a Mesh is one."""

    rank: int
    world_size: int

    def gather_objects(self, value: Any, what: str) -> list:
        """The values of all ranks by rank, on all of them."""


class Alone:
    """One process."""

    rank, world_size = 0, 1

    def gather_objects(self, value: Any, what: str) -> list:
        return [value]


class HFWriteError(OSError):
    """A checkpoint that could not be written, on all ranks, naming those where it failed."""


def write_hf_checkpoint(
    tensors: Iterable[tuple[str, Tensor]],
    directory: str | Path,
    reference: str | Path,
    shard_bytes: int = SHARD_BYTES,
    *,
    writers: Writers | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    verified: bool = False,
    durable: bool = True,
    prediction_layers: str = "as given",
) -> Path:
    """Write tensors as safetensors shards with config, generation config, tokenizer and template files of `reference`.

    Collective over `writers`, which share a file system: every rank hands in the tensors that it has, maybe none, in
    `tensors`, which it runs to the end even where it can't write, so that the others are not left waiting in it.
    config.json gets the dtype of most of what was written, by the key that it has. Memory: one tensor.

    `shapes`: all tensors of the checkpoint; less or more than these is refused. `verified`: every file is read back, by
    another rank than wrote it where there is one, and compared in names, shapes and checksums. `durable`: on disk, and
    not only in the page cache, when it gets its name. `prediction_layers`: `keep` adds those of `reference`
    (`prediction_layers.py`), `drop` has config.json say that there are none, and `as given` leaves both alone.

    Raises HFWriteError on all ranks where one fails, ValueError for a name that comes twice or tensors that are not
    those of `shapes`; nothing half-written stays.
    """
    writers = writers or Alone()
    target = Path(directory)
    partial = target.with_name(f".{target.name}.partial")
    config = read_hf_config(reference)
    if prediction_layers != "as given":
        carried = PredictionLayers(reference) if prediction_layers == "keep" else None
        config = with_number(config, carried.number if carried else 0)
        if carried:
            tensors = carried.added_to(tensors, writers.rank, writers.world_size)
            shapes = None if shapes is None else {**shapes, **carried.shapes}
    room = min(header_room(shapes), _MOST_HEADER_BYTES) if shapes is not None else _HEADER_BYTES
    agree = _Agreement(writers, target)
    try:
        with agree.on("making its directory"):
            if writers.rank == 0:
                _begin(target, partial)
        shards: list[ShardFile] = []
        with agree.on("its shards"):
            _write_shards(tensors, partial, f"rank{writers.rank}", shard_bytes, room, (verified, durable), shards)
        by_rank = writers.gather_objects(shards, "the shards that all ranks wrote")
        with agree.on("reading it back"):
            _check_names(by_rank, shapes)
            if verified:
                _read_back(by_rank, partial, writers)
        with agree.on("its index"):
            if writers.rank == 0:
                _name_shards([shard for shards in by_rank for shard in shards], partial)
                _copy_files(Path(reference), config, by_rank, partial)
                _finish(partial, target, durable)
    except BaseException:
        if writers.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


class _Agreement:
    """Has a step of the work fail on all ranks where it fails on one."""

    def __init__(self, writers: Writers, target: Path):
        self._writers, self._target = writers, target
        self._what, self._where = "", ""

    def on(self, what: str) -> "_Agreement":
        self._what = what
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, traceback) -> bool:
        if error is not None and not isinstance(error, (OSError, ValueError)):
            return False  # a collective that failed, an interrupt: no more collectives
        faults = self._writers.gather_objects(error and f"{error}", f"{self._what} of {self._target}")
        if error is not None and (isinstance(error, ValueError) or self._writers.world_size == 1):
            return False
        failed = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault is not None]
        if failed:
            raise HFWriteError(f"{self._target} can't be written ({self._what}): {'; '.join(failed)}") from error
        return True


def _begin(target: Path, partial: Path) -> None:
    """Also takes up where a writer was killed between the two renames of `_finish`."""
    old = _old(target)
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def remove_hf_checkpoint(directory: Path) -> None:
    """Its name goes first; what a killed process leaves, `remove_half_written` removes."""
    going = directory.with_name(f".{directory.name}.partial")
    take_name(directory, going)
    shutil.rmtree(going)


def remove_half_written(parent: Path, names: str = "*") -> None:
    """Remove what killed writers left of checkpoints with these names (a pattern), and give one its name back that lost
    it."""
    for path in parent.glob(f".{names}.old"):
        target = path.with_name(path.name.removeprefix(".").removesuffix(".old"))
        shutil.rmtree(path) if target.exists() else path.rename(target)
    for path in parent.glob(f".{names}.partial"):
        shutil.rmtree(path)


def _write_shards(
    tensors: Iterable[tuple[str, Tensor]], partial: Path, prefix: str, shard_bytes: int, room: int,
    options: tuple[bool, bool], shards: list[ShardFile],
) -> None:  # fmt: skip
    """Files `prefix`-N in `partial`, described in `shards`. Runs `tensors` to the end whatever happens to the files."""
    remaining: Iterator[tuple[str, Tensor]] = iter(tensors)
    checksums, durable = options
    writer: ShardWriter | None = None
    try:
        try:
            for name, tensor in remaining:
                if writer is not None and not writer.has_room(name, tensor, shard_bytes):
                    shards.append(writer.close(durable))
                    writer = None
                if writer is None:
                    path = partial / f"{prefix}-{len(shards)}.safetensors"
                    writer = ShardWriter(path, max(room, header_room([name])), checksums)
                if name in writer.shard.entries:
                    raise ValueError(f"{name} comes twice: one of the two would be lost")
                writer.add(name, tensor)
            if writer is not None:
                shards.append(writer.close(durable))
        except (OSError, ValueError):
            for _ in remaining:
                pass
            raise
    finally:
        if writer is not None:
            writer.abandon()


def _check_names(by_rank: list[list[ShardFile]], shapes: Mapping[str, tuple[int, ...]] | None) -> None:
    """Raises ValueError for names that come twice, are missing, or are not expected, and for other shapes."""
    found: dict[str, list[int]] = {}
    for shard in (shard for shards in by_rank for shard in shards):
        for name, entry in shard.entries.items():
            if name in found:
                raise ValueError(f"{name} comes twice: one of the two would be lost")
            found[name] = entry["shape"]
    if not found:
        raise ValueError("no tensors to write")
    if shapes is not None:
        missing, unknown = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
        if missing or unknown:
            raise ValueError(f"not the tensors of the model: missing {missing[:5]}, not expected {unknown[:5]}")
        for name, shape in shapes.items():
            if found[name] != list(shape):
                raise ValueError(f"{name} is {found[name]}, not {list(shape)}")


def _read_back(by_rank: list[list[ShardFile]], partial: Path, writers: Writers) -> None:
    far = (writers.rank + (writers.world_size + 1) // 2) % writers.world_size  # mostly of another node
    for shard in by_rank[far]:
        verify(partial, shard)


def _name_shards(shards: list[ShardFile], partial: Path) -> None:
    """Their names in the checkpoint and the index, from what was written. Raises OSError for a file that is not there,
    as where ranks do not share this file system, or has another size."""
    for shard in shards:
        path = partial / shard.name
        if not path.exists():
            raise OSError(f"{path} is not there, though a rank wrote it: all ranks must share this file system")
        if path.stat().st_size != shard.file_bytes:
            raise OSError(f"{path} has {path.stat().st_size} bytes, {shard.file_bytes} were written")
    if len(shards) == 1:
        (partial / shards[0].name).rename(partial / SINGLE)
        return
    weight_map = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (partial / shard.name).rename(partial / file)
        weight_map |= dict.fromkeys(shard.entries, file)
    total = sum(shard.data_bytes for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (partial / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _copy_files(reference: Path, config: dict[str, Any], by_rank: list[list[ShardFile]], partial: Path) -> None:
    num_elements: Counter[str] = Counter()
    for shard in (shard for shards in by_rank for shard in shards):
        num_elements.update(shard.num_elements)
    copy_model_files(reference, config, num_elements.most_common(1)[0][0], partial)


def copy_model_files(reference: Path, config: dict[str, Any], dtype: str, directory: Path) -> None:
    """config.json, which gets the `dtype` that most elements are in, and all small files of a checkpoint but indices:
    tokenizer, chat templates, and the code that some come with (Kimi-K2's tokenizer), which is not run here."""
    for file in sorted([*reference.iterdir(), *(reference / _MORE_TEMPLATES).glob("*.jinja")]):
        is_index = file.name.endswith(".index.json")  # of the reference's own weights
        if file.is_file() and file.suffix in _MODEL_FILES and not is_index:
            copy = directory / file.relative_to(reference)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    _write_config(config, dtype, directory / "config.json")


def _write_config(config: dict[str, Any], dtype: str, path: Path) -> None:
    """transformers and SGLang load a checkpoint in the dtype of its config.json, whatever its tensors are in. A copy of
    the reference's file that says all of it already stays as it is."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config = config | dict.fromkeys(keys, dtype)
    if config != read_hf_config(path.parent):
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _finish(partial: Path, target: Path, durable: bool) -> None:
    """Give the checkpoint its name; one that has it goes away then."""
    if durable:
        for path in [*(path for path in partial.rglob("*") if path.suffix != ".safetensors"), partial]:
            sync(path)
    if target.exists():
        shutil.rmtree(_old(target), ignore_errors=True)
        target.rename(_old(target))
    try:
        partial.rename(target)
    except OSError:
        if _old(target).exists():
            _old(target).rename(target)
        raise
    if durable:
        sync(target.parent)
    shutil.rmtree(_old(target), ignore_errors=True)
