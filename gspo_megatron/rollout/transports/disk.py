"""Weights as a Hugging Face checkpoint on a file system that trainer and engines share."""

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from gspo_megatron.rollout.client import SGLangClient
from gspo_megatron.rollout.errors import RequestError
from gspo_megatron.rollout.transports.base import Setting, on_all
from gspo_megatron.weights.hf_writer import Writers, remove_half_written, write_hf_checkpoint

FILE_TRANSPORTS = frozenset({"disk", "delta"})
"""Names in `weights.transport` for which all trainer ranks write a weight version before the servers load it."""
_VERSION = re.compile(r"version_\d+")


def version_dir(directory: str | Path, version: int) -> Path:
    """Where a weight version goes."""
    return Path(directory).absolute() / f"version_{version}"


def write_version(
    tensors: Iterable[tuple[str, Tensor]],
    directory: str | Path,
    version: int,
    model_dir: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    writers: Writers | None = None,
) -> Path:
    """Write a weight version; collective over `writers`, each with the tensors that it sends.

    The checkpoint gets its name when it is whole; what killed writers left is removed. Raises OSError, naming rank and
    file, where it can't be written: nothing half-written stays then, and the version before it does.
    """
    parent = Path(directory).absolute()
    if writers is None or writers.rank == 0:
        parent.mkdir(parents=True, exist_ok=True)
        remove_half_written(parent)
    target = version_dir(parent, version)
    # not forced to the disk: a version is worth nothing after a crash, when the next start writes its own
    return write_hf_checkpoint(tensors, target, model_dir, writers=writers, shapes=shapes, durable=False)


def remove_versions(kept: Path) -> None:
    """Remove the other weight versions beside this one."""
    for path in kept.parent.iterdir():
        if _VERSION.fullmatch(path.name) and path != kept:
            shutil.rmtree(path)


class DiskTransport:
    """`/update_weights_from_disk` of one directory, at all servers at once. The newest version stays on the disk."""

    def __init__(self, setting: Setting):
        self._clients, self._timeout_s = setting.clients, setting.config.timeout_s
        self.directory, self.model_dir = setting.directory, setting.model_dir
        self.connected = False
        self.moved_bytes = 0
        """What went through the disk for the last version."""

    def connect(self) -> None:
        self.connected = True

    def load(self, directory: Path, version: int) -> None:
        """Have all servers load a whole checkpoint, then remove older versions. Raises RequestError."""
        self.load_everywhere(directory)
        self.moved_bytes = sum(path.stat().st_size for path in directory.iterdir())
        remove_versions(directory)

    def load_everywhere(self, directory: Path) -> None:
        """`/update_weights_from_disk` at all servers. Raises RequestError."""

        def call(client: SGLangClient) -> None:
            try:
                client.update_weights_from_disk(str(directory))
            except RequestError as error:
                if error.status is None:
                    raise
                hint = "does its machine see this directory? weights.dir must be on a file system that both share"
                raise RequestError(error.url, error.endpoint, error.status, f"{error.message} ({hint})") from error

        on_all(self._clients, self._timeout_s, "loading weights from disk", call)

    def close(self) -> None:
        self.connected = False
