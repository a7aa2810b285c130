"""Adam's state by whole parameters: where each lies on the data-parallel ranks, and its way to the rank that writes it.

The distributed optimizer lays the parameters into buffers, cuts these into buckets, and has each data-parallel rank
hold an equal range of each bucket, whatever parameters that cuts through (megatron-core, `gbuf_ranges` in
`optimizer/distrib_optimizer.py`). A checkpoint holds whole parameters. Megatron gathers whole buffers on every rank,
and describes the parameters as cut out of them (`sharded_param_state_fully_reshardable`): 28 bytes a parameter of the
rank's part of the model at the peak. Here it describes them as cut out of a tensor without memory, and values go where
they are written.

Floor, with P parameters on a rank and d data-parallel ranks: a rank writes 12 P / d bytes (fp32 parameter, first and
second moment), so that it must hold these once, and (d - 1) / d of them come from other ranks, each byte sent once.
What `StateSpace.fill` takes is that, and two buffers of at most EXCHANGE_BYTES.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn

KEYS = ("param", "exp_avg", "exp_avg_sq")
"""What is stored of a parameter, each in fp32 and in its shape; `param` is the fp32 one."""
EXCHANGE_BYTES = 32 << 20
"""What a rank sends in one exchange with the others of its data-parallel group, and what it gets, at most."""


class Extent(NamedTuple):
    """Elements [start, stop) of one DDP buffer of the optimizer `part`, of one of KEYS; they are of one parameter."""

    part: int
    buffer: int
    key: str
    start: int
    stop: int


class Held(NamedTuple):
    """The range of a buffer in which this rank holds the state of (a part of) a parameter."""

    start: int
    stop: int
    param: nn.Parameter


class StateSpace:
    """The state of all parameters of this rank's part of the model, as one range of elements.

    `parts`: the distributed optimizers. A tensor of that many elements without memory stands for the state where
    Megatron describes it: views of it know their place by their offset.
    """

    def __init__(self, parts: Sequence[MegatronOptimizer]):
        self._parts = parts
        self._places: list[tuple[int, int, str]] = []
        self._starts: list[int] = []
        size = 0
        for number, part in enumerate(parts):
            for index, buffer in enumerate(part.buffers):
                for key in KEYS:
                    self._places.append((number, index, key))
                    self._starts.append(size)
                    size += buffer.numel
        self._elements = torch.empty(size, dtype=torch.float32, device="meta")
        self._bucket_starts = {
            (number, index): [bucket.offset for bucket in buffer.buckets]
            for number, part in enumerate(parts)
            for index, buffer in enumerate(part.buffers)
        }
        self._held = {
            (number, index): sorted(_held_ranges(part, index), key=lambda held: held.start)
            for number, part in enumerate(parts)
            for index in range(len(part.buffers))
        }

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    def describe(self, part: int, model: dict[str, Any], metadata: dict[str, Any]) -> dict[int, Any]:
        """Megatron's description of a part's state by global tensors, its data views of the space.

        `model`: what `sharded_state_dict` says of the chunks, factories not yet applied. Megatron's gather leaves out
        the padding between buckets, which its cutting counts (`get_parameter_state_dp_zero`): with a second bucket,
        which tied embeddings on two pipeline stages have, and overlap_grad_reduce makes, every parameter after the
        first bucket would be described as a piece of its neighbours. Nothing is gathered here.
        """
        optimizer = self._parts[part]
        spaces = {
            place: self._elements[start : start + optimizer.buffers[place[1]].numel]
            for place, start in zip(self._places, self._starts, strict=True)
            if place[0] == part
        }
        optimizer.get_parameter_state_dp_zero = lambda *_, **__: {
            index: {dtype: {key: spaces[part, index, key] for key in KEYS} for dtype in ranges}
            for index, ranges in enumerate(optimizer.gbuf_ranges)
        }
        try:
            return optimizer.sharded_param_state_fully_reshardable(model, True, metadata)
        finally:
            del optimizer.get_parameter_state_dp_zero

    def extent(self, shard: ShardedTensor) -> Extent | None:
        """What a shard stands for; None for one that is no view of the space, but data."""
        if not shard.data.is_meta:
            return None
        same = shard.data.untyped_storage().nbytes() == self._elements.untyped_storage().nbytes()
        assert same and shard.data.is_contiguous(), f"{shard.key} is not stored in the order in which it is held"
        start = shard.data.storage_offset()
        place = bisect_right(self._starts, start) - 1
        start -= self._starts[place]
        return Extent(*self._places[place], start, start + shard.data.numel())

    def fill(self, shards: Sequence[ShardedTensor], device: torch.device) -> None:
        """Give those of this rank's shards that are views of the space their values, in host memory of their own.

        Collective over the data-parallel groups of all parts, whatever shards a rank has. `device`: where the groups
        exchange.
        """
        wanted: list[dict[Extent, Tensor]] = [{} for _ in self._parts]
        for shard in shards:
            extent = self.extent(shard)
            if extent is not None:
                values = torch.empty(tuple(shard.data.shape), dtype=torch.float32)
                wanted[extent.part][extent] = values.view(-1)
                shard.data = values
        for part, targets in zip(self._parts, wanted, strict=True):
            group = part.data_parallel_group
            everyone = [list(targets)]
            if group.size() > 1:
                everyone = [[] for _ in range(group.size())]
                dist.all_gather_object(everyone, list(targets), group=group)
            with torch.no_grad():
                _exchange(self, everyone, targets, group, device)

    def values(self, extent: Extent) -> Tensor:
        """A view of what this rank holds; `extent` must lie within it."""
        held = self._held[extent.part, extent.buffer]
        start, stop, param = held[bisect_right(held, extent.start, key=lambda one: one.start) - 1]
        assert start <= extent.start and extent.stop <= stop
        state = self._parts[extent.part]._get_main_param_and_optimizer_states(param)
        return state[extent.key].view(-1)[extent.start - start : extent.stop - start]

    def cut(self, extent: Extent) -> Iterator[tuple[int, Extent]]:
        """Which rank of the part's data-parallel group holds what of it."""
        part = self._parts[extent.part]
        starts = self._bucket_starts[extent.part, extent.buffer]
        bucket = part.buffers[extent.buffer].buckets[bisect_right(starts, extent.start) - 1]
        share = bucket.grad_data.numel() // part.data_parallel_group.size()
        at = extent.start
        while at < extent.stop:
            rank = (at - bucket.offset) // share
            stop = min(extent.stop, bucket.offset + (rank + 1) * share)
            yield rank, extent._replace(start=at, stop=stop)
            at = stop


def _held_ranges(part: MegatronOptimizer, buffer: int) -> Iterator[Held]:
    for buckets in part.gbuf_ranges[buffer].values():
        for bucket in buckets:
            for param, ranges in bucket["param_map"].items():
                yield Held(ranges["gbuf_world"].start, ranges["gbuf_world"].end, param)


def _exchange(
    space: StateSpace,
    everyone: Sequence[Sequence[Extent]],
    targets: dict[Extent, Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Copy the state into `targets`, from this rank and the others of `group`; `everyone`: what each rank of it wants.

    In rounds, in which each two ranks exchange as much at most as keeps both buffers below EXCHANGE_BYTES.
    """
    me, size = group.rank(), group.size()
    sent: list[list[Extent]] = [[] for _ in range(size)]
    received: list[list[Tensor]] = [[] for _ in range(size)]
    most = 0
    for receiver, extents in enumerate(everyone):
        amounts = [0] * size
        for extent in extents:
            for owner, piece in space.cut(extent):
                amounts[owner] += (piece.stop - piece.start) * (owner != receiver)
                if receiver == me:
                    target = targets[extent][piece.start - extent.start : piece.stop - extent.start]
                if owner == me == receiver:
                    target.copy_(space.values(piece))
                elif owner == me:
                    sent[receiver].append(piece)
                elif receiver == me:
                    received[owner].append(target)
        most = max(most, *amounts)
    if not most:
        return
    quota = max(1, EXCHANGE_BYTES // torch.float32.itemsize // (size - 1))
    out = _Rounds([[piece.stop - piece.start for piece in pieces] for pieces in sent], quota)
    into = _Rounds([[tensor.numel() for tensor in tensors] for tensors in received], quota)
    outgoing, incoming = (torch.empty(rounds.largest, device=device) for rounds in (out, into))
    for number in range(-(-most // quota)):
        sizes, at = out.sizes(number), 0
        for receiver, index, low, high in out.pieces(number):
            piece = sent[receiver][index]
            values = space.values(piece._replace(start=piece.start + low, stop=piece.start + high))
            outgoing[at : at + high - low].copy_(values)
            at += high - low
        arrived = incoming[: sum(into.sizes(number))]
        dist.all_to_all_single(arrived, outgoing[:at], into.sizes(number), sizes, group=group)
        at = 0
        for owner, index, low, high in into.pieces(number):
            received[owner][index][low:high].copy_(arrived[at : at + high - low])
            at += high - low


class _Rounds:
    """For each rank a sequence of pieces, of these lengths, cut into rounds of `quota` elements a rank."""

    def __init__(self, lengths: Sequence[Sequence[int]], quota: int):
        self._quota, self._totals = quota, [sum(one) for one in lengths]
        self._cut: dict[int, list[tuple[int, int, int, int]]] = {}
        for rank, pieces in enumerate(lengths):
            at = 0
            for index, length in enumerate(pieces):
                low = 0
                while low < length:
                    number = at // quota
                    high = min(length, low + (number + 1) * quota - at)
                    self._cut.setdefault(number, []).append((rank, index, low, high))
                    at, low = at + high - low, high

    @property
    def largest(self) -> int:
        """Elements of the first round, which no other exceeds."""
        return sum(self.sizes(0))

    def sizes(self, number: int) -> list[int]:
        """Elements by rank."""
        return [min(self._quota, max(0, total - number * self._quota)) for total in self._totals]

    def pieces(self, number: int) -> list[tuple[int, int, int, int]]:
        """(rank, index, low, high): elements [low, high) of a piece, by rank and then in their order."""
        return self._cut.get(number, [])
