"""The values that travel between rooms.

Shape legend: N sequences in a micro-batch, T packed tokens on this rank, G samples per prompt, V vocabulary, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One problem. `record` is what the reward reads beside the response (answer, task, ...)."""

    index: int
    """Position in the data set, before shuffling."""
    token_ids: tuple[int, ...]
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """One response of a server, in its token ids; `log_probs[t]` is in nats, of the temperature-scaled distribution."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str
    """"stop" (a stop token, which is the last of token_ids), "length" or "abort"."""
    weight_version: int


@dataclass(frozen=True)
class Sample:
    """A scored response. Samples of one prompt share `group`."""

    group: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]
    reward: float
    finish_reason: str
    weight_version: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Rollout:
    """All samples of one step, group by group."""

    samples: tuple[Sample, ...]


@dataclass
class SequenceBatch:
    """What a loss sees of one packed micro-batch.

    All token quantities are [T] with the sequences one after the other; sequence i owns cu_seqlens[i]:cu_seqlens[i+1].
    """

    log_probs: Tensor
    """[T] log pi_theta of each token, nats; carries the gradient."""
    old_log_probs: Tensor
    """[T] log pi_old."""
    rollout_log_probs: Tensor | None
    """[T] the rollout engine's log-probs, or None."""
    advantages: Tensor
    """[N], or [T] where a loss takes token advantages."""
    mask: Tensor
    """[T] 1 = a response token that is trained on."""
    cu_seqlens: Tensor
    """[N+1] integer offsets."""
    groups: Tensor
    """[N] group id of each sequence."""
    sequence_sum: Callable[[Tensor], Tensor] = None  # type: ignore[assignment]  # __post_init__ fills it
    """[T] -> [N], a token quantity summed over each whole sequence, across context-parallel ranks where there are any."""
    token_sequence: Tensor = None  # type: ignore[assignment]
    """[T] index of the sequence that a token belongs to; made from cu_seqlens when not given."""
    sequence_sums: Callable[[Tensor], Tensor] = None  # type: ignore[assignment]
    """[T, K] -> [N, K], K such sums in one collective; made from `sequence_sum`, one call a column, when not given."""
    counts_sequences: bool = True
    """False on all context-parallel ranks but one: each of them sees all N sequences, and only one may count them."""

    def __post_init__(self):
        if self.token_sequence is None:
            lengths = self.cu_seqlens.diff().to(torch.long)
            self.token_sequence = torch.repeat_interleave(torch.arange(self.num_sequences, device=lengths.device), lengths)
        if self.sequence_sum is None:
            self.sequence_sum = self._local_sum
        if self.sequence_sums is None:
            self.sequence_sums = self._column_sums

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    def _local_sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.num_sequences).index_add(0, self.token_sequence, values)

    def _column_sums(self, values: Tensor) -> Tensor:
        return torch.stack([self.sequence_sum(column) for column in values.unbind(1)], dim=1)


def from_lists(
    new: Sequence[Sequence[float]],
    old: Sequence[Sequence[float]],
    mask: Sequence[Sequence[int]],
    advantages: Sequence[float] | Sequence[Sequence[float]],
    groups: Sequence[int],
    rollout: Sequence[Sequence[float]] | None = None,
) -> SequenceBatch:
    """A float64 batch from one list a sequence; `log_probs` is a leaf that asks for its gradient.

    `advantages` is one number a sequence, or one list a sequence with a number a token.
    Raises ValueError where the lists of a sequence differ in length.
    """
    lengths = [len(sequence) for sequence in new]
    for name, lists in (("old", old), ("mask", mask), ("rollout", rollout)):
        if lists is not None and [len(sequence) for sequence in lists] != lengths:
            raise ValueError(f"{name} has lengths {[len(sequence) for sequence in lists]}, new has {lengths}")
    if len(advantages) != len(lengths) or len(groups) != len(lengths):
        raise ValueError(f"{len(lengths)} sequences need as many advantages ({len(advantages)}) and groups ({len(groups)})")

    def flat(lists) -> Tensor:
        return torch.tensor([value for sequence in lists for value in sequence], dtype=torch.float64)

    per_token = any(isinstance(value, Sequence) for value in advantages)
    return SequenceBatch(
        log_probs=flat(new).requires_grad_(),
        old_log_probs=flat(old),
        rollout_log_probs=None if rollout is None else flat(rollout),
        advantages=flat(advantages) if per_token else torch.tensor(advantages, dtype=torch.float64),
        mask=flat(mask),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        groups=torch.tensor(groups),
    )
