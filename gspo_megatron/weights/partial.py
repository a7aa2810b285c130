"""A directory that is written file by file beside its target, goes on after an interruption, and is renamed when whole.

    .NAME.partial/source.json       what is converted and how; a start that says otherwise begins anew
    .NAME.partial/FILE              finished files
    .NAME.partial/FILE.done.json    written after FILE: its size, and what its writer wants to know of it later
    .NAME.partial/FILE.writing      a file under way
    .NAME.partial/.lock             held by the conversion that is writing

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
from gspo_megatron.file_lock import take

SOURCE, DONE, WRITING, LOCK = "source.json", ".done.json", ".writing", ".lock"
_BUFFER_BYTES = 1 << 16


class PartialDirectory:
    """All ranks of a conversion share one; rank 0 alone calls `begin` and `finish`."""

    def __init__(self, target: Path, option: str, source: Path, overwrite: bool = False):
        """`option` is the command line's name of `target`, for messages; `source` what is converted. A target that is
        there is only replaced with `overwrite`."""
        self.target, self._option = Path(os.path.realpath(target)), option  # a link's own name can't be a directory's
        self._source, self._overwrite = Path(os.path.realpath(source)), overwrite
        self.path = self.target.parent / f".{self.target.name}.partial"
        self._old = self.target.parent / f".{self.target.name}.old"
        self._lock: BinaryIO | None = None

    def target_fault(self) -> str:
        """Why the target can't be written: it is there, holds the source, or can't be made; empty where it can."""
        parent = self.target.parent
        if self.target.exists() and not self._overwrite and not self._is_empty():
            return f"{self._option}: {self.target} exists; remove it, give another, or add --overwrite"
        if self._source.is_relative_to(self.target):
            return f"{self._option}: {self.target} holds what is converted, which would be removed; give another"
        if os.path.ismount(self.target):
            return f"{self._option}: {self.target} is where a file system is mounted; give a directory in it"
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
            return f"{self._option}: {self.target} can't be made: {parent} is not a directory to write into"
        return ""

    def refuse_target(self) -> None:
        """Raises ConfigError for a `target_fault`."""
        fault = self.target_fault()
        if fault:
            raise ConfigError(fault)

    def _is_empty(self) -> bool:
        return self.target.is_dir() and not any(self.target.iterdir())

    def begin(self, source: dict[str, Any]) -> int:
        """Make the directory, or take up one of the same source; how many files are finished.

        Raises ConfigError where another conversion is writing there.
        """
        with self.failures_named():
            self._hold()
            if self._old.exists() and not self.target.exists():  # killed between the two renames of `finish`
                self._old.rename(self.target)
            self.refuse_target()
            anew = _read_json(self.path / SOURCE) != source
            done = [] if anew else [file.name.removesuffix(DONE) for file in self.path.glob(f"*{DONE}")]
            finished = [name for name in done if self.finished(name) is not None]
            kept = {LOCK, *finished, *(f"{name}{DONE}" for name in finished)}
            for file in self.path.iterdir():
                if file.name not in kept:
                    remove(file)
            _write_json(self.path / SOURCE, source)
        return len(finished)

    def _hold(self) -> None:
        """Until `finish`, `discard` or this process's end."""
        while self._lock is None:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK).open("a+b")
            owner = take(lock, f"process {os.getpid()}")
            if owner is not None:
                lock.close()
                raise ConfigError(
                    f"{self._option}: {owner} is writing {self.target}; wait for its end, stop it, or give another"
                )
            if _is_file_of(lock, self.path / LOCK):  # else the one before has just finished, and renamed it away
                self._lock = lock
            else:
                lock.close()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

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
            self.refuse_target()  # somebody may have made it meanwhile: the finished files stay then
            for file in self.path.rglob("*"):
                sync(file)
            for file in [*self.path.glob(f"*{DONE}"), self.path / SOURCE]:
                file.unlink()
            if self.target.exists() and not self._is_empty():
                remove(self._old)
                self.target.rename(self._old)
            try:
                self.path.rename(self.target)
            except OSError:
                if self._old.exists():
                    self._old.rename(self.target)
                raise
            (self.target / LOCK).unlink()
            self._release()
            remove(self._old)
            sync(self.target.parent)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

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
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def take_name(directory: Path, going: Path) -> None:
    """Call it `going` before it is removed: killed in the middle, it is not to look whole."""
    shutil.rmtree(going, ignore_errors=True)
    directory.rename(going)


def sync(path: Path) -> None:
    """Have a file or directory on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_file_of(file: BinaryIO, path: Path) -> bool:
    """Whether the open `file` is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


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
