"""`python -m tests.training.held_disk train ...`: the program, on a disk that holds some files back.

HELD_FILES: what their paths contain. RELEASE: a path; they are finished once it exists.
"""

import os
import sys
import time
from pathlib import Path

from gspo_megatron.__main__ import main

BOUND_S = 120


def wait_where_held(path: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while os.environ["HELD_FILES"] in path and not Path(os.environ["RELEASE"]).exists():
        assert time.monotonic() < deadline, f"{path} was never released"
        time.sleep(0.01)


def hold_files() -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from gspo_megatron.weights.shard_file import ShardWriter

    write, close = FileSystemWriterAsync.write_preloaded_data, ShardWriter.close

    def held_write(*args, **kwargs):
        wait_where_held(str(kwargs["write_bucket"][0]))
        return write(*args, **kwargs)

    def held_close(writer, durable):
        wait_where_held(str(writer._file.name))
        return close(writer, durable)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(held_write)
    ShardWriter.close = held_close


if __name__ == "__main__":
    hold_files()
    sys.exit(main())
