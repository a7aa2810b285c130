"""Which rank holds which block of which HF tensor, from the family's table and the ranks' places in the layout.

Every rank computes the plan of all ranks by itself: no message is needed to agree on it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from gspo_megatron.weights.families import Family, Row
from gspo_megatron.weights.rules import Block, Composition, ModelShape, shard_blocks, whole_segments


@dataclass(frozen=True)
class Place:
    """What of the model one rank holds. Layers and experts are counted over the whole model, from 0 on."""

    rank: int
    tensor_rank: int
    tensor_size: int
    expert_tensor_rank: int
    expert_tensor_size: int
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    has_embedding: bool
    has_output: bool
    """Final norm and output layer."""
    dense_replica: int
    """0 on one of the ranks that hold the same dense parameters (data and context parallel)."""
    expert_replica: int
    """0 on one of the ranks that hold the same experts."""


def hf_shapes(family: Family, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every HF tensor of the model with its shape, in the order of the family's table, layer by layer."""
    everything = Place(
        0, 0, 1, 0, 1, tuple(range(shape.num_layers)), tuple(range(shape.num_experts)), True, True, 0, 0
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for _, composition, _ in _parameters(family, shape, everything):
        lengths: dict[str, int] = defaultdict(int)
        for segment in whole_segments(composition):
            lengths[segment.hf] += segment.length
        for hf, length in lengths.items():
            if composition.other is None:
                shapes[hf] = (length,)
            else:
                shapes[hf] = (composition.other, length) if composition.axis == 1 else (length, composition.other)
    return shapes


def tensor_faults(found: Mapping[str, tuple[int, ...]], family: Family, shape: ModelShape) -> list[str]:
    """How a checkpoint's tensors (name -> shape) differ from what config.json and the family's table ask for, one line a
    kind of fault."""
    expected = hf_shapes(family, shape)
    ignored = [re.compile(pattern) for pattern in family.ignored]
    if shape.tied_embeddings:
        ignored.append(re.compile(r"lm_head\.weight"))
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(n for n in found.keys() - expected.keys() if not any(p.fullmatch(n) for p in ignored))
    wrong = [n for n in sorted(expected.keys() & found.keys()) if tuple(found[n]) != expected[n]]
    faults = []
    if missing:
        faults.append(f"{len(missing)} tensors are missing: {_some(missing)}; copy the checkpoint again")
    if unknown:
        faults.append(f"{len(unknown)} tensors belong to no {family.architecture}: {_some(unknown)}")
    if wrong:
        name = wrong[0]
        faults.append(
            f"{len(wrong)} tensors have another shape than config.json says: {name} is {list(found[name])}, not "
            f"{list(expected[name])}"
        )
    return faults


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def blocks_of(family: Family, shape: ModelShape, place: Place) -> dict[str, list[Block]]:
    """Canonical Megatron name (global layer and expert) -> the blocks of this rank's shard, every parameter of it."""
    blocks = {}
    for param, composition, is_expert in _parameters(family, shape, place):
        rank, size = _cut(place, is_expert)
        blocks[param] = shard_blocks(param, composition, rank, size)
    return blocks


def owned_blocks(family: Family, shape: ModelShape, place: Place) -> list[Block]:
    """The blocks that this rank is the one to send, so that over all ranks every HF element is sent exactly once."""
    owned: list[Block] = []
    parameters = _parameters(family, shape, place, dense=place.dense_replica == 0, experts=place.expert_replica == 0)
    for param, composition, is_expert in parameters:
        rank, size = _cut(place, is_expert)
        tied_copy = shape.tied_embeddings and param == _OUTPUT
        if not tied_copy and (composition.axis is not None or rank == 0):
            owned += [block for block in shard_blocks(param, composition, rank, size) if block.hf is not None]
    return owned


_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def _cut(place: Place, is_expert: bool) -> tuple[int, int]:
    if is_expert:
        return place.expert_tensor_rank, place.expert_tensor_size
    return place.tensor_rank, place.tensor_size


def _parameters(
    family: Family, shape: ModelShape, place: Place, dense: bool = True, experts: bool = True
) -> Iterable[tuple[str, Composition, bool]]:
    """(canonical global name, composition, whether it belongs to an expert) of all parameters of a place."""
    for row in family.rows if dense else ():
        if "{L}" not in row.megatron and _holds(row.megatron, shape, place):
            yield row.megatron, row.rule(_tied(family, shape, row), shape, place.tensor_size), False
    for layer in place.layers:
        for row in family.rows:
            is_expert = "{E}" in row.megatron
            if "{L}" not in row.megatron or not (experts if is_expert else dense):
                continue
            for expert in place.experts if is_expert else (0,):
                hf = tuple(name.format(L=layer, E=expert) for name in row.hf)
                yield row.megatron.format(L=layer, E=expert), row.rule(hf, shape, _cut(place, is_expert)[1]), is_expert


def _holds(megatron: str, shape: ModelShape, place: Place) -> bool:
    if megatron == _EMBEDDING:
        return place.has_embedding
    if megatron == _OUTPUT and shape.tied_embeddings:
        # The last stage keeps a copy of the embedding, unless it is the first stage too.
        return place.has_output and not place.has_embedding
    return place.has_output


def _tied(family: Family, shape: ModelShape, row: Row) -> tuple[str, ...]:
    if row.megatron == _OUTPUT and shape.tied_embeddings:
        return next(other.hf for other in family.rows if other.megatron == _EMBEDDING)
    return row.hf


@dataclass(frozen=True)
class Bucket:
    """HF tensors that travel together, with the blocks each rank contributes, in the order in which it packs them."""

    names: tuple[str, ...]
    sources: dict[int, tuple[Block, ...]]
    num_bytes: int


def plan_buckets(
    family: Family, shape: ModelShape, places: Iterable[Place], element_size: int, bucket_bytes: int
) -> list[Bucket]:
    """Cut all HF tensors into buckets of at most `bucket_bytes` (a larger tensor has a bucket of its own).

    Raises AssertionError where the blocks of all places don't add up to the tensors: a fault in a table.
    """
    shapes = hf_shapes(family, shape)
    by_name: dict[str, list[tuple[int, Block]]] = defaultdict(list)
    for place in places:
        for block in owned_blocks(family, shape, place):
            by_name[block.hf].append((place.rank, block))
    for name, size in shapes.items():
        sent = sum(block.numel for _, block in by_name[name])
        assert sent == prod(size), f"{name}: ranks hold {sent} of {prod(size)} elements"
    buckets: list[Bucket] = []
    names: list[str] = []
    num_bytes = 0
    for name, size in shapes.items():
        if names and num_bytes + prod(size) * element_size > bucket_bytes:
            buckets.append(_bucket(names, by_name, num_bytes))
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += prod(size) * element_size
    return [*buckets, _bucket(names, by_name, num_bytes)]


def _bucket(names: list[str], by_name: dict[str, list[tuple[int, Block]]], num_bytes: int) -> Bucket:
    sources: dict[int, list[Block]] = defaultdict(list)
    for name in names:
        for rank, block in by_name[name]:
            sources[rank].append(block)
    return Bucket(tuple(names), {rank: tuple(blocks) for rank, blocks in sources.items()}, num_bytes)
