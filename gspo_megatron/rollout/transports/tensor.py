"""Weights handed over as memory: engines on this machine map the sender's bucket, and nothing is copied on the way.

On a CPU the bucket lies in POSIX shared memory that the engines open by name; on a GPU they open a CUDA IPC handle. The
payload of `/update_weights_from_tensor` is a pickle of those handles, which SGLang reads with a list of allowed names.
"""

import base64
import contextlib
import io
import os
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from gspo_megatron.config import ConfigError
from gspo_megatron.rollout.client import SGLangClient
from gspo_megatron.rollout.transports.base import Bucket, SessionTransport, Setting, engine_ranks, is_local

_DEVICE_ARGUMENT = 6
"""Place of the device in the arguments of torch's `rebuild_cuda_tensor`."""


class TensorTransport(SessionTransport):
    """One request a bucket to every engine. Servers have to run on this machine."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self._ranks: list[int] = []

    @property
    def connected(self) -> bool:
        return bool(self._ranks)

    def connect(self) -> None:
        """Raises ConfigError for servers that don't share this machine's memory."""
        far = [client.url for client in self._clients if not is_local(client.url)]
        if far:
            raise ConfigError(
                f"weights.transport: tensor: {', '.join(far)} is not on this machine by its URL; take `distributed` or"
                " `disk`, or write http://127.0.0.1:PORT"
            )
        self._ranks = [engine_ranks(client.url, client.server_info()) for client in self._clients]

    def allocate(self, size: int) -> Tensor:
        """Raises RuntimeError where /dev/shm has no room for it."""
        if self.device.type == "cuda":
            return super().allocate(size)
        storage = torch.UntypedStorage(size)
        try:
            with _output_closed():
                storage._share_filename_cpu_()
        except RuntimeError as error:
            raise RuntimeError(
                f"no {size} bytes of shared memory ({error}); lower weights.bucket_mib, give /dev/shm more room, or"
                " take weights.transport=distributed"
            ) from error
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def send_bucket(self, bucket: Bucket) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        ranks = dict(zip((client.url for client in self._clients), self._ranks, strict=True))

        def send(client: SGLangClient) -> None:
            # a payload is good for one reader: reading it counts the sender's reference down
            payloads = [serialize(bucket) for _ in range(ranks[client.url])]
            client.update_weights_from_tensor(payloads)

        try:
            self._on_all("handing over a bucket", send)
        except BaseException:
            self._ranks = []
            raise

    def close(self) -> None:
        self._ranks = []


def serialize(bucket: Bucket) -> str:
    """Base64 of the pickled handle of `bucket.flat` and of what lies where in it, for one reader."""
    metadata, offset = [], 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        size = dtype.itemsize * torch.Size(shape).numel()
        entry = {"name": name, "shape": torch.Size(shape), "dtype": dtype}
        metadata.append(types.SimpleNamespace(**entry, start_idx=offset, end_idx=offset + size, numel=size))
        offset += size
    payload = io.BytesIO()
    _HandlePickler(payload, protocol=4).dump({"flattened_tensor": bucket.flat, "metadata": metadata})
    return base64.b64encode(payload.getvalue()).decode()


@contextlib.contextmanager
def _output_closed() -> Iterator[None]:
    """torch's shared memory comes with a daemon that engines keep alive; with this process's output in its hands,
    whoever reads that through a pipe would wait for the engines' end."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in kept:
            os.dup2(nothing, descriptor)
        yield
    finally:
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)
        os.close(nothing)


class _HandlePickler(pickle.Pickler):
    """Pickles tensors as handles of their memory, whatever sharing strategy this process has set.

    torch's own default shares file descriptors, which only a child process can receive: an unrelated SGLang scheduler
    dies of it.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _cuda_handle(value) if value.is_cuda else _shared_memory_handle(value)
        return NotImplemented


def _shared_memory_handle(tensor: Tensor) -> tuple:
    storage = tensor.untyped_storage()
    manager, name, size = storage._share_filename_cpu_()
    storage._shared_incref()  # the reader counts it down
    arguments = (torch.storage.TypedStorage, manager, name, size, torch.uint8)
    typed = _Rebuilt(reductions.rebuild_storage_filename, arguments)
    place = (tensor.storage_offset(), tensor.size(), tensor.stride(), False)
    return reductions.rebuild_tensor, (Tensor, typed, place)


class _Rebuilt:
    """Pickled as a call of `function`, so that the reader gets what it returns."""

    def __init__(self, function: Any, arguments: tuple):
        self._call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self._call


def _cuda_handle(tensor: Tensor) -> tuple:
    function, arguments = reductions.reduce_tensor(tensor)
    # SGLang reads the device by its UUID: the same GPU has other numbers under another CUDA_VISIBLE_DEVICES
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return function, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
