"""How one Megatron parameter is put together from Hugging Face tensors, and which block of them a rank holds.

Everything here is arithmetic on names and sizes: no tensor, no megatron, no process group. A parameter is a sequence of
*parts*; tensor parallelism cuts every part into equal contiguous ranges, and a rank holds one range of each part, one
after the other. Axis 0 is the output dimension, axis 1 the input dimension of a `[out, in]` weight (Megatron:
`tensor_parallel/layers.py`, ColumnParallelLinear cuts axis 0, RowParallelLinear axis 1).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple


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
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture-of-experts model, from 0 on, that have one MLP of `ffn` in place of experts."""
    shared_ffn: int = 0
    """Width of the expert that all tokens pass, 0 for none."""
    attention_bias: bool = False
    """The query, key and value projections have biases, where the family leaves the choice to config.json."""
    qk_norm: bool = False
    """Norms on query and key heads, where the family leaves the choice to config.json."""
    q_lora: int = 0
    """Multi-latent attention: width of the queries' latent, 0 where they are projected at once."""
    kv_lora: int = 0
    """Width of the keys' and values' latent, 0 without multi-latent attention."""
    qk_nope: int = 0
    """A query's and key's part without rotary embedding."""
    qk_rope: int = 0
    """And with; the key's is shared by all heads."""
    v_head: int = 0
    mtp_layers: int = 0
    """Multi-token-prediction layers that are kept."""
    mtp_layers_in_files: int = 0
    """Those that the checkpoint has, as layers `num_layers` and up."""

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "ModelShape":
        """Sizes by the names that the families' config.json files give them. Raises KeyError for one that is
        missing."""
        heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
        num_experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts") or 0
        # Mixtral and gpt-oss have no dense layers, and call their experts' width intermediate_size
        moe_ffn = _first(config, "moe_intermediate_size", *(["intermediate_size"] if num_experts else [])) or 0
        return cls(
            hidden=config["hidden_size"],
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config.get("intermediate_size") or 0,
            moe_ffn=moe_ffn,
            num_experts=num_experts,
            vocab=config["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings")),
            dense_layers=tuple(layer for layer in range(num_layers) if _is_dense(config, layer)) if num_experts else (),
            shared_ffn=config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * moe_ffn,
            attention_bias=bool(config.get("attention_bias")),
            qk_norm=bool(config.get("use_qk_norm")),
            q_lora=config.get("q_lora_rank") or 0,
            kv_lora=config.get("kv_lora_rank") or 0,
            qk_nope=config.get("qk_nope_head_dim") or 0,
            qk_rope=config.get("qk_rope_head_dim") or 0,
            v_head=config.get("v_head_dim") or 0,
            mtp_layers_in_files=config.get("num_nextn_predict_layers") or 0,
        )

    def is_moe(self, layer: int | None) -> bool:
        """Whether a layer has experts. Multi-token-prediction layers, counted on behind the last, are as that one."""
        return self.num_experts > 0 and layer is not None and min(layer, self.num_layers - 1) not in self.dense_layers

    def padded_vocab(self, tensor: int) -> int:
        """Vocabulary rounded up so that every one of `tensor` ranks holds as many rows; padded rows hold zeros."""
        return -(-self.vocab // tensor) * tensor


def _first(config: dict[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _is_dense(config: dict[str, Any], layer: int) -> bool:
    """By the first layers (DeepSeek, GLM), a list, or every so many layers (Qwen)."""
    return (
        layer < (config.get("first_k_dense_replace") or 0)
        or layer in (config.get("mlp_only_layers") or ())
        or (layer + 1) % (config.get("decoder_sparse_step") or 1) != 0
    )


@dataclass(frozen=True)
class Segment:
    """`length` rows (or columns) of one HF tensor, every `step`-th from `start` on.

    `hf` is None for padding, which no tensor fills. A name that ends in a number in brackets, `experts.down_proj[3]`,
    is a slice of a tensor with one axis more, in front.
    """

    hf: str | None
    start: int
    length: int
    step: int = 1

    @property
    def tensor(self) -> str:
        """The HF tensor's name, without a slice."""
        return without_slice(self.hf)

    @property
    def index(self) -> int | None:
        """Of the slice, None for a whole tensor."""
        return int(self.hf[self.hf.rindex("[") + 1 : -1]) if self.hf and self.hf.endswith("]") else None


def without_slice(hf: str) -> str:
    """`experts.down_proj` of `experts.down_proj[3]`."""
    return hf[: hf.rindex("[")] if hf.endswith("]") else hf


Part = tuple[Segment, ...]


@dataclass(frozen=True)
class Composition:
    """A whole Megatron parameter: its parts along `axis`, and its sizes along the others (none for a vector).

    `axis` None says that every tensor rank holds all of it. `transposed` says that the HF tensors hold the matrix as
    [in, out].
    """

    axis: int | None
    parts: tuple[Part, ...]
    other: tuple[int, ...] = ()
    transposed: bool = False


class Block(NamedTuple):
    """One rectangle that an HF tensor and a rank's shard of a Megatron parameter share.

    `param_start` are the offsets per axis, `shape` its size. Where it lies in the HF tensor is what `hf_slices` says,
    and `of_hf` takes it out; `hf_start` and `hf_step` are counted along the parameter's axes. `hf` None marks padding.
    """

    hf: str | None
    hf_start: tuple[int, ...]
    param: str
    param_start: tuple[int, ...]
    shape: tuple[int, ...]
    hf_step: tuple[int, ...] | None = None
    """None for steps of 1."""
    hf_index: int | None = None
    """Which slice of a tensor with one axis more, in front."""
    transposed: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_plain(self) -> bool:
        """The rectangle lies in the HF tensor as it does in the parameter: at `hf_start`, without steps."""
        return self.hf_step is None and self.hf_index is None and not self.transposed

    @property
    def param_slices(self) -> tuple[slice, ...]:
        """Index of the rectangle in the rank's shard of the parameter."""
        return tuple(slice(low, low + size) for low, size in zip(self.param_start, self.shape, strict=True))

    @property
    def hf_slices(self) -> tuple[int | slice, ...]:
        """Index of the rectangle in the HF tensor, which gives it transposed where `transposed` is set."""
        steps = self.hf_step or (1,) * len(self.shape)
        places = zip(self.hf_start, self.shape, steps, strict=True)
        slices = tuple(slice(low, low + (size - 1) * step + 1, step) for low, size, step in places)
        slices = slices[::-1] if self.transposed else slices
        return slices if self.hf_index is None else (self.hf_index, *slices)

    def cut(self, start: Sequence[int], shape: Sequence[int]) -> "Block | None":
        """What this has in common with the rectangle of the parameter at `start`; None where that is nothing."""
        edges = zip(start, shape, self.param_start, self.shape, strict=True)
        if all(a <= b and b + n <= a + m for a, m, b, n in edges):
            return self
        low = [max(a, b) for a, b in zip(start, self.param_start, strict=True)]
        high = [min(a + m, b + n) for a, m, b, n in zip(start, shape, self.param_start, self.shape, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        steps = self.hf_step or (1,) * len(self.shape)
        moved = [(a - b) * step for a, b, step in zip(low, self.param_start, steps, strict=True)]
        return self._replace(
            hf_start=tuple(a + b for a, b in zip(self.hf_start, moved, strict=True)),
            param_start=tuple(low),
            shape=tuple(b - a for a, b in zip(low, high, strict=True)),
        )

    def cut_hf(self, start: Sequence[int], shape: Sequence[int]) -> "Block | None":
        """What this has in common with the rectangle of the HF tensor at `start`, on the HF tensor's axes."""
        start, shape = list(start), list(shape)
        if self.hf_index is not None:
            if not start[0] <= self.hf_index < start[0] + shape[0]:
                return None
            start, shape = start[1:], shape[1:]
        if self.transposed:
            start, shape = start[::-1], shape[::-1]
        low, high = [], []
        for begin, size, first, step, base, number in zip(
            start, shape, self.hf_start, self.hf_step or (1,) * len(shape), self.param_start, self.shape, strict=True
        ):
            low.append(base + max(0, -(-(begin - first) // step)))
            high.append(base + min(number, -(-(begin + size - first) // step)))
        return self.cut(low, [b - a for a, b in zip(low, high, strict=True)])

    def of_hf(self, tensor: Any) -> Any:
        """The rectangle as a view of the whole HF tensor (torch or numpy), in the parameter's orientation."""
        view = tensor[self.hf_slices]
        return view.T if self.transposed else view


Rule = Callable[[tuple[str, ...], ModelShape, int], Composition]
"""(names of the HF tensors, sizes, tensor-parallel size) -> composition."""


def vector(length: Callable[[ModelShape], int]) -> Rule:
    """A replicated vector, say a norm's weight."""
    return lambda hf, shape, tensor: Composition(None, ((Segment(hf[0], 0, length(shape)),),))


def replicated(rows: Callable[[ModelShape], int], columns: Callable[[ModelShape], int]) -> Rule:
    """A matrix that every tensor rank holds whole, say the router's."""
    return lambda hf, shape, tensor: Composition(None, ((Segment(hf[0], 0, rows(shape)),),), (columns(shape),))


def column_parallel(rows: Callable[[ModelShape], int], columns: Callable[[ModelShape], int]) -> Rule:
    """A matrix cut along its output dimension."""
    return lambda hf, shape, tensor: Composition(0, ((Segment(hf[0], 0, rows(shape)),),), (columns(shape),))


def row_parallel(rows: Callable[[ModelShape], int], columns: Callable[[ModelShape], int]) -> Rule:
    """A matrix cut along its input dimension."""
    return lambda hf, shape, tensor: Composition(1, ((Segment(hf[0], 0, columns(shape)),),), (rows(shape),))


def vocabulary(hf: tuple[str, ...], shape: ModelShape, tensor: int) -> Composition:
    """Embedding or output layer: rows are tokens, padded so that every tensor rank has as many."""
    padding = shape.padded_vocab(tensor) - shape.vocab
    rows = (Segment(hf[0], 0, shape.vocab), *((Segment(None, 0, padding),) if padding else ()))
    return Composition(0, (rows,), (shape.hidden,))


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
    return Composition(0, (tuple(rows),), (shape.hidden,))


def qkv_bias(hf: tuple[str, ...], shape: ModelShape, tensor: int) -> Composition:
    """The bias of linear_qkv, in the order of its rows."""
    return replace(qkv(hf, shape, tensor), other=())


def gated(ffn: Callable[[ModelShape], int]) -> Rule:
    """linear_fc1 of a gated MLP: on every rank its range of the gate, then its range of the up projection."""

    def rule(hf: tuple[str, ...], shape: ModelShape, tensor: int) -> Composition:
        gate, up = hf
        return Composition(0, ((Segment(gate, 0, ffn(shape)),), (Segment(up, 0, ffn(shape)),)), (shape.hidden,))

    return rule


def column_vector(length: Callable[[ModelShape], int]) -> Rule:
    """A vector that is cut over tensor ranks, say one value a head."""
    return lambda hf, shape, tensor: Composition(0, ((Segment(hf[0], 0, length(shape)),),))


def stacked_gated(ffn: Callable[[ModelShape], int]) -> Rule:
    """linear_fc1 of an expert from a slice [in, 2 * ffn] in which gate and up projection take turns (gpt-oss)."""

    def rule(hf: tuple[str, ...], shape: ModelShape, tensor: int) -> Composition:
        parts = tuple((Segment(hf[0], first, ffn(shape), step=2),) for first in (0, 1))
        return Composition(0, parts, (shape.hidden,), transposed=True)

    return rule


def stacked_gated_bias(ffn: Callable[[ModelShape], int]) -> Rule:
    """The bias of such a linear_fc1, from a slice [2 * ffn]."""
    return lambda hf, shape, tensor: replace(stacked_gated(ffn)(hf, shape, tensor), other=(), transposed=False)


def stacked_row(rows: Callable[[ModelShape], int], columns: Callable[[ModelShape], int]) -> Rule:
    """linear_fc2 of an expert from a slice [in, out]."""
    return lambda hf, shape, tensor: replace(row_parallel(rows, columns)(hf, shape, tensor), transposed=True)


def whole_segments(composition: Composition) -> Iterator[Segment]:
    """Every segment, padding left out."""
    return (segment for part in composition.parts for segment in part if segment.hf is not None)


def shard_blocks(param: str, composition: Composition, rank: int, size: int) -> list[Block]:
    """The blocks of tensor rank `rank` of `size`, in the order of its shard along the cut axis.

    Raises ValueError where a part can't be cut into `size` equal ranges.
    """
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
                hf_start = segment.start + (start - position) * segment.step
                blocks.append(_block(param, composition, segment, hf_start, offset, stop - start))
                offset += stop - start
            position += segment.length
    return blocks


def _block(param: str, composition: Composition, segment: Segment, start: int, param_start: int, length: int) -> Block:
    axis = composition.axis or 0

    def along_axes(value: int, others: tuple[int, ...]) -> tuple[int, ...]:
        return (*others[:axis], value, *others[axis:])

    zeros, ones = (0,) * len(composition.other), (1,) * len(composition.other)
    return Block(
        hf=segment.hf and segment.tensor,
        hf_start=along_axes(start, zeros),
        param=param,
        param_start=along_axes(param_start, zeros),
        shape=along_axes(length, composition.other),
        hf_step=along_axes(segment.step, ones) if segment.step > 1 else None,
        hf_index=segment.index,
        transposed=composition.transposed,
    )
