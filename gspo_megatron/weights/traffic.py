"""What a weight sync brings to the engines, in bytes, against the least that it could: on paper, from names and
sizes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from gspo_megatron.weights.families import Family
from gspo_megatron.weights.plan import whole_parameters
from gspo_megatron.weights.rules import ModelShape, whole_segments


@dataclass(frozen=True)
class EngineRanks:
    """`engines` servers of `tensor` ranks each, across which `expert` ranks lie (SGLang's tp_size and ep_size)."""

    engines: int = 1
    tensor: int = 1
    expert: int = 1


@dataclass(frozen=True)
class EngineTraffic:
    """Bytes that all engine ranks together receive in one sync."""

    broadcast: int
    """By the `distributed` transport: every rank gets every tensor whole, and keeps its part."""
    shards: int
    """If every rank got only what it keeps: the lower bound of any transport."""

    @property
    def ratio(self) -> float:
        return self.broadcast / self.shards


def engine_traffic(
    family: Family,
    shape: ModelShape,
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    ranks: EngineRanks,
) -> EngineTraffic:
    """`specs`: HF name -> dtype and shape, as a reshard plan has them.

    An engine's tensor ranks cut what Megatron's do and hold the rest whole; experts lie on `expert` ranks, cut over
    `tensor / expert` of them; with fewer KV heads than ranks, neighbours hold the same head.
    """
    shards, total = 0, 0
    copies_of: dict[str, int] = {}
    for row, _, composition in whole_parameters(family, shape):
        for segment in whole_segments(composition):
            name = segment.tensor
            if row.is_expert:
                copies_of[name] = ranks.tensor // ranks.expert if composition.axis is None else 1
            elif composition.axis is None:
                copies_of[name] = ranks.tensor
            else:
                heads = shape.num_kv_heads if re.search(r"\.[kv]_proj\.", name) else ranks.tensor
                copies_of[name] = max(1, ranks.tensor // heads)
    for name, (dtype, size) in specs.items():
        num_bytes = prod(size) * dtype.itemsize
        total += num_bytes
        shards += num_bytes * copies_of[name]
    return EngineTraffic(ranks.engines * ranks.tensor * total, ranks.engines * shards)
