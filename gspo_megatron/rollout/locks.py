"""One run a server: a second run on this machine that names the same server is refused before it does any harm.

Runs on other machines are found by `WeightSync.check_unchanged`.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from gspo_megatron.config import ConfigError
from gspo_megatron.file_lock import take
from gspo_megatron.rollout.transports.base import is_local


@contextlib.contextmanager
def hold_servers(urls: Sequence[str], run_dir: str | Path) -> Iterator[None]:
    """Hold these servers until the end of the block or of this process, however it ends.

    Raises ConfigError naming the server, and the process and directory of the run that holds it.
    """
    directory = Path(tempfile.gettempdir()) / f"gspo_megatron_servers_{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as held:
        for url in urls:
            file = held.enter_context((directory / _file_name(url)).open("a+b"))
            owner = take(file, f"process {os.getpid()}, run.dir {Path(run_dir).absolute()}")
            if owner is not None:
                raise ConfigError(
                    f"rollout.servers: {url} gets weights from {owner} already; two runs would overwrite each other's, so"
                    " stop that one, or start servers for this one"
                )
        yield


def _file_name(url: str) -> str:
    parts = urlsplit(url)
    host = "localhost" if is_local(url) else parts.hostname
    return f"{host}_{parts.port or parts.scheme}.lock"
