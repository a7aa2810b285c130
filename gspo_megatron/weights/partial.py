"""A directory that is written file by file beside its target, goes on after an interruption, and is renamed when whole.

    .NAME.partial/source.json       what is converted and how; a start that says otherwise begins anew
    .NAME.partial/FILE              finished files
    .NAME.partial/FILE.done.json    written after FILE: its size, and what its writer wants to know of it later
    .NAME.partial/FILE.writing      a file under way

A start that goes on removes what is not finished.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from gspo_megatron.config import ConfigError

SOURCE, DONE, WRITING = "source.json", ".done.json", ".writing"
_BUFFER_BYTES = 1 << 20


class PartialDirectory:
    """All ranks of a conversion share one; rank 0 alone calls `begin` and `finish`."""

    def __init__(self, target: Path, option: str):
        """`option` is the command line's name of `target`, for messages."""
        self.target, self._option = target, option
        self.path = target.parent / f".{target.name}.partial"

    def refuse_target(self, overwrite: bool) -> None:
        """Raises ConfigError where the target is there, or can't be made."""
        parent = self.target.parent
        if self.target.exists() and not overwrite and (not self.target.is_dir() or any(self.target.iterdir())):
            raise ConfigError(f"{self._option}: {self.target} exists; remove it, give another, or add --overwrite")
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
            raise ConfigError(f"{self._option}: {self.target} can't be made: {parent} is not a directory to write into")

    def begin(self, source: dict[str, Any]) -> int:
        """Make the directory, or take up one of the same source; how many files are finished."""
        with self.failures_named():
            if self.path.exists() and _read_json(self.path / SOURCE) != source:
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            done = [file.name.removesuffix(DONE) for file in self.path.glob(f"*{DONE}")]
            finished = [name for name in done if self.finished(name) is not None]
            kept = {*finished, *(f"{name}{DONE}" for name in finished)}
            for file in self.path.iterdir():
                if file.name not in kept:
                    remove(file)
            _write_json(self.path / SOURCE, source)
        return len(finished)

    def finished(self, name: str) -> dict[str, Any] | None:
        """What the writer of this file said of it; None where it is not finished."""
        values = _read_json(self.path / f"{name}{DONE}")
        file = self.path / name
        if values is None or not file.is_file() or file.stat().st_size != values["size"]:
            return None
        return values["said"]

    def write(self, name: str, writer: Callable[[BinaryIO], Any]) -> None:
        """Have `writer` write a file and keep what it returns (JSON values). It is on disk when this returns.

        Raises ConfigError where it can't be written; nothing half-written stays then.
        """
        temporary = self.path / f"{name}{WRITING}"
        with self.failures_named():
            try:
                with temporary.open("wb", buffering=_BUFFER_BYTES) as file:
                    said = writer(file)
                    file.flush()
                    os.fsync(file.fileno())
                    size = file.tell()
                temporary.rename(self.path / name)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _write_json(self.path / f"{name}{DONE}", {"size": size, "said": said})

    def finish(self) -> None:
        """Remove the notes, and give the directory its name; what had the name before goes then, not earlier."""
        with self.failures_named():
            for file in [*self.path.glob(f"*{DONE}"), self.path / SOURCE]:
                file.unlink()
            for file in self.path.rglob("*"):
                sync(file)
            old = self.target.parent / f".{self.target.name}.old"
            if self.target.exists() and not (self.target.is_dir() and not any(self.target.iterdir())):
                remove(old)
                self.target.rename(old)
            self.path.rename(self.target)
            remove(old)
            sync(self.target.parent)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def failures_named(self) -> "_FailuresNamed":
        return _FailuresNamed(self)


class _FailuresNamed:
    """Turns OSError inside into a ConfigError that says what to do."""

    def __init__(self, partial: PartialDirectory):
        self._partial = partial

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, OSError):
            partial = self._partial
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            todo = "make room" if full else "see to it"
            kept = f"; finished files are kept in {partial.path}" if partial.path.exists() else ""
            raise ConfigError(
                f"{partial._option}: {partial.target} can't be written: {error}; {todo} and start again to go on{kept}"
            ) from error


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file or directory on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_json(path: Path, values: Any) -> None:
    temporary = path.with_name(path.name + WRITING)
    try:
        temporary.write_text(json.dumps(values), encoding="utf-8")
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
