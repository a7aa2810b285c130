"""How one Megatron parameter is put together from Hugging Face tensors, and which block of them a rank holds.

Everything here is arithmetic on names and sizes: no tensor, no megatron, no process group. A parameter is a sequence of
*parts*; tensor parallelism cuts every part into equal contiguous ranges, and a rank holds one range of each part, one
after the other. Axis 0 is the output dimension, axis 1 the input dimension of a `[out, in]` weight (Megatron:
`tensor_parallel/layers.py`, ColumnParallelLinear cuts axis 0, RowParallelLinear axis 1).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes from a Hugging Face config.json that rules need."""

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    moe_ffn: int
    num_experts: int
    """0 for a dense model."""
    vocab: int
    tied_embeddings: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "ModelShape":
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config.get("intermediate_size") or 0,
            moe_ffn=config.get("moe_intermediate_size") or 0,
            # transformers 5 writes num_local_experts where the published checkpoints have num_experts
            num_experts=config.get("num_experts") or config.get("num_local_experts") or 0,
            vocab=config["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings")),
        )

    def padded_vocab(self, tensor: int) -> int:
        """Vocabulary rounded up so that every one of `tensor` ranks holds as many rows; padded rows hold zeros."""
        return -(-self.vocab // tensor) * tensor


@dataclass(frozen=True)
class Segment:
    """`length` rows (or columns) of one HF tensor from `start` on; `hf` is None for padding, which no tensor fills."""

    hf: str | None
    start: int
    length: int


Part = tuple[Segment, ...]


@dataclass(frozen=True)
class Composition:
    """A whole Megatron parameter: its parts along `axis`, and its size along the other axis (None for a vector).

    `axis` None says that every tensor rank holds all of it.
    """

    axis: int | None
    parts: tuple[Part, ...]
    other: int | None


@dataclass(frozen=True)
class Block:
    """One rectangle that an HF tensor and a rank's shard of a Megatron parameter share.

    `hf_start` and `param_start` are the offsets per axis, `shape` its size. `hf` None marks padding.
    """

    hf: str | None
    hf_start: tuple[int, ...]
    param: str
    param_start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


Rule = Callable[[tuple[str, ...], ModelShape, int], Composition]
"""(names of the HF tensors, sizes, tensor-parallel size) -> composition."""


def vector(length: Callable[[ModelShape], int]) -> Rule:
    """A replicated vector, say a norm's weight."""
    return lambda hf, shape, tensor: Composition(None, ((Segment(hf[0], 0, length(shape)),),), None)


def replicated(rows: Callable[[ModelShape], int], columns: Callable[[ModelShape], int]) -> Rule:
    """A matrix that every tensor rank holds whole, say the router's."""
    return lambda hf, shape, tensor: Composition(None, ((Segment(hf[0], 0, rows(shape)),),), columns(shape))


def row_parallel(rows: Callable[[ModelShape], int], columns: Callable[[ModelShape], int]) -> Rule:
    """A matrix cut along its input dimension."""
    return lambda hf, shape, tensor: Composition(1, ((Segment(hf[0], 0, columns(shape)),),), rows(shape))


def vocabulary(hf: tuple[str, ...], shape: ModelShape, tensor: int) -> Composition:
    """Embedding or output layer: rows are tokens, padded so that every tensor rank has as many."""
    padding = shape.padded_vocab(tensor) - shape.vocab
    rows = (Segment(hf[0], 0, shape.vocab), *((Segment(None, 0, padding),) if padding else ()))
    return Composition(0, (rows,), shape.hidden)


def qkv(hf: tuple[str, ...], shape: ModelShape, tensor: int) -> Composition:
    """linear_qkv: for every query group its query heads, its key head, its value head (megatron `attention.py`,
    SelfAttention.get_query_key_value_tensors). Also right where `tensor` exceeds the number of groups: then a rank's
    contiguous range is a part of a group, which Megatron gathers."""
    query, key, value = hf
    head, queries = shape.head_dim, shape.num_heads // shape.num_kv_heads * shape.head_dim
    rows = []
    for group in range(shape.num_kv_heads):
        rows.append(Segment(query, group * queries, queries))
        rows.append(Segment(key, group * head, head))
        rows.append(Segment(value, group * head, head))
    return Composition(0, (tuple(rows),), shape.hidden)


def gated(ffn: Callable[[ModelShape], int]) -> Rule:
    """linear_fc1 of a gated MLP: on every rank its range of the gate, then its range of the up projection."""

    def rule(hf: tuple[str, ...], shape: ModelShape, tensor: int) -> Composition:
        gate, up = hf
        return Composition(0, ((Segment(gate, 0, ffn(shape)),), (Segment(up, 0, ffn(shape)),)), shape.hidden)

    return rule


def whole_segments(composition: Composition) -> Iterator[Segment]:
    """Every segment, padding left out."""
    return (segment for part in composition.parts for segment in part if segment.hf is not None)


def shard_blocks(param: str, composition: Composition, rank: int, size: int) -> list[Block]:
    """The blocks of tensor rank `rank` of `size`, in the order of its shard along the cut axis.

    Raises ValueError where a part can't be cut into `size` equal ranges.
    """
    axis = composition.axis or 0
    if composition.axis is None:
        rank, size = 0, 1
    blocks, offset = [], 0
    for part in composition.parts:
        total = sum(segment.length for segment in part)
        if total % size:
            raise ValueError(f"{param}: {total} rows or columns can't be cut into {size} equal ranges")
        low, high = rank * total // size, (rank + 1) * total // size
        position = 0
        for segment in part:
            start, stop = max(low, position), min(high, position + segment.length)
            if start < stop:
                hf_start = segment.start + start - position
                blocks.append(_block(param, segment.hf, axis, hf_start, offset, stop - start, composition.other))
                offset += stop - start
            position += segment.length
    return blocks


def _block(param, hf, axis, hf_start, param_start, length, other) -> Block:
    if other is None:
        return Block(hf, (hf_start,), param, (param_start,), (length,))
    if axis == 0:
        return Block(hf, (hf_start, 0), param, (param_start, 0), (length, other))
    return Block(hf, (0, hf_start), param, (0, param_start), (other, length))
