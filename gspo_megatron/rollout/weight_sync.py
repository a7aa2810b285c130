"""One weight update of all servers, whole or not at all: generation goes on only after every check has passed."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.config import ConfigError, WeightsConfig
from gspo_megatron.rollout.buckets import BucketWriter, TensorSpec
from gspo_megatron.rollout.client import SGLangClient
from gspo_megatron.rollout.errors import RequestError, WeightSyncError
from gspo_megatron.rollout.parallel import run_all
from gspo_megatron.rollout.transport import TRANSPORTS, Bucket

NAMES_SHOWN = 10


@dataclass(frozen=True)
class SyncReport:
    seconds: float
    num_bytes: int
    num_buckets: int
    num_tensors: int


class WeightSync:
    """Runs on the sending rank only.

    `expected`: Hugging Face name -> (dtype, shape) of every tensor of a full update. `engine_name`: Hugging Face name
    -> the name of the engine's parameter that it is loaded into, fused or not. Every step is bounded by
    `weights.timeout_s`. Whatever fails raises WeightSyncError and leaves the engines paused; a later `run` that goes
    well takes them out of it.
    """

    def __init__(
        self,
        config: WeightsConfig,
        urls: Sequence[str],
        *,
        backend: str,
        expected: Mapping[str, TensorSpec],
        engine_name: Callable[[str], str],
        report: Callable[[str], None] = print,
    ):
        if config.transport not in TRANSPORTS:
            raise ConfigError(f"weights.transport: {config.transport!r} is not one of {', '.join(TRANSPORTS)}")
        self._config, self._expected, self._engine_name, self._report = config, dict(expected), engine_name, report
        self._clients = [SGLangClient(url, config.timeout_s) for url in urls]
        self._transport = TRANSPORTS[config.transport](
            self._clients, backend=backend, host=config.host, timeout_s=config.timeout_s
        )
        self._parameters: dict[str, set[str]] = {}
        """"URL rank R of S" -> names of the parameters that this engine rank holds."""

    def connect(self) -> None:
        """Learn the engines' parameters and join them in a group.

        Raises ConfigError for servers that don't answer or can't be updated, WeightSyncError where the tensors that
        will be sent leave a parameter of an engine out, or go to one that it does not have.
        """
        try:
            answers = self._on_all("asking for parameter names", lambda client: client.weights_checker("checksum"))
        except (RequestError, TimeoutError) as error:
            raise ConfigError(f"rollout.servers: no list of parameters: {error}") from error
        for url, answer in answers.items():
            for rank in answer["ranks"]:
                self._parameters[_rank_label(url, rank)] = set(rank["checksums"])
        self._check_engine_names(self._expected)
        try:
            self._transport.connect()
        except (RequestError, TimeoutError, RuntimeError) as error:
            raise WeightSyncError(f"no weight update group with {', '.join(self._urls)}: {error}") from error

    def run(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> SyncReport:
        """Send all tensors once as weight version `version` and let generation go on."""
        report = self._update(tensors, version)
        self._resume(version)
        return report

    def prove_coverage(self, tensors: Callable[[], Iterable[tuple[str, Tensor]]], version: int) -> SyncReport:
        """Update, overwrite the engines' parameters with noise, update again: all must be as after the first time.

        `tensors` gives a new iterator at every call. Raises WeightSyncError naming the parameters that kept noise.
        """
        report = self._update(tensors(), version)
        clean = self._checksums(version)
        self._guarded(version, "overwriting the weights", lambda client: client.weights_checker("reset_tensors"))
        noisy = self._checksums(version)
        untouched = _shown([f"{name} of {rank}" for rank, name in _equal(clean, noisy)])
        if untouched:
            raise self._failure(version, f"noise did not reach {untouched}, so that nothing is proven about it")
        self._update(tensors(), version)
        again = self._checksums(version)
        equal = set(_equal(clean, again))
        kept = [f"{name} of {rank}" for rank in clean for name in clean[rank] if (rank, name) not in equal]
        if kept:
            raise self._failure(version, f"a sync does not rewrite all of {_shown(kept)}")
        self._resume(version)
        return report

    def close(self) -> None:
        """Leave the group; servers that are gone are no hindrance."""
        try:
            self._transport.close()
        except (RequestError, TimeoutError) as error:
            self._report(f"weight update group not closed everywhere: {error}")
        for client in self._clients:
            client.close()

    @property
    def _urls(self) -> list[str]:
        return [client.url for client in self._clients]

    def _update(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> SyncReport:
        started = time.monotonic()
        self._guarded(version, "pausing", lambda client: client.pause_generation("abort"))
        if not self._transport.connected:
            self.connect()
        self._guarded(version, "flushing the cache", lambda client: client.flush_cache())
        self._guarded(version, "beginning the update", _begin)
        writer = BucketWriter(int(self._config.bucket_mib * 2**20), self._expected, self._transport.device)
        num_buckets = 0
        try:
            for bucket in writer.buckets(tensors):
                self._send(bucket, version, num_buckets)
                num_buckets += 1
        except WeightSyncError:
            raise
        except Exception as error:
            after = writer.last_name or "the start"
            raise self._failure(version, f"after {after}: {type(error).__name__}: {error}") from error
        missing = [name for name in self._expected if name not in writer.sent]
        if missing:
            raise self._failure(version, f"tensors not sent: {_shown(missing)}")
        self._check_engine_names(writer.sent, version)
        self._guarded(version, "ending the update", lambda client: client.end_weight_update())
        self._check_same_checksums(version)
        self._guarded(version, "setting the version", lambda client: client.update_weight_version(str(version)))
        self._check_version(version)
        return SyncReport(time.monotonic() - started, writer.num_bytes, num_buckets, len(writer.sent))

    def _send(self, bucket: Bucket, version: int, index: int) -> None:
        try:
            self._transport.send_bucket(bucket)
        except (RequestError, TimeoutError, RuntimeError) as error:
            names = f"{bucket.names[0]} to {bucket.names[-1]}" if len(bucket.names) > 1 else bucket.names[0]
            raise self._failure(version, f"bucket {index} ({names}): {error}") from error

    def _resume(self, version: int) -> None:
        self._guarded(version, "continuing generation", lambda client: client.continue_generation())

    def _check_engine_names(self, names: Iterable[str], version: int | None = None) -> None:
        """SGLang answers success for a name that it does not know, so this is where such names are found."""
        targets = {self._engine_name(name): name for name in names}
        known = set().union(*self._parameters.values())
        unknown = [f"{name} (as {target})" for target, name in targets.items() if target not in known]
        if unknown:
            raise self._failure(version, f"the engines have no parameter for {_shown(unknown)}")
        for rank, parameters in self._parameters.items():
            uncovered = sorted(parameters - targets.keys())
            if uncovered:
                raise self._failure(version, f"no tensor sent fills these parameters of {rank}: {_shown(uncovered)}")

    def _check_same_checksums(self, version: int) -> None:
        """Engine ranks at the same place of different servers must hold the same bytes."""
        if len(self._clients) == 1:
            return
        first: dict[str, tuple[str, dict[str, str]]] = {}
        for rank, checksums in self._checksums(version).items():
            place = rank.partition(" ")[2]
            label, known = first.setdefault(place, (rank, checksums))
            differing = [name for name, value in checksums.items() if known.get(name) != value]
            if differing:
                raise self._failure(version, f"{rank} and {label} hold different {_shown(differing)}")

    def _checksums(self, version: int) -> dict[str, dict[str, str]]:
        """"URL rank R of S" -> parameter name -> checksum."""
        answers = self._guarded(version, "taking checksums", lambda client: client.weights_checker("checksum"))
        ranks = [(url, rank) for url, answer in answers.items() for rank in answer["ranks"]]
        return {_rank_label(url, rank): rank["checksums"] for url, rank in ranks}

    def _check_version(self, version: int) -> None:
        for url, found in self._guarded(version, "reading the version", lambda client: client.weight_version()).items():
            if found != str(version):
                raise self._failure(version, f"{url} reports weight version {found} after the update")

    def _guarded(self, version: int, what: str, call: Callable[[SGLangClient], Any]) -> dict[str, Any]:
        try:
            return self._on_all(what, call)
        except (RequestError, TimeoutError) as error:
            raise self._failure(version, f"{what}: {error}") from error

    def _on_all(self, what: str, call: Callable[[SGLangClient], Any]) -> dict[str, Any]:
        tasks = {client.url: (lambda client=client: call(client)) for client in self._clients}
        return run_all(tasks, self._config.timeout_s, what)

    def _failure(self, version: int | None, message: str) -> WeightSyncError:
        if version is None:
            return WeightSyncError(f"the weights of this model don't fit the servers: {message}")
        return WeightSyncError(
            f"weight sync to version {version} failed, {', '.join(self._urls)} stay paused: {message}"
        )


def _begin(client: SGLangClient) -> None:
    try:
        client.begin_weight_update()
    except RequestError as error:
        # left open by a sync that failed, of this trainer or of one before it
        if "already open" not in error.message:
            raise
        client.end_weight_update()
        client.begin_weight_update()


def _rank_label(url: str, rank: dict[str, Any]) -> str:
    place = rank["parallelism_info"][0]
    return f"{url} rank {place['tp_rank']} of {place['tp_size']}"


def _equal(a: dict[str, dict[str, str]], b: dict[str, dict[str, str]]) -> list[tuple[str, str]]:
    """(rank, parameter) of the checksums that are the same in both."""
    return [(rank, name) for rank in a for name in a[rank] if a[rank][name] == b[rank].get(name)]


def _shown(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
