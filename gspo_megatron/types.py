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
    """[T] -> [N], a token quantity summed over each whole sequence, across context-parallel ranks where there are
    any."""
    token_sequence: Tensor = None  # type: ignore[assignment]
    """[T] index of the sequence that a token belongs to; made from cu_seqlens when not given."""
    sequence_sums: Callable[[Tensor], Tensor] = None  # type: ignore[assignment]
    """[T, K] -> [N, K], K such sums in one collective; made from `sequence_sum`, one call a column, when not given."""
    counts_sequences: bool = True
    """False on all context-parallel ranks but one: each of them sees all N sequences, and only one may count them."""
    token_chunk: Tensor | None = None
    """[T] int64, which piece of its sequence a token is in, where sequences are cut over context-parallel ranks: pieces
    are numbered from 0 along the sequence, and a piece lies in order on one rank. None for whole sequences."""
    num_chunks: int = 1
    """Pieces a sequence is cut into; the same on all ranks."""
    has_token_advantages: bool | None = None
    """Whether `advantages` is [T]; told from its size when not given."""
    reference_log_probs: Tensor | None = None
    """[T] log-probs of the reference policy, where there is one."""
    entropies: Tensor | None = None
    """[T] entropy of pi_theta at each position, nats, with its gradient; None unless asked for."""

    def __post_init__(self):
        if self.has_token_advantages is None:
            self.has_token_advantages = self.advantages.numel() != self.num_sequences
        if self.token_sequence is None:
            lengths = self.cu_seqlens.diff().to(torch.long)
            numbers = torch.arange(self.num_sequences, device=lengths.device)
            self.token_sequence = torch.repeat_interleave(numbers, lengths)
        if self.sequence_sum is None:
            self.sequence_sum = self._local_sum
        if self.sequence_sums is None:
            self.sequence_sums = self._column_sums

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    def sequence_prefix_sums(self, values: Tensor) -> Tensor:
        """[T, K] -> [T, K]: each token's own value and those before it in its sequence, across context-parallel ranks.

        One call of `sequence_sums`. Raises ValueError where sequences are cut over ranks and `token_chunk` is not
        given.
        """
        num_tokens, width = values.shape
        chunk = self.token_sequence.new_zeros(num_tokens) if self.token_chunk is None else self.token_chunk
        by_chunk = values.new_zeros(num_tokens, self.num_chunks, width + 1)
        with_count = torch.cat([values, values.new_ones(num_tokens, 1)], 1)
        by_chunk[torch.arange(num_tokens, device=chunk.device), chunk] = with_count
        totals = self.sequence_sums(by_chunk.flatten(1)).view(-1, self.num_chunks, width + 1)
        if self.token_chunk is None and not torch.equal(totals[:, 0, -1].long(), self.cu_seqlens.diff().long()):
            raise ValueError("sequences are cut over ranks, and nothing says in which order: give token_chunk")
        before = (totals.cumsum(1) - totals)[self.token_sequence, chunk, :width]
        # inclusive sums inside each piece: those over all tokens, minus what stands before the piece's first token
        piece = self.token_sequence * self.num_chunks + chunk
        starts = torch.ones_like(piece, dtype=torch.bool)
        starts[1:] = piece[1:] != piece[:-1]
        sums = values.cumsum(0)
        ahead = (sums - values)[starts][starts.cumsum(0) - 1]
        return before + sums - ahead

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
        found = f"({len(advantages)}) and groups ({len(groups)})"
        raise ValueError(f"{len(lengths)} sequences need as many advantages {found}")

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
        has_token_advantages=per_token,
    )
