"""What all weight transports are: buckets of tensors that reach every engine, between a begin and a finish."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from gspo_megatron.config import LOCAL_HOSTS, ConfigError, WeightsConfig
from gspo_megatron.rollout.client import SGLangClient
from gspo_megatron.rollout.errors import RequestError
from gspo_megatron.rollout.parallel import run_all

CLOSE_TIMEOUT_S = 10.0
GRACE_S = 5.0
"""The threads' bound is this much above the bound of what they call, so that the more telling error comes first."""


@dataclass(frozen=True)
class Bucket:
    """Tensors laid one after the other in `flat` [bytes] uint8, without gaps, each at a multiple of its item size."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Tensor

    def tensors(self) -> list[tuple[str, Tensor]]:
        """(name, view of `flat`) in order."""
        found, offset = [], 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            size = dtype.itemsize * torch.Size(shape).numel()
            found.append((name, self.flat[offset : offset + size].view(dtype).view(shape)))
            offset += size
        return found


@dataclass(frozen=True)
class Setting:
    """What a transport is made from. `clients` may change while it is not connected. `directory`: where files go;
    `model_dir`: the checkpoint whose config and tokenizer files go with them; `backend`: "gloo" or "nccl", by the
    device that the trainer's tensors are on."""

    clients: Sequence[SGLangClient]
    config: WeightsConfig
    backend: str
    directory: Path
    model_dir: Path
    report: Callable[[str], None] = print

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.backend == "gloo" else torch.device("cuda", torch.cuda.current_device())


class WeightTransport(Protocol):
    """Raises RequestError, TimeoutError, OSError or RuntimeError where a transfer fails, and must be connected anew."""

    device: torch.device
    """Where `Bucket.flat` has to lie."""
    connected: bool

    def connect(self) -> None:
        """Get ready for any number of updates. Raises ConfigError for engines that can't be updated this way."""

    def allocate(self, size: int) -> Tensor:
        """[size] uint8, a buffer that buckets may lie in."""

    def begin(self, version: int) -> None:
        """Open an update on every engine."""

    def send_bucket(self, bucket: Bucket) -> None:
        """Returns when the bucket's memory may be written to again."""

    def finish(self, version: int) -> None:
        """Returns when every engine has loaded all buckets since `begin`."""

    def close(self) -> None: ...


class SessionTransport:
    """The part shared by transports that load bucket by bucket inside SGLang's weight-update session."""

    def __init__(self, setting: Setting):
        self._clients, self._timeout_s = setting.clients, setting.config.timeout_s
        self.device = setting.device

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def begin(self, version: int) -> None:
        self._on_all("beginning the update", _begin)

    def finish(self, version: int) -> None:
        self._on_all("ending the update", lambda client: client.end_weight_update())

    def _on_all(self, what: str, call: Callable[[SGLangClient], Any]) -> None:
        on_all(self._clients, self._timeout_s, what, call)


def on_all(
    clients: Sequence[SGLangClient], timeout_s: float, what: str, call: Callable[[SGLangClient], Any]
) -> dict[str, Any]:
    """URL -> what `call` gave, all servers at once."""
    tasks = {client.url: (lambda client=client: call(client)) for client in clients}
    return run_all(tasks, timeout_s + GRACE_S, what)


def _begin(client: SGLangClient) -> None:
    try:
        client.begin_weight_update()
    except RequestError as error:
        # left open by a sync that failed, of this trainer or of one before it
        if "already open" not in error.message:
            raise
        client.end_weight_update()
        client.begin_weight_update()


def engine_ranks(url: str, info: dict[str, Any]) -> int:
    """Ranks of a server that take part. Raises ConfigError for layouts that SGLang can't update bucket by bucket."""
    for key in ("dp_size", "pp_size"):
        if info.get(key, 1) != 1:
            raise ConfigError(
                f"rollout.servers: {url} runs with {key} {info[key]}, and SGLang takes weights by broadcast or from"
                " memory with 1 only; use tensor or expert parallelism there, and more servers in place of data"
                " parallelism"
            )
    return int(info["tp_size"])


def is_local(url: str) -> bool:
    return urlsplit(url).hostname in LOCAL_HOSTS
