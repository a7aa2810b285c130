"""Several trainer ranks that send weights to the same engines, each in a group of its own with all engine ranks.

Rank 0 leads: it pauses and checks the engines, and tells the other ranks when to join groups and when to send. An
engine takes one bucket at a time; two senders that came to two engines in a different order would wait for each other
for ever, so that senders take turns, in the order of the reshard plan, while the next bucket of each is on its way to
it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gspo_megatron.config import WeightsConfig
from gspo_megatron.rollout.client import SGLangClient
from gspo_megatron.rollout.errors import RequestError, WeightSyncError
from gspo_megatron.rollout.proof import Expected
from gspo_megatron.rollout.transports import Bucket, Setting
from gspo_megatron.rollout.transports.distributed import DistributedTransport

Spec = tuple[torch.dtype, tuple[int, ...]]
FAILURES = (RequestError, TimeoutError, OSError, RuntimeError)


@dataclass(frozen=True)
class Part:
    """What one rank sent; `error` is empty where all went well."""

    specs: Mapping[str, Spec] = field(default_factory=dict)
    num_bytes: int = 0
    num_buckets: int = 0
    error: str = ""
    checksums: tuple[list[dict[str, tuple[str, ...]]], ...] = ()
    """One for each proof that was asked for: what engine ranks must hold of what this rank sent."""


class Turns:
    """Lets ranks act in a fixed order, over `group` (gloo), each told whether one before it failed."""

    def __init__(self, order: Sequence[int], rank: int, group: ProcessGroup | None):
        self._order, self._rank, self._group = order, rank, group
        self.own = [position for position, sender in enumerate(order) if sender == rank]
        self._failed = False

    def wait(self, position: int) -> bool:
        """True where no one has failed so far. Raises RuntimeError where the rank before is gone or too slow."""
        before = self._order[position - 1] if position else self._rank
        if before != self._rank:
            word = torch.zeros(1, dtype=torch.int64)
            dist.recv(word, src=before, group=self._group)
            self._failed |= bool(word)
        return not self._failed

    def pass_on(self, position: int, failed: bool) -> None:
        self._failed |= failed
        after = self._order[position + 1] if position + 1 < len(self._order) else self._rank
        if after != self._rank:
            dist.send(torch.tensor([int(self._failed)]), dst=after, group=self._group)


class Crew:
    """All trainer ranks in weight syncs. `order`: the sender of every bucket of the plan, in its order. `export`: gives
    this rank's buckets (names, tensors, flat [bytes] uint8), and is run to its end by all ranks at once. `group`: all
    trainer ranks, over gloo; its time-out bounds every wait for another rank."""

    def __init__(
        self,
        config: WeightsConfig,
        backend: str,
        order: Sequence[int],
        export: Callable[[], Iterator[Any]],
        group: ProcessGroup | None = None,
    ):
        self._config, self._backend, self._order, self._export, self._group = config, backend, order, export, group
        self._rank = dist.get_rank()
        self._senders = list(dict.fromkeys([0, *order]))
        self._clients: list[SGLangClient] = []
        self._transport: DistributedTransport | None = None

    # rank 0

    @contextlib.contextmanager
    def lead(self) -> Iterator[None]:
        """What rank 0 does with the engines while the others `follow`; they end as this does, with its error."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the first error is the one to tell
                self._tell("end", f"{type(error).__name__}: {error}")
            raise
        self._tell("end", "")

    def transport(self, setting: Setting) -> "LeadingTransport":
        return LeadingTransport(setting, self)

    def connect_all(self, urls: Sequence[str], connect: Callable[[], None]) -> None:
        """`connect` rank 0, then the other senders one after the other. Raises RuntimeError naming the rank."""
        self._tell("connect", list(urls))
        error = self._in_turn(connect)
        if error:
            raise RuntimeError(error)

    def send(self, version: int, transport: DistributedTransport, proofs: Sequence[Expected]) -> list[Part]:
        """What each rank sent, by rank; rank 0 sends its own by `transport`. None raises: a failure is in its part."""
        self._tell("send", (version, [proof.made_from for proof in proofs]))
        return self._gather(self._take_part(version, transport, proofs))

    # other ranks

    def follow(self) -> None:
        """Do what rank 0 says until it ends. Raises WeightSyncError with its message where it failed."""
        while True:
            what, value = self._hear()
            if what == "connect":
                self._in_turn(lambda urls=value: self._join(urls))
            elif what == "send":
                version, proofs = value
                self._gather(self._take_part(version, self._transport, [Expected(*made_from) for made_from in proofs]))
            elif value:
                raise WeightSyncError(f"rank 0 failed: {value}")
            else:
                return

    def close(self) -> None:
        """Leave the engines' group, where this rank (not rank 0) is in one; servers that are gone are no hindrance."""
        transport, self._transport = self._transport, None
        if transport is not None:
            with contextlib.suppress(*FAILURES):
                transport.close()
        for client in self._clients:
            client.close()
        self._clients = []

    # all

    def _join(self, urls: Sequence[str]) -> None:
        self.close()
        self._clients = [SGLangClient(url, self._config.timeout_s) for url in urls]
        transport = DistributedTransport(Setting(self._clients, self._config, self._backend, Path(), Path()))
        transport.connect()
        self._transport = transport

    def _in_turn(self, connect: Callable[[], None]) -> str:
        """Each sender connects while the others wait: an engine that joins one group answers nobody else."""
        for sender in self._senders:
            box = [""]
            if sender == self._rank:
                try:
                    connect()
                except Exception as error:
                    box[0] = f"rank {sender}: {type(error).__name__}: {error}"
            dist.broadcast_object_list(box, src=sender, group=self._group)
            if box[0]:
                return box[0]
        return ""

    def _take_part(self, version: int, transport: DistributedTransport | None, proofs: Sequence[Expected]) -> Part:
        """Send this rank's buckets in its turns. After a failure anywhere all ranks go on exchanging, without sending,
        so that none waits for another."""
        turns, buckets = Turns(self._order, self._rank, self._group), self._export()
        specs: dict[str, Spec] = {}
        num_bytes, done, error = 0, 0, ""
        for position in turns.own:
            try:
                bucket = next(buckets, None)
                if turns.wait(position) and not error:
                    assert bucket is not None, "fewer buckets than planned"
                    _send(bucket, transport, proofs)
                    specs |= {
                        name: (t.dtype, tuple(t.shape)) for name, t in zip(bucket.names, bucket.tensors, strict=True)
                    }
                    num_bytes, done = num_bytes + bucket.flat.numel(), done + 1
            except Exception as fault:
                error = error or self._fault(version, done, specs, fault)
            with contextlib.suppress(RuntimeError):  # a rank that is gone is found by those who wait for it
                turns.pass_on(position, bool(error))
        try:
            for _ in buckets:
                pass
        except RuntimeError as fault:
            error = error or self._fault(version, done, specs, fault)
        return Part(specs, num_bytes, done, error, tuple(proof.checksums() for proof in proofs))

    def _fault(self, version: int, done: int, specs: Mapping[str, Any], fault: Exception) -> str:
        after = next(reversed(specs), "the start") if specs else "the start"
        text = str(fault) if isinstance(fault, SendError) else f"after {after}: {type(fault).__name__}: {fault}"
        return f"rank {self._rank}, version {version}: bucket {done} {text}"

    def _tell(self, what: str, value: Any) -> None:
        dist.broadcast_object_list([what, value], src=0, group=self._group)

    def _hear(self) -> tuple[str, Any]:
        box: list[Any] = [None, None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0], box[1]

    def _gather(self, part: Part) -> list[Part]:
        """The parts of all ranks, on rank 0."""
        parts: list[Part] | None = [part] * dist.get_world_size(self._group) if self._rank == 0 else None
        dist.gather_object(part, parts, dst=0, group=self._group)
        return parts or []


class SendError(RuntimeError):
    """A bucket did not reach the engines; names its tensors."""


def _send(bucket: Any, transport: DistributedTransport, proofs: Iterable[Expected]) -> None:
    dtypes = tuple(tensor.dtype for tensor in bucket.tensors)
    shapes = tuple(tuple(tensor.shape) for tensor in bucket.tensors)
    for proof in proofs:
        proof.add(zip(bucket.names, bucket.tensors, strict=True))
    try:
        transport.send_bucket(Bucket(bucket.names, dtypes, shapes, bucket.flat))
    except FAILURES as error:
        names = f"{bucket.names[0]} to {bucket.names[-1]}" if len(bucket.names) > 1 else bucket.names[0]
        raise SendError(f"({names}): {error}") from error


class LeadingTransport:
    """Rank 0's transport of a crew: connects all senders, and sends what all of them have.

    Raises as `DistributedTransport` does, naming the rank.
    """

    def __init__(self, setting: Setting, crew: Crew):
        self._setting, self._crew, self._own = setting, crew, DistributedTransport(setting)
        self.device = self._own.device

    @property
    def connected(self) -> bool:
        return self._own.connected

    def connect(self) -> None:
        self._crew.connect_all([client.url for client in self._setting.clients], self._own.connect)

    def allocate(self, size: int) -> Tensor:
        return self._own.allocate(size)

    def begin(self, version: int) -> None:
        self._own.begin(version)

    def send_bucket(self, bucket: Bucket) -> None:
        self._own.send_bucket(bucket)

    def send_all(self, version: int, proofs: Sequence[Expected], specs: Mapping[str, Spec]) -> tuple[int, int]:
        """A whole update by all senders: bytes and buckets that they sent. Raises RuntimeError with what failed, or is
        not what `specs` (HF name -> dtype and shape) say; all senders must connect anew then."""
        self.begin(version)
        parts = self._crew.send(version, self._own, proofs)
        faults = "; ".join(part.error for part in parts if part.error) or spec_faults(parts, specs)
        if faults:
            with contextlib.suppress(*FAILURES):
                self._own.close()
            raise RuntimeError(faults)
        for part in parts[1:]:
            for proof, found in zip(proofs, part.checksums, strict=True):
                proof.merge(found)
        self.finish(version)
        return sum(part.num_bytes for part in parts), sum(part.num_buckets for part in parts)

    def finish(self, version: int) -> None:
        self._own.finish(version)

    def abort(self) -> None:
        self._own.abort()

    def close(self) -> None:
        self._own.close()


def spec_faults(parts: Sequence[Part], expected: Mapping[str, Spec]) -> str:
    """What was sent twice, in another dtype or shape, or not at all; empty where nothing was."""
    sent: dict[str, tuple[int, Spec]] = {}
    for rank, part in enumerate(parts):
        for name, spec in part.specs.items():
            if name in sent:
                return f"{name} was sent by rank {sent[name][0]} and by rank {rank}"
            if name not in expected:
                return f"{name} of rank {rank} is not expected; the model has no such tensor"
            if spec != (expected[name][0], tuple(expected[name][1])):
                return f"{name} of rank {rank} has dtype and shape {spec}, expected {expected[name]}"
            sent[name] = rank, spec
    missing = [name for name in expected if name not in sent]
    return (
        f"tensors not sent: {', '.join(missing[:10])}" + f" and {len(missing) - 10} more" * (len(missing) > 10)
        if missing
        else ""
    )
