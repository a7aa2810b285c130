"""Which rank brings which block of which HF tensor to which sender, in what order, with how much memory.

Computed from the layout alone by every rank for itself, no message and no tensor needed. A *sender* is a rank that gets
whole tensors, to hand them to engines or to write them. Tensors go in *rounds*: in each round a sender gets at most one
bucket, and every rank that holds blocks of it sends it one message, however many tensors or experts are in it. What a
rank holds for a round (its bucket, what it received apart from it, what it packed for others) stays within
`bucket_bytes`, and two rounds are under way at a time.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from gspo_megatron.weights.families import Family
from gspo_megatron.weights.plan import Place, blocks_of, hf_shapes, owned_blocks
from gspo_megatron.weights.rules import Block, ModelShape

RANKS_PER_NODE = 8


def first_rank(places: Sequence[Place]) -> list[int]:
    """The first rank alone."""
    return [places[0].rank]


def one_per_stage(places: Sequence[Place], ranks_per_node: int = RANKS_PER_NODE) -> list[int]:
    """One rank of every pipeline stage, on different nodes where stages share them."""
    stages: dict[object, list[int]] = defaultdict(list)
    for place in places:
        if place.tensor_rank == 0:
            stages[_stage(place)].append(place.rank)
    used: Counter[int] = Counter()
    senders = []
    for ranks in stages.values():
        sender = min(ranks, key=lambda rank: (used[rank // ranks_per_node], rank))
        used[sender // ranks_per_node] += 1
        senders.append(sender)
    return senders


def all_writers(places: Sequence[Place]) -> list[int]:
    """Every rank: what is written is then balanced over the ranks that hold it."""
    return [place.rank for place in places]


SENDERS = {"first": first_rank, "stages": one_per_stage, "all": all_writers}
"""Name -> which ranks get tensors."""


@dataclass(frozen=True)
class Transfer:
    """What one rank packs, block after block in the order of `blocks`, and sends as one message of `num_bytes`.

    `offset`: where in the bucket the message belongs as it is, or None where its blocks have to be put in their places.
    """

    source: int
    blocks: tuple[Block, ...]
    num_bytes: int
    offset: int | None


@dataclass(frozen=True)
class SenderBucket:
    """Whole tensors one after the other, without gaps, `offsets` in bytes; each lies at a multiple of its item size."""

    round: int
    sender: int
    names: tuple[str, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    local: tuple[Block, ...]
    """What the sender holds itself."""
    transfers: tuple[Transfer, ...]

    @property
    def staged_bytes(self) -> int:
        return sum(transfer.num_bytes for transfer in self.transfers if transfer.offset is None)


@dataclass(frozen=True)
class ReshardPlan:
    """`specs`: HF name -> dtype and shape, all tensors in the order of the family's table."""

    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    senders: tuple[int, ...]
    buckets: tuple[SenderBucket, ...]
    """By round, and within a round by rank of the sender."""
    num_rounds: int
    num_ranks: int
    bucket_bytes: int
    lower_bound_bytes: int
    """What any choice among these senders has to move: of every tensor, what the sender holding most of it lacks."""

    @cached_property
    def total_bytes(self) -> int:
        return sum(nbytes(spec) for spec in self.specs.values())

    @cached_property
    def moved_bytes(self) -> int:
        return sum(transfer.num_bytes for bucket in self.buckets for transfer in bucket.transfers)

    @cached_property
    def sender_of(self) -> dict[str, int]:
        return {name: bucket.sender for bucket in self.buckets for name in bucket.names}

    @cached_property
    def sender_bytes(self) -> dict[int, int]:
        """Bytes of whole tensors that each sender gets."""
        totals = dict.fromkeys(self.senders, 0)
        for bucket in self.buckets:
            totals[bucket.sender] += bucket.num_bytes
        return totals

    def buckets_of(self, rank: int) -> list[SenderBucket]:
        """In the order in which the sender gets them."""
        return [bucket for bucket in self.buckets if bucket.sender == rank]

    def packed_by(self, rank: int) -> list[tuple[SenderBucket, Transfer]]:
        """What this rank sends to others, in order."""
        return [(bucket, part) for bucket in self.buckets for part in bucket.transfers if part.source == rank]

    def messages(self, rank: int) -> int:
        """Messages that this rank sends or receives."""
        received = sum(len(bucket.transfers) for bucket in self.buckets_of(rank))
        return received + len(self.packed_by(rank))

    @cached_property
    def round_bytes(self) -> dict[int, dict[int, int]]:
        """Rank -> round -> bytes that it holds for it."""
        held: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for bucket in self.buckets:
            held[bucket.sender][bucket.round] += bucket.num_bytes + bucket.staged_bytes
            for transfer in bucket.transfers:
                held[transfer.source][bucket.round] += transfer.num_bytes
        return held

    def slot_bytes(self, rank: int) -> tuple[int, int]:
        """Sizes of the two buffers that this rank's even and odd rounds take turns in."""
        rounds = self.round_bytes.get(rank, {})
        even, odd = ([size for number, size in rounds.items() if number % 2 == parity] for parity in (0, 1))
        return max(even, default=0), max(odd, default=0)

    @cached_property
    def peak_bytes(self) -> int:
        """The most that a rank holds beside its parameters."""
        return max(sum(self.slot_bytes(rank)) for rank in range(self.num_ranks))

    def summary(self) -> str:
        """Tensors, senders, rounds, bytes against their bound, memory; for people."""
        mib, sizes = 2**20, self.sender_bytes.values()
        ratio = self.moved_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0
        return (
            f"{len(self.specs)} tensors, {self.total_bytes / mib:,.0f} MiB to {len(self.senders)} sender(s) "
            f"({min(sizes) / mib:,.0f} to {max(sizes) / mib:,.0f} MiB each) in {len(self.buckets)} buckets, "
            f"{self.num_rounds} rounds; {self.moved_bytes / mib:,.0f} MiB moved between ranks, {ratio:.3f} of the lower "
            f"bound; at most {self.peak_bytes / mib:,.0f} MiB extra on a rank"
        )


def nbytes(spec: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = spec
    return prod(shape) * dtype.itemsize


class _Piece(NamedTuple):
    """A block, and the number of the cell of ranks that hold it."""

    cell: int
    block: Block


class _Item(NamedTuple):
    """A tensor, or several that must be in one bucket, on the way to a sender: which rank gives which block."""

    names: tuple[str, ...]
    sources: tuple[tuple[int, Block], ...]
    needs: tuple[tuple[int, int], ...]
    """(rank, bytes that it holds for this item while its round is under way)."""
    key: tuple[int, bool]
    """Items of one bucket have one key: size of an element, whether one rank holds all of it."""


def plan_reshard(
    family: Family,
    shape: ModelShape,
    places: Sequence[Place],
    dtypes: Mapping[str, torch.dtype],
    senders: Sequence[int],
    bucket_bytes: int,
    together: Mapping[str, frozenset[str]] | None = None,
) -> ReshardPlan:
    """Bring every HF tensor to one of the `senders` (ranks), in buckets of at most `bucket_bytes`.

    A tensor goes to the sender that holds most of it; where several hold as much, or none anything, to the one of them
    (of the tensor's own pipeline stage, if it has one) with the fewest bytes so far. A tensor that is larger than a
    bucket has one of its own. `together`: HF name -> all names, of one dtype, that must be in one bucket with it.
    Raises AssertionError where the blocks of all places don't add up to the tensors: a fault
    in a table.
    """
    assert [place.rank for place in places] == list(range(len(places))), "one place a rank, by rank"
    assert senders and len(set(senders)) == len(senders) and bucket_bytes > 0
    shapes = hf_shapes(family, shape)
    specs = {name: (dtypes[name], size) for name, size in shapes.items()}
    cells, pieces = _pieces(family, shape, places)
    for name, (_, size) in specs.items():
        held = sum(piece.block.numel for piece in pieces[name])
        assert held == prod(size), f"{name}: ranks hold {held} of {prod(size)} elements"
    units = list(dict.fromkeys(tuple(sorted((together or {}).get(name, {name}))) for name in specs))
    sender_of, bound = _assign(units, specs, pieces, cells, places, senders)
    queues = _queues(units, specs, pieces, cells, sender_of, senders)
    rounds = _schedule(queues, bucket_bytes)
    buckets = [
        _bucket(number, sender, items, specs)
        for number, filled in enumerate(rounds)
        for sender, items in sorted(filled.items())
    ]
    return ReshardPlan(specs, tuple(senders), tuple(buckets), len(rounds), len(places), bucket_bytes, bound)


def _stage(place: Place) -> Place:
    """Equal for all ranks of a pipeline stage."""
    return replace(
        place, rank=0, tensor_rank=0, expert_tensor_rank=0, experts=(), dense_replica=0, expert_replica=1
    )  # fmt: skip


def _pieces(
    family: Family, shape: ModelShape, places: Sequence[Place]
) -> tuple[list[tuple[int, ...]], dict[str, list[_Piece]]]:
    """The cells (ranks that hold the same blocks), and the pieces of every tensor, each element once."""
    dense, experts, stages = defaultdict(list), defaultdict(list), defaultdict(list)
    for place in places:
        stage = _stage(place)
        stages[stage].append(place.rank)
        dense[replace(stage, tensor_rank=place.tensor_rank)].append(place.rank)
        experts[replace(place, rank=0, tensor_rank=0, dense_replica=1, expert_replica=0)].append(place.rank)
    cells: list[tuple[int, ...]] = []
    pieces: dict[str, list[_Piece]] = defaultdict(list)

    def add(ranks: Sequence[int], blocks: Iterable[Block]) -> None:
        for block in blocks:
            pieces[block.hf].append(_Piece(len(cells), block))
        cells.append(tuple(ranks))

    for stage, ranks in stages.items():
        copied = _on_every_tensor_rank(family, shape, stage)
        add(ranks, copied)
        for tensor_rank in range(stage.tensor_size):
            place = replace(stage, tensor_rank=tensor_rank)
            if place in dense:
                add(dense[place], [block for block in owned_blocks(family, shape, place) if block not in copied])
    for place, ranks in experts.items():
        add(ranks, owned_blocks(family, shape, place))
    return cells, pieces


def _on_every_tensor_rank(family: Family, shape: ModelShape, stage: Place) -> dict[Block, None]:
    """Blocks that all tensor ranks of a stage hold, say norms, in order."""
    if stage.tensor_size == 1:
        return {}
    other = blocks_of(family, shape, replace(stage, tensor_rank=1))
    there = {block for blocks in other.values() for block in blocks}
    return {block: None for block in owned_blocks(family, shape, stage) if block in there}


def _assign(units, specs, pieces, cells, places, senders) -> tuple[dict[tuple[str, ...], int], int]:
    """Unit (names that stay together) -> sender, largest first; and the bytes that no assignment to these senders can
    avoid moving."""
    is_sender, stage_of = set(senders), {place.rank: _stage(place) for place in places}
    senders_in = [[rank for rank in ranks if rank in is_sender] for ranks in cells]
    sizes = {unit: sum(nbytes(specs[name]) for name in unit) for unit in units}
    load, bound, sender_of, known = dict.fromkeys(senders, 0), 0, {}, {}
    for unit in sorted(units, key=lambda unit: -sizes[unit]):
        key = tuple(
            (piece.cell, piece.block.numel * specs[name][0].itemsize) for name in unit for piece in pieces[name]
        )  # fmt: skip
        if key not in known:
            held: Counter[int] = Counter()
            for cell, size in key:
                for rank in senders_in[cell]:
                    held[rank] += size
            most = max(held.values(), default=0)
            if most:
                near = [rank for rank in senders if held[rank] == most]
            else:
                stages = {stage_of[cells[cell][0]] for cell, _ in key}
                near = [rank for rank in senders if stage_of[rank] in stages]
            known[key] = (near or list(senders), most)
        near, most = known[key]
        sender_of[unit] = min(near, key=load.__getitem__)
        load[sender_of[unit]] += sizes[unit]
        bound += sizes[unit] - most
    return sender_of, bound


def _queues(units, specs, pieces, cells, sender_of, senders) -> dict[int, deque[_Item]]:
    """What each sender gets, in order: one item size and kind after the other, else as in the table."""
    nearest: dict[tuple[int, int], int] = {}

    def source(sender: int, cell: int) -> int:
        if (sender, cell) not in nearest:
            nearest[sender, cell] = min(cells[cell], key=lambda rank: abs(rank - sender))
        return nearest[sender, cell]

    queues: dict[int, list[_Item]] = {sender: [] for sender in senders}
    for unit in units:
        sender, item_size = sender_of[unit], specs[unit[0]][0].itemsize
        assert all(specs[name][0].itemsize == item_size for name in unit), f"{unit}: of several dtypes"
        sources = tuple((source(sender, piece.cell), piece.block) for name in unit for piece in pieces[name])
        needs: dict[int, int] = {sender: sum(nbytes(specs[name]) for name in unit)}
        for rank, block in sources:
            if rank != sender:
                needs[rank] = needs.get(rank, 0) + block.numel * item_size
        is_whole = len({rank for rank, _ in sources}) == 1
        if not is_whole:  # parts of others are received apart from the bucket
            needs[sender] += sum(size for rank, size in needs.items() if rank != sender)
        queues[sender].append(_Item(unit, sources, tuple(needs.items()), (item_size, is_whole)))
    return {
        sender: deque(sorted(items, key=lambda item: (-item.key[0], item.key[1])))
        for sender, items in queues.items()
    }  # fmt: skip


def _schedule(queues: dict[int, deque[_Item]], bucket_bytes: int) -> list[dict[int, list[_Item]]]:
    """[round] sender -> its bucket's tensors: as many as all ranks that take part have room for, of which a 64th is
    left to what messages need beside their bytes.

    The senders take turns at being first, so that each comes to its due.
    """
    room = bucket_bytes - bucket_bytes // 64
    rounds: list[dict[int, list[_Item]]] = []
    waiting = [sender for sender, queue in queues.items() if queue]
    while waiting:
        used: dict[int, int] = defaultdict(int)
        turn = len(rounds) % len(waiting)
        filled = {sender: _fill(queues[sender], used, room) for sender in waiting[turn:] + waiting[:turn]}
        rounds.append({sender: items for sender, items in filled.items() if items})
        waiting = [sender for sender in waiting if queues[sender]]
    return rounds


def _fill(queue: deque[_Item], used: dict[int, int], room: int) -> list[_Item]:
    items: list[_Item] = []
    while queue:
        item = queue[0]
        if items and item.key != items[0].key:
            break
        fits = all(used[rank] + size <= room for rank, size in item.needs)
        if not fits and (items or any(used[rank] for rank, _ in item.needs)):
            break
        for rank, size in item.needs:
            used[rank] += size
        items.append(queue.popleft())
    return items


def _bucket(number: int, sender: int, items: list[_Item], specs) -> SenderBucket:
    # tensors of one rank lie side by side, so that its message can be received in place
    items = sorted(items, key=lambda item: item.sources[0][0]) if items[0].key[1] else items
    starts: dict[str, int] = {}
    end = 0
    for name in (name for item in items for name in item.names):
        starts[name] = end
        end += nbytes(specs[name])
    parts: dict[int, list[tuple[Block, int | None, int]]] = defaultdict(list)
    for rank, block in (source for item in items for source in item.sources):
        dtype, shape = specs[block.hf]
        parts[rank].append(
            (block, _place_in(block, shape, dtype.itemsize, starts[block.hf]), block.numel * dtype.itemsize)
        )
    local = tuple(block for block, _, _ in parts.pop(sender, ()))
    transfers = tuple(_transfer(rank, part) for rank, part in sorted(parts.items()))
    return SenderBucket(number, sender, tuple(starts), tuple(starts.values()), end, local, transfers)


def _place_in(block: Block, shape: tuple[int, ...], item_size: int, tensor_offset: int) -> int | None:
    """Offset in the bucket of a block that lies in it in one piece, else None."""
    inner = shape if block.hf_index is None else shape[1:]
    if block.transposed or block.hf_step or any(block.hf_start[1:]) or block.shape[1:] != inner[1:]:
        return None
    elements = (block.hf_index or 0) * prod(inner) + block.hf_start[0] * prod(inner[1:])
    return tensor_offset + elements * item_size


def _transfer(source: int, parts: list[tuple[Block, int | None, int]]) -> Transfer:
    expected = first = parts[0][1]
    for _, offset, size in parts:
        if offset is None or offset != expected:
            first = None
            break
        expected = offset + size
    return Transfer(source, tuple(block for block, _, _ in parts), sum(size for _, _, size in parts), first)
