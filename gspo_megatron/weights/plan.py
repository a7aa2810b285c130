"""Which rank holds which block of which HF tensor, from the family's table and the ranks' places in the layout.

Every rank computes the plan of all ranks by itself: no message is needed to agree on it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from gspo_megatron.weights.families import Family, Row
from gspo_megatron.weights.rules import Block, Composition, ModelShape, shard_blocks, whole_segments, without_slice


T = TypeVar("T")


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
    mtp_layers: tuple[int, ...] = ()
    """Multi-token-prediction layers, from 0 on."""


def whole_place(shape: ModelShape) -> Place:
    """One rank that holds the whole model."""
    layers, experts = tuple(range(shape.num_layers)), tuple(range(shape.num_experts))
    return Place(0, 0, 1, 0, 1, layers, experts, True, True, 0, 0, tuple(range(shape.mtp_layers)))


def whole_parameters(family: Family, shape: ModelShape) -> Iterator[tuple[Row, str, Composition]]:
    """(row, canonical name, composition) of every parameter of the model on one rank."""
    return _parameters(family, shape, whole_place(shape))


def hf_shapes(family: Family, shape: ModelShape, place: Place | None = None) -> dict[str, tuple[int, ...]]:
    """Every HF tensor of the model with its shape, in the order of the family's table, layer by layer; with `place`
    those of which a rank there holds something."""
    place = place or whole_place(shape)
    shapes: dict[str, tuple[int, ...]] = {}
    of_row: dict[int, list[tuple[int, ...] | None]] = {}  # alike in all layers and experts
    for row, _, names, _ in _numbered(family, shape, place):
        if id(row) not in of_row:
            sizes = _shapes_in(row.rule(names, shape, _cut(place, row.is_expert)[1]), shape)
            of_row[id(row)] = [sizes.get(name) for name in names]
        for name, size in zip(names, of_row[id(row)], strict=True):
            if size is not None:
                shapes[without_slice(name)] = size
    return shapes


def _shapes_in(composition: Composition, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name, with its slice where it is one -> shape of the whole tensor."""
    lengths: dict[str, int] = {}
    for segment in whole_segments(composition):
        end = segment.start + (segment.length - 1) * segment.step + 1
        lengths[segment.hf] = max(lengths.get(segment.hf, 0), end)
    other, axis = composition.other, composition.axis or 0
    sizes = {hf: (*other[:axis], length, *other[axis:]) for hf, length in lengths.items()}
    sizes = {hf: size[::-1] if composition.transposed else size for hf, size in sizes.items()}
    return {hf: (shape.num_experts, *size) if hf.endswith("]") else size for hf, size in sizes.items()}


def hf_dtypes(family: Family, shape: ModelShape, dtype: T, fp32: T | str = "float32") -> dict[str, T | str]:
    """Every HF tensor with the dtype it has outside the trainer: `dtype`, or `fp32` for those that stay so."""
    dtypes: dict[str, T | str] = {}
    for row, _, composition in whole_parameters(family, shape):
        for segment in whole_segments(composition):
            dtypes[segment.tensor] = fp32 if row.keep_fp32 else dtype
    return dtypes


def tensor_faults(
    found: Mapping[str, tuple[int, ...]], family: Family, shape: ModelShape, place: Place | None = None
) -> list[str]:
    """How a checkpoint's tensors (name -> shape) differ from what config.json and the family's table ask for, one line
    a kind of fault; with `place` only those that a rank there reads are looked at."""
    expected = hf_shapes(family, shape, place)
    if found == expected:
        return []
    missing = sorted(expected.keys() - found.keys())
    unknown = [] if place else _unknown(found.keys() - expected.keys(), family, shape)
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


def _unknown(names: Iterable[str], family: Family, shape: ModelShape) -> list[str]:
    """Those of the names that a checkpoint of the family may not hold beside its table's."""
    ignored = [re.compile(pattern) for pattern in family.ignored]
    if shape.tied_embeddings:
        ignored.append(re.compile(r"lm_head\.weight"))
    dropped = range(shape.num_layers + shape.mtp_layers, shape.num_layers + shape.mtp_layers_in_files)
    ignored += [re.compile(rf"model\.layers\.{layer}\..*") for layer in dropped]
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in ignored))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def num_elements(family: Family, shape: ModelShape, place: Place) -> tuple[int, int]:
    """Elements of the dense parameters and of the experts on a rank, padding of the vocabulary included."""
    counts = {False: 0, True: 0}
    one_expert = replace(place, experts=place.experts[:1])  # all of a layer have one size
    for row, _, composition in _parameters(family, shape, one_expert):
        size = sum(segment.length for part in composition.parts for segment in part) * prod(composition.other)
        cut = 1 if composition.axis is None else _cut(place, row.is_expert)[1]
        counts[row.is_expert] += size // cut * (len(place.experts) if row.is_expert else 1)
    return counts[False], counts[True]


def blocks_of(family: Family, shape: ModelShape, place: Place) -> dict[str, list[Block]]:
    """Canonical Megatron name (global layer and expert) -> the blocks of this rank's shard, every parameter of it."""
    return {param: blocks for _, param, blocks, _ in _shards(family, shape, place)}


def owned_blocks(family: Family, shape: ModelShape, place: Place) -> list[Block]:
    """The blocks that this rank is the one to send, so that over all ranks every HF element is sent exactly once."""
    owned: list[Block] = []
    shards = _shards(family, shape, place, dense=place.dense_replica == 0, experts=place.expert_replica == 0)
    for row, param, blocks, is_cut in shards:
        tied_copy = shape.tied_embeddings and param == _OUTPUT
        if not tied_copy and (is_cut or _cut(place, row.is_expert)[0] == 0):
            owned += [block for block in blocks if block.hf is not None]
    return owned


_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def _cut(place: Place, is_expert: bool) -> tuple[int, int]:
    if is_expert:
        return place.expert_tensor_rank, place.expert_tensor_size
    return place.tensor_rank, place.tensor_size


def _numbered(
    family: Family, shape: ModelShape, place: Place, dense: bool = True, experts: bool = True
) -> Iterator[tuple[Row, str, tuple[str, ...], int]]:
    """(row, canonical global name, names of the HF tensors, expert) of all parameters of a place, `dense` and `experts`
    or one of them."""
    for row in family.rows if dense else ():
        if not (row.is_layer or row.is_mtp) and row.exists(shape, None) and _holds(row.megatron, shape, place):
            yield row, row.megatron, _tied(family, shape, row), 0
    layers = [(row, layer, None) for layer in place.layers for row in family.rows if row.is_layer]
    layers += [(row, shape.num_layers + m, m) for m in place.mtp_layers for row in family.rows if row.is_mtp]
    for row, layer, mtp in layers:
        if not (experts if row.is_expert else dense) or not row.exists(shape, layer):
            continue
        for expert in place.experts if row.is_expert else (0,):
            hf = tuple([name.format(L=layer, E=expert) for name in row.hf])
            yield row, row.megatron.format(L=layer, E=expert, M=mtp), hf, expert


def _parameters(family: Family, shape: ModelShape, place: Place) -> Iterator[tuple[Row, str, Composition]]:
    """(row, canonical global name, composition) of all parameters of a place."""
    for row, param, hf, _ in _numbered(family, shape, place):
        yield row, param, row.rule(hf, shape, _cut(place, row.is_expert)[1])


def _shards(
    family: Family, shape: ModelShape, place: Place, dense: bool = True, experts: bool = True
) -> Iterator[tuple[Row, str, list[Block], bool]]:
    """(row, canonical global name, blocks of this rank's shard, whether tensor ranks hold different ones). A row's
    blocks are computed once: in other layers and experts they differ by their names."""
    of_row: dict[int, tuple[list[str], list[Block], bool]] = {}
    for row, param, hf, expert in _numbered(family, shape, place, dense, experts):
        names = [without_slice(name) for name in hf]
        if id(row) not in of_row:
            rank, size = _cut(place, row.is_expert)
            composition = row.rule(hf, shape, size)
            blocks = shard_blocks(param, composition, rank, size)
            of_row[id(row)] = names, blocks, composition.axis is not None
            yield row, param, blocks, composition.axis is not None
            continue
        first, alike, is_cut = of_row[id(row)]
        named = dict(zip(first, names, strict=True))
        blocks = [
            Block(
                named.get(b.hf), b.hf_start, param, b.param_start, b.shape, b.hf_step,
                None if b.hf_index is None else expert, b.transposed,
            )
            for b in alike
        ]  # fmt: skip
        yield row, param, blocks, is_cut


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
