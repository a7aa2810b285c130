"""Samples laid one after the other in flat arrays, with labels and per-token values at the predicting position.

Shape legend: N sequences, T packed tokens, all padding included.

Position t of a sequence predicts token t + 1: the label at t is token t + 1, and the mask, old log-probs and rollout
log-probs of token t + 1 stand at t too. With a prompt of P tokens and a response of R, the positions P-1 ... P+R-2 are
trained on; the last position of a sequence predicts nothing (label 0, mask False). Shifting is done here, before any
split of a sequence over context-parallel ranks.

    tokens     p0  p1  p2  r0  r1        (P = 3, R = 2)
    labels     p1  p2  r0  r1   0
    loss_mask   .   .   x   x   .
    values      0   0  v0  v1   0
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gspo_megatron.algorithm.planning import default_cost, flops_cost, plan_micro_batches, split_mini_batches
from gspo_megatron.config import ParallelConfig

__all__ = [
    "PackedTokens", "default_cost", "flops_cost", "pack", "pad_to", "plan_micro_batches", "sequence_multiple",
    "split_mini_batches",
]  # fmt: skip


@dataclass(frozen=True)
class PackedTokens:
    input_ids: Tensor
    """[T] int64; 0 at padding."""
    position_ids: Tensor
    """[T] int64, from 0 in each sequence."""
    labels: Tensor
    """[T] int64, the token that each position predicts; 0 where there is none."""
    loss_mask: Tensor
    """[T] bool, True where the label is a response token that is trained on."""
    cu_seqlens: Tensor
    """[N+1] int32 offsets, or [N+2] where a dummy sequence of padding ends the micro-batch."""
    num_sequences: int
    """N, the dummy not counted."""
    num_tokens: int
    """Tokens of the N sequences, the dummy not counted: `cu_seqlens[N]`."""
    max_seqlen: int
    """Longest sequence in tokens, the dummy included."""
    values: dict[str, Tensor]
    """[T] float32 each, 0 outside the mask."""
    response_slices: tuple[slice, ...]
    """[N] where each sequence's response is predicted, as positions in T."""

    def split(self, values: Tensor) -> list[Tensor]:
        """[T] -> per sequence the [R] values of its response tokens (the inverse of `response_values`)."""
        return [values[where] for where in self.response_slices]


def pack(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    response_values: Mapping[str, Sequence[Sequence[float]]] | None = None,
    alignment: int = 1,
    sequence_multiple: int = 1,
    trained: Sequence[Sequence[bool]] | None = None,
) -> PackedTokens:
    """One micro-batch from (prompt_ids, response_ids) pairs.

    `response_values[name][i]` has one number a response token of sequence i, and `trained[i]` says which of them are
    trained on (all, when not given): others are context like the prompt, wherever in the response they stand. Each
    sequence is padded at its end to `sequence_multiple` tokens (2 * context-parallel size), and a dummy sequence at
    the end (mask False) makes T a multiple of `alignment` too. A micro-batch without sequences is a dummy only, so
    that its rank can take part in every collective.
    Raises ValueError for an empty prompt, or values that do not match the response's length.
    """
    response_values = response_values or {}
    trained = trained or [np.ones(len(response), dtype=bool) for _, response in sequences]
    lengths = [_padded(len(prompt) + len(response), sequence_multiple) for prompt, response in sequences]
    num_tokens = sum(lengths)
    total = _padded(num_tokens or 2, math.lcm(alignment, sequence_multiple))
    input_ids, labels, position_ids = (np.zeros(total, dtype=np.int64) for _ in range(3))
    loss_mask = np.zeros(total, dtype=bool)
    values = {name: np.zeros(total, dtype=np.float32) for name in response_values}
    offsets, slices = [0], []
    for index, (prompt, response) in enumerate(sequences):
        if not len(prompt):
            raise ValueError(f"sequence {index} has an empty prompt: nothing predicts its first response token")
        start, tokens = offsets[-1], np.concatenate([np.asarray(ids, dtype=np.int64) for ids in (prompt, response)])
        input_ids[start : start + len(tokens)] = tokens
        labels[start : start + len(tokens) - 1] = tokens[1:]
        first = start + len(prompt) - 1
        slices.append(slice(first, first + len(response)))
        for name, lists in {"trained": trained, **response_values}.items():
            if len(lists[index]) != len(response):
                raise ValueError(f"{name} of sequence {index} has {len(lists[index])} values, response {len(response)}")
        loss_mask[slices[-1]] = trained[index]
        for name, lists in response_values.items():
            values[name][slices[-1]] = np.where(trained[index], lists[index], 0.0)
        offsets.append(start + lengths[index])
    if total > num_tokens:
        offsets.append(total)
    for start, end in zip(offsets, offsets[1:], strict=False):
        position_ids[start:end] = np.arange(end - start)
    return PackedTokens(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(loss_mask),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
        num_sequences=len(sequences),
        num_tokens=num_tokens,
        max_seqlen=max(end - start for start, end in zip(offsets, offsets[1:], strict=False)),
        values={name: torch.from_numpy(array) for name, array in values.items()},
        response_slices=tuple(slices),
    )


def pad_to(batch: PackedTokens, length: int) -> PackedTokens:
    """The same micro-batch with a dummy sequence added at its end that makes T equal to `length`."""
    missing = length - batch.labels.numel()
    if not missing:
        return batch

    def padded(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(missing)])

    return dataclasses.replace(
        batch,
        input_ids=padded(batch.input_ids),
        position_ids=torch.cat([batch.position_ids, torch.arange(missing)]),
        labels=padded(batch.labels),
        loss_mask=padded(batch.loss_mask),
        cu_seqlens=torch.cat([batch.cu_seqlens, batch.cu_seqlens.new_tensor([length])]),
        max_seqlen=max(batch.max_seqlen, missing),
        values={name: padded(values) for name, values in batch.values.items()},
    )


def sequence_multiple(parallel: ParallelConfig) -> int:
    """Tokens of which a packed sequence must be a multiple: the chunks that context parallelism cuts it into."""
    return 2 * parallel.context if parallel.context > 1 else 1


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
