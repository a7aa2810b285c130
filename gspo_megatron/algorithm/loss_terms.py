"""What the losses are made of: masked token values, sums over sequences, aggregation, and the output.

Shape legend: N sequences in a micro-batch, T packed tokens on this rank, K stacked quantities.

Ratios are computed without gradient, in float64. A loss gives each token a `value` (its part of the objective) and a
`slope` (the derivative of the whole objective by its log-prob); `loss_output` makes a scalar of them that has this
value and this gradient. The gradient reaches this rank's tokens only, so that no differentiable collective is needed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_megatron.algorithm.loss_metrics import ratio_metrics
from gspo_megatron.types import SequenceBatch

LOG_RATIO_GUARD = 20.0
"""Bound on log ratios, in nats: beyond it a ratio stays at exp(+-20) and has no gradient."""


class LossOutput(NamedTuple):
    loss_sum: Tensor
    """Scalar to be minimised; its gradient with respect to `batch.log_probs` is right."""
    count: Tensor
    """Scalar, float64: what to divide `loss_sum` by, after summing both over micro-batches and ranks."""
    metrics: dict[str, Tensor]
    """Detached float64 scalars that add up, but for keys ending in `_min` and `_max`; see `reduce_metrics`."""
    token_losses: Tensor | None = None
    """[T] the tokens' parts of `loss_sum`, with their gradient: what corrections weigh."""
    token_share: Tensor | None = None
    """[T] float64, a token's weight relative to `count` (1 / L_i for a mean over sequences), 0 where masked out: what
    a penalty on top of the loss is weighed by."""


class NonFiniteError(ValueError):
    """A NaN or an infinity where training needs a number; `quantity` and `sequence` say where."""

    def __init__(self, quantity: str, sequence: int, value: float):
        self.quantity, self.sequence, self.value = quantity, sequence, value
        super().__init__(f"{quantity} of sequence {sequence} in the micro-batch is {value}")


class TokenValues(NamedTuple):
    """[T] each, float64, detached, zero where masked out."""

    mask: Tensor
    """bool."""
    advantages: Tensor
    new: Tensor
    """log pi_theta, nats."""
    log_ratio: Tensor
    """log pi_theta - log pi_old, nats."""


class SequenceValues(NamedTuple):
    """[N] each, float64, over whole sequences."""

    length: Tensor
    """Trained tokens."""
    log_ratio_sum: Tensor
    mean_log_ratio: Tensor
    ratio: Tensor
    """exp(mean_log_ratio), guarded; 1 for a sequence without trained tokens."""
    extra: tuple[Tensor, ...]
    """Sums of the further columns that were asked for."""


def token_values(batch: SequenceBatch) -> TokenValues:
    """Masked token quantities of a batch.

    Raises ValueError for values of less than 32 bits: bf16 rounds both 1 - 3e-4 and 1 + 4e-4 to 1.
    """
    for name in ("log_probs", "old_log_probs", "advantages"):
        dtype = getattr(batch, name).dtype
        if not dtype.is_floating_point or torch.finfo(dtype).bits < 32:
            raise ValueError(f"batch.{name} is {dtype}, which cannot hold a ratio of 1 + 4e-4: compute it in float32")
    mask = batch.mask.bool()
    advantages = batch.advantages.detach()
    if not batch.has_token_advantages:
        advantages = advantages[batch.token_sequence]
    new = masked(mask, batch.log_probs)
    return TokenValues(mask, masked(mask, advantages), new, new - masked(mask, batch.old_log_probs))


def rollout_values(batch: SequenceBatch, mask: Tensor, name: str) -> Tensor:
    """[T] log mu of the rollout engine, as in `token_values`. Raises ValueError where the batch has none."""
    if batch.rollout_log_probs is None:
        raise ValueError(f"{name} needs the rollout engine's log-probs, and rollout_log_probs is None")
    return masked(mask, batch.rollout_log_probs)


def require_sequence_advantages(batch: SequenceBatch, name: str) -> None:
    """Raises ValueError for a batch with one advantage a token."""
    if batch.has_token_advantages:
        raise ValueError(
            f"loss.name={name} takes one advantage a sequence ({batch.num_sequences}), got {batch.advantages.numel()}; "
            "loss.name=gspo_token takes one a token"
        )


def masked(mask: Tensor, values: Tensor) -> Tensor:
    """[T] float64, detached, 0 where masked out.

    `where` before any arithmetic: (-inf) - (-inf) at a masked token is NaN, and stays NaN when multiplied by 0.
    """
    return torch.where(mask, values.detach().double(), 0.0)


def guarded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_GUARD, LOG_RATIO_GUARD).exp()


def sequence_values(batch: SequenceBatch, tokens: TokenValues, *columns: Tensor) -> SequenceValues:
    """Sums over whole sequences, in one collective where they are spread over ranks; `columns` are [T]."""
    stacked = torch.stack([tokens.mask.double(), tokens.log_ratio, *(column.double() for column in columns)], dim=1)
    length, log_ratio_sum, *extra = batch.sequence_sums(stacked).unbind(1)
    mean_log_ratio = log_ratio_sum / length.clamp(min=1)
    return SequenceValues(length, log_ratio_sum, mean_log_ratio, guarded_exp(mean_log_ratio), tuple(extra))


def aggregate(batch: SequenceBatch, aggregation: str, mask: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """([T] share of each token, count): sum of share * value over count is the mean that `aggregation` names.

    Raises ValueError for a name that is none of the three.
    """
    if aggregation == "token-mean":
        return mask.double(), mask.sum(dtype=torch.float64)
    if aggregation == "seq-mean-token-sum":
        return mask.double(), count_sequences(batch)
    if aggregation == "seq-mean-token-mean":
        return mask.double() / length.clamp(min=1)[batch.token_sequence], count_sequences(batch)
    raise ValueError(f"loss.aggregation={aggregation}: use seq-mean-token-mean, token-mean or seq-mean-token-sum")


def count_sequences(batch: SequenceBatch) -> Tensor:
    """Scalar float64: N, or 0 on the context-parallel ranks that don't count."""
    count = batch.num_sequences if batch.counts_sequences else 0
    return torch.tensor(count, dtype=torch.float64, device=batch.log_probs.device)


def loss_output(
    batch: SequenceBatch,
    tokens: TokenValues,
    sequences: SequenceValues,
    *,
    value: Tensor,
    slope: Tensor,
    clipped: Tensor,
    share: Tensor,
    count: Tensor,
    clipped_sequences: Tensor,
) -> LossOutput:
    """-sum_t share_t value_t, with d/d log_prob_t = -share_t slope_t.

    value, slope, share [T] float64; clipped [T] bool: tokens whose gradient the loss's bound takes away;
    clipped_sequences [N] bool: sequences with such tokens.
    """
    mask, dtype = tokens.mask, batch.log_probs.dtype
    log_probs = torch.where(mask, batch.log_probs, 0.0)
    token_losses = -(masked(mask, share * value).to(dtype))
    token_losses = token_losses - masked(mask, share * slope).to(dtype) * (log_probs - log_probs.detach())
    metrics = ratio_metrics(
        batch, mask, tokens.log_ratio, mask & clipped, sequences.length, sequences.mean_log_ratio, sequences.ratio,
        clipped_sequences,
    )  # fmt: skip
    return LossOutput(token_losses.sum(), count, metrics, token_losses, masked(mask, share))
