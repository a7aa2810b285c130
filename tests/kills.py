"""A process that is killed at a chosen place, without a process."""

import contextlib
import shutil

import pytest


class Killed(BaseException):
    """As SIGKILL: nothing of the program's own handles it."""


@contextlib.contextmanager
def killed_while_removing(file: str):
    """The first directory that is removed inside loses `file`, and then the process is gone. Fails where none is."""

    def remove_a_file(path, ignore_errors=False):
        if path.exists():
            (path / file).unlink()
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", remove_a_file)
        yield
