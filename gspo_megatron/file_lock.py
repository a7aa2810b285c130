"""A file that one process at a time holds, by a record lock: gone with the process however it ends, and not handed on
to its children."""

import contextlib
import errno
import fcntl
import time
from typing import BinaryIO

_TRY_AGAIN_S = 0.05


def take(file: BinaryIO, owner: str, wait_s: float = 0.0) -> str | None:
    """None once this process holds `file` (open for reading and appending), which then says `owner`; else, after
    `wait_s` seconds, what its holder wrote there.

    On a file system without locks everybody holds it.
    """
    deadline = time.monotonic() + wait_s
    while (error := _lock(file)) is not None and error.errno in (errno.EACCES, errno.EAGAIN):
        if time.monotonic() >= deadline:
            file.seek(0)
            return file.read(4096).decode(errors="replace") or "another process"
        time.sleep(_TRY_AGAIN_S)
    with contextlib.suppress(OSError):  # a full disk: the lock counts, not the name
        file.truncate(0)
        file.write(owner.encode())
        file.flush()
    return None


def _lock(file: BinaryIO) -> OSError | None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None
