"""One weight update of all servers, whole or not at all: generation goes on only after every check has passed."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gspo_megatron.config import ConfigError, WeightsConfig
from gspo_megatron.rollout.buckets import BucketWriter, TensorSpec
from gspo_megatron.rollout.client import SGLangClient
from gspo_megatron.rollout.engines import Engine, Model, rank_checksums, shown
from gspo_megatron.rollout.errors import RequestError, WeightSyncError
from gspo_megatron.rollout.parallel import run_all
from gspo_megatron.rollout.proof import Checksums, Expected
from gspo_megatron.rollout.prover import Proof, Prover
from gspo_megatron.rollout.senders import Crew, LeadingTransport
from gspo_megatron.rollout.transports import TRANSPORTS, Bucket, DiskTransport, Setting
from gspo_megatron.rollout.transports.disk import write_version
from gspo_megatron.weights.engine_layout import one_message_groups
from gspo_megatron.weights.hf_files import HFReader

PROBE_S = 30.0
"""A server that does not answer for as long, in seconds, is left out of a sync where others answer."""
FLUSH_WAIT_S = 30.0
"""How long a server may take, in seconds, to be rid of the requests that the pause has ended."""
FAILURES = (RequestError, TimeoutError, OSError, RuntimeError)


@dataclass(frozen=True)
class SyncReport:
    seconds: float
    num_bytes: int
    num_buckets: int
    num_tensors: int
    moved_bytes: int = 0
    """What went to the servers, once for all of them, or to the disk; at least `num_bytes` but for deltas."""
    checked: int = 0
    """Engine parameters whose checksums were held against what was sent, over all engine ranks."""
    unknown: int = 0
    """Engine parameters, over all engine ranks, whose layout is not known: only their names are checked."""
    check_seconds: float = 0.0

    @property
    def text(self) -> str:
        found = (
            f"{self.num_tensors} tensors, {self.num_bytes / 2**20:.1f} MiB in {self.num_buckets} bucket(s),"
            f" {self.seconds:.2f} s; checksums of {self.checked} engine parameters are those of what was sent"
        )
        return found + (f", {self.unknown} have a layout that is not known" if self.unknown else "")


@dataclass(frozen=True)
class _Sent:
    num_bytes: int
    num_buckets: int
    moved_bytes: int


Tensors = Iterable[tuple[str, Tensor]] | Path
"""Named tensors, or for transports by files also the directory of a checkpoint that holds them."""


class WeightSync:
    """Runs on the sending rank only.

    `expected`: Hugging Face name -> (dtype, shape) of every tensor of a full update. `engine_name`: Hugging Face name
    -> the name of the engine's parameter that it is loaded into, fused or not. `model_dir`: the checkpoint whose
    config.json tells how engines cut parameters; without it checksums are not compared. `directory`: where transports
    that use files write. `crew`: the ranks that send, in place of what `run` is given. Every step is bounded by
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
        directory: str | Path = "weights",
        model_dir: str | Path = "",
        crew: Crew | None = None,
        report: Callable[[str], None] = print,
    ):
        if config.transport not in TRANSPORTS:
            raise ConfigError(f"weights.transport: {config.transport!r} is not one of {', '.join(TRANSPORTS)}")
        self._config, self._report = config, report
        self._model = Model(expected, engine_name, Path(model_dir) if model_dir else None)
        self._clients = [SGLangClient(url, config.timeout_s) for url in urls]
        self._taking_part = list(self._clients)
        """The transport's view of the servers; changed only while it is not connected."""
        setting = Setting(self._taking_part, config, backend, Path(directory), Path(model_dir), report)
        self._transport = crew.transport(setting) if crew else TRANSPORTS[config.transport](setting)
        self._engines: dict[str, Engine] = {}
        self._prover = Prover(config.checked_share, self._model.dtypes)
        self._version: int | None = None
        """Of the last sync that went well."""
        self._prove_all = True

    @property
    def urls(self) -> list[str]:
        """The servers that the last sync reached; others serve older weights, if any."""
        return [client.url for client in self._taking_part]

    @property
    def num_ranks(self) -> int:
        """Engine ranks that take part."""
        return sum(len(engine.ranks) for engine in self._engines.values())

    def least_bytes(self) -> int:
        """What all engine ranks together have to get: each its part of every parameter whose layout is known, once."""
        return sum(engine.least_bytes(self._model.dtypes) for engine in self._engines.values())

    def connect(self) -> None:
        """Learn the engines' parameters and get the transport ready.

        Raises ConfigError for servers that don't answer, serve another model or can't be updated, WeightSyncError where
        the tensors that will be sent leave a parameter of an engine out, or go to one that it does not have.
        """
        try:
            self._engines = self._on_all("asking what the servers are", self._model.learn)
        except (RequestError, TimeoutError) as error:
            raise ConfigError(f"rollout.servers: no list of parameters: {error}") from error
        for engine in self._engines.values():
            misfit = self._model.misfits(engine)
            if misfit:
                raise WeightSyncError(f"the weights of this model don't fit the servers: {misfit}")
        self._prove_all = True
        self._connect_transport()

    def _connect_transport(self) -> None:
        try:
            self._transport.connect()
        except FAILURES as error:
            who = f"{', '.join(self.urls)} can't be updated by weights.transport={self._config.transport}"
            raise WeightSyncError(f"{who}: {error}") from error

    def run(self, tensors: Tensors, version: int) -> SyncReport:
        """Send all tensors once as weight version `version` and let generation go on."""
        report = self._update(tensors, version)
        self._resume(version)
        return report

    def prove_coverage(self, tensors: Callable[[], Tensors], version: int) -> SyncReport:
        """Update, overwrite the engines' parameters with noise, update again: all must be as after the first time.

        `tensors` gives a new iterator at every call. Raises WeightSyncError naming the parameters that kept noise.
        """
        report = self._update(tensors(), version)
        clean = self._checksums(version)
        self._guarded(version, "overwriting the weights", lambda client: client.weights_checker("reset_tensors"))
        noisy = self._checksums(version)
        untouched = shown([place for place, equal in self._compared(clean, noisy) if equal])
        if untouched:
            raise self._failure(version, f"noise did not reach {untouched}, so that nothing is proven about it")
        self._update(tensors(), version)
        kept = shown([place for place, equal in self._compared(clean, self._checksums(version)) if not equal])
        if kept:
            raise self._failure(version, f"a sync does not rewrite all of {kept}")
        self._resume(version)
        return report

    def check_unchanged(self) -> None:
        """Raises WeightSyncError where a server of the last sync has other weights by now, or another version."""
        if self._version is not None:
            self._prover.check_unchanged(self._engines, self._version)

    def current_urls(self) -> list[str]:
        """Servers that answer and report the version of the last sync, as the processes that got it."""
        found = []
        for url, engine in self._engines.items():
            with contextlib.suppress(RequestError):
                info = {**engine.client.server_info(PROBE_S), **engine.client.model_info(PROBE_S)}
                if info.get("startup_time") == engine.started and info["weight_version"] == str(self._version):
                    found.append(url)
        return found

    def wait_for_any(self, seconds: float) -> bool:
        """Whether a server answers within so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            for client in self._clients:
                with contextlib.suppress(RequestError):
                    client.server_info(5.0)
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(1.0)

    def close(self) -> None:
        """Leave the engines; servers that are gone are no hindrance."""
        self._close_transport()
        for client in self._clients:
            client.close()

    def _close_transport(self) -> None:
        try:
            self._transport.close()
        except FAILURES as error:
            self._report(f"weight updates not closed everywhere: {error}")

    def _update(self, tensors: Tensors, version: int) -> SyncReport:
        started = time.monotonic()
        self._find_servers(version)
        self._guarded(version, "pausing", lambda client: client.pause_generation(self._config.pause))
        if len(self._engines) < len(self._taking_part):
            self.connect()
        elif not self._transport.connected:
            self._connect_transport()
        self._guarded(version, "flushing the cache", self._flush)
        proof = self._prover.begin(self._engines, everything=self._prove_all)
        if isinstance(self._transport, DiskTransport):
            sent = self._send_files(tensors, version, proof.expected)
        else:
            sent = self._send_all(tensors, version, proof.expected)
        checking = time.monotonic()
        checked = self._prove(version, proof)
        checking = time.monotonic() - checking
        self._guarded(version, "setting the version", lambda client: client.update_weight_version(str(version)))
        self._check_version(version)
        self._version, self._prove_all = version, False
        return SyncReport(
            seconds=time.monotonic() - started,
            num_bytes=sent.num_bytes,
            num_buckets=sent.num_buckets,
            num_tensors=len(self._model.expected),
            moved_bytes=sent.moved_bytes,
            checked=checked,
            unknown=sum(engine.num_unknown for engine in self._engines.values()),
            check_seconds=checking,
        )

    def _send_all(self, tensors: Tensors, version: int, expected: Sequence[Expected]) -> _Sent:
        if isinstance(self._transport, LeadingTransport):
            return self._send_by_all(version, expected)
        assert not isinstance(tensors, Path), f"{tensors} can't be sent by weights.transport={self._config.transport}"
        self._step(version, "beginning the update", lambda: self._transport.begin(version))
        together = one_message_groups(self._model.expected, self._model.engine_name)
        capacity = int(self._config.bucket_mib * 2**20)
        writer = BucketWriter(capacity, self._model.expected, self._transport.allocate, together)
        num_buckets = 0
        try:
            for bucket in writer.buckets(tensors):
                for each in expected:
                    each.add(bucket.tensors())
                self._send(bucket, version, num_buckets)
                num_buckets += 1
        except WeightSyncError:
            raise
        except Exception as error:
            after = writer.last_name or "the start"
            raise self._failure(version, f"after {after}: {type(error).__name__}: {error}") from error
        missing = [name for name in self._model.expected if name not in writer.sent]
        if missing:
            raise self._failure(version, f"tensors not sent: {shown(missing)}")
        self._step(version, "ending the update", lambda: self._transport.finish(version))
        return _Sent(writer.num_bytes, num_buckets, writer.num_bytes)

    def _send_by_all(self, version: int, expected: Sequence[Expected]) -> _Sent:
        try:
            num_bytes, num_buckets = self._transport.send_all(version, expected, self._model.expected)
        except FAILURES as error:
            raise self._failure(version, str(error)) from error
        return _Sent(num_bytes, num_buckets, num_bytes)

    def _send_files(self, tensors: Tensors, version: int, expected: Sequence[Expected]) -> _Sent:
        """A checkpoint that is written already, or is here; what servers load is what is held against them."""
        transport, shapes = self._transport, {name: tuple(shape) for name, (_, shape) in self._model.expected.items()}
        try:
            if not isinstance(tensors, Path):
                tensors = write_version(tensors, transport.directory, version, transport.model_dir, shapes)
            reader = HFReader(tensors)
            wrong = [name for name, (dtype, _) in self._model.expected.items() if reader.dtype(name) != dtype]
            if wrong:
                raise ValueError(f"{shown(wrong)} not of the dtype that is expected")
            for each in expected:
                each.add((name, reader.read(name, (0,) * len(shapes[name]), shapes[name])) for name in each.needed)
            transport.load(tensors, version)
        except (*FAILURES, ValueError, KeyError) as error:
            raise self._failure(version, f"{type(error).__name__}: {error}") from error
        num_bytes = sum(path.stat().st_size for path in reader.files)
        return _Sent(num_bytes, 1, transport.moved_bytes)

    def _send(self, bucket: Bucket, version: int, index: int) -> None:
        try:
            self._transport.send_bucket(bucket)
        except FAILURES as error:
            names = f"{bucket.names[0]} to {bucket.names[-1]}" if len(bucket.names) > 1 else bucket.names[0]
            raise self._failure(version, f"bucket {index} ({names}): {error}") from error

    def _flush(self, client: SGLangClient) -> None:
        try:
            # what is paused in place or waits retracted does not end, however long one waits
            client.flush_cache(FLUSH_WAIT_S if self._config.pause == "abort" else 0.0)
        except RequestError as error:
            if self._config.pause != "in_place" or error.status != 400:
                raise
            raise RequestError(
                error.url, "/flush_cache", 400,
                f"{error.message} (requests of somebody else are under way, and weights.pause=in_place keeps the caches"
                " that they made with the old weights; take abort or retract)",
            ) from error  # fmt: skip

    def _resume(self, version: int) -> None:
        self._guarded(version, "continuing generation", lambda client: client.continue_generation())

    # which servers

    def _find_servers(self, version: int) -> None:
        """After the first sync: leave out servers that don't answer, take in those that do again, find new ones in the
        place of old ones. Raises WeightSyncError where none answers, or where somebody else sent weights."""
        if self._version is None:
            return
        answers, errors = {}, []
        for client in self._clients:
            try:
                answers[client.url] = {**client.server_info(PROBE_S), **client.model_info(PROBE_S)}
            except RequestError as error:
                errors.append(error)
        if not answers:
            raise WeightSyncError(f"weight sync to version {version}: no server answers: {errors[0]}")
        for error in errors:
            self._report(f"{error.url} is left out of weight version {version}, and gets no requests: {error}")
        known = {url: engine.started for url, engine in self._engines.items()}
        reached = [client for client in self._clients if client.url in answers]
        same = [client for client in reached if known.get(client.url) == answers[client.url].get("startup_time")]
        for client in same:
            found = answers[client.url]["weight_version"]
            if client in self._taking_part and found != str(self._version):
                raise WeightSyncError(
                    f"weight sync to version {version}: {client.url} reports weight version {found}, this run sent"
                    f" {self._version}; does another run send weights to it?"
                )
        if same == self._taking_part:
            return
        for client in reached:
            if client.url in known and client not in same:
                self._report(f"{client.url} was started anew: all of its weights are sent and checked again")
        self._close_transport()
        self._taking_part[:] = reached
        self._engines = {}

    # checks

    def _prove(self, version: int, proof: Proof) -> int:
        """How many parameters of engine ranks are proven to hold what was sent."""
        answers = self._guarded(version, "taking checksums", proof.ask)
        wrong = proof.differing(answers)
        if wrong:
            raise self._failure(version, wrong)
        self._prover.remember(proof, answers)
        return proof.num_checked

    def _checksums(self, version: int) -> dict[str, list[Checksums]]:
        """URL -> [engine rank] checksums of all parameters."""
        answers = self._guarded(version, "taking checksums", lambda client: client.weights_checker("checksum"))
        return {url: rank_checksums(answer) for url, answer in answers.items()}

    def _compared(self, a: dict[str, list[Checksums]], b: dict[str, list[Checksums]]) -> Iterable[tuple[str, bool]]:
        """("PARAMETER of URL rank R of S", whether both have the same checksum)."""
        for url, ranks in a.items():
            for rank, checksums in enumerate(ranks):
                for name, value in checksums.items():
                    yield f"{name} of {self._engines[url].label(rank)}", b[url][rank].get(name) == value

    def _check_version(self, version: int) -> None:
        for url, found in self._guarded(version, "reading the version", lambda client: client.weight_version()).items():
            if found != str(version):
                raise self._failure(version, f"{url} reports weight version {found} after the update")

    # calls

    def _guarded(self, version: int, what: str, call: Callable[[SGLangClient], Any]) -> dict[str, Any]:
        try:
            return self._on_all(what, call)
        except (RequestError, TimeoutError) as error:
            raise self._failure(version, f"{what}: {error}") from error

    def _step(self, version: int, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except FAILURES as error:
            raise self._failure(version, f"{what}: {error}") from error

    def _on_all(self, what: str, call: Callable[[SGLangClient], Any]) -> dict[str, Any]:
        tasks = {client.url: (lambda client=client: call(client)) for client in self._taking_part}
        return run_all(tasks, self._config.timeout_s, what)

    def _failure(self, version: int, message: str) -> WeightSyncError:
        self._prove_all = True
        return WeightSyncError(
            f"weight sync to version {version} failed, {', '.join(self.urls)} stay paused: {message}"
        )
