"""Weights by broadcast, in a group of the sending rank and the ranks of all engines."""

import contextlib
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.rollout.client import SGLangClient
from gspo_megatron.rollout.parallel import run_all
from gspo_megatron.rollout.transports.base import (
    CLOSE_TIMEOUT_S,
    GRACE_S,
    Bucket,
    SessionTransport,
    Setting,
    engine_ranks,
    is_local,
)


class DistributedTransport(SessionTransport):
    """One broadcast a bucket, in a group of the sending rank (rank 0) and the ranks of all engines.

    The group is made from its own store and is unknown to torch.distributed's registry: the sender's default group,
    which torchrun's ranks share, has no part in it, and a group of an earlier connection can't be in its way.
    """

    def __init__(self, setting: Setting):
        if setting.backend not in ("gloo", "nccl"):
            raise ValueError(f"backend {setting.backend!r} is neither gloo nor nccl")
        super().__init__(setting)
        self._backend = setting.backend
        self._host = setting.config.host or default_host([client.url for client in self._clients])
        self._group: Any = None
        self._store: dist.TCPStore | None = None
        self._name = ""

    @property
    def connected(self) -> bool:
        return self._group is not None

    def connect(self) -> None:
        """Make the group; the engines join while this rank does. Raises ConfigError for engines that can't."""
        sizes = [engine_ranks(client.url, client.server_info()) for client in self._clients]
        world_size = 1 + sum(sizes)
        # a fresh name: engines keep the groups of a trainer that went away without closing
        self._name = f"gspo-weights-{uuid.uuid4().hex[:12]}"
        bound = timedelta(seconds=self._timeout_s)
        self._store = dist.TCPStore(
            self._host, 0, world_size, is_master=True, timeout=bound, wait_for_workers=False, multi_tenant=False
        )
        tasks: dict[str, Callable[[], Any]] = {}
        offset = 1
        for client, size in zip(self._clients, sizes, strict=True):
            tasks[client.url] = self._joiner(client, offset, world_size)
            offset += size
        tasks["this rank"] = lambda: make_group(self._backend, self._store, self._name, world_size, bound)
        results = run_all(tasks, self._timeout_s + GRACE_S, "joining the weight update group")
        self._group = results["this rank"]

    def _joiner(self, client: SGLangClient, offset: int, world_size: int) -> Callable[[], None]:
        return lambda: client.init_weights_update_group(
            host=self._host,
            port=self._store.port,
            rank_offset=offset,
            world_size=world_size,
            group=self._name,
            backend=self._backend,
        )

    def send_bucket(self, bucket: Bucket) -> None:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes]
        tasks: dict[str, Callable[[], None]] = {
            client.url: self._announcer(client, bucket, dtypes) for client in self._clients
        }
        tasks["the broadcast"] = lambda: self._broadcast(bucket.flat)
        try:
            run_all(tasks, self._timeout_s + GRACE_S, "sending a bucket")
        except BaseException:
            # somebody may still wait inside the collective: this group can't be used again
            group, self._group = self._group, None
            threading.Thread(target=_abort, args=(group,), name="aborting the weight update group", daemon=True).start()
            raise

    def _announcer(self, client: SGLangClient, bucket: Bucket, dtypes: list[str]) -> Callable[[], None]:
        return lambda: client.update_weights_from_distributed(bucket.names, dtypes, bucket.shapes, self._name)

    def _broadcast(self, flat: Tensor) -> None:
        # the local name keeps the group alive until the operation ends: its destructor waits for what is pending
        group, on_gpu = self._group, flat.device.type == "cuda"
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with torch.cuda.device(flat.device) if on_gpu else contextlib.nullcontext():
            group.broadcast([flat], options).wait(timedelta(seconds=self._timeout_s))
            if on_gpu:
                torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Leave the group, and have the engines leave it where they still answer."""
        if self._group is None:
            return
        self._group = None
        tasks = {client.url: self._leaver(client) for client in self._clients}
        try:
            run_all(tasks, CLOSE_TIMEOUT_S, "leaving the weight update group")
        finally:
            self._store = None

    def _leaver(self, client: SGLangClient) -> Callable[[], None]:
        return lambda: client.destroy_weights_update_group(self._name)


def make_group(backend: str, store: dist.Store, name: str, world_size: int, timeout: timedelta) -> Any:
    """Rank 0 of a group whose other members call SGLang's `init_custom_process_group` with the same store and name.

    They find each other by keys under the prefixes that torch.distributed gives a named group and its device.
    """
    device = "cpu" if backend == "gloo" else "cuda"
    keys = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    if backend == "gloo":
        return dist.ProcessGroupGloo(keys, 0, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.is_high_priority_stream = False
    options.group_name = name
    return dist.ProcessGroupNCCL(keys, 0, world_size, options)


def _abort(group: Any) -> None:
    # a torch whose gloo knows no abort lets the operation run into its time-out
    with contextlib.suppress(RuntimeError):
        group.abort()


def default_host(urls: Sequence[str]) -> str:
    """The address at which these servers reach this machine."""
    return "127.0.0.1" if all(map(is_local, urls)) else socket.gethostname()
