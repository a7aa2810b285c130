"""Policy losses: one function each, `loss(config, batch) -> LossOutput`, and the registry `LOSSES`.

Shape legend: N sequences in a micro-batch, T packed tokens on this rank, K stacked quantities.

Everything in a `LossOutput` adds up: over micro-batches, data-parallel and context-parallel ranks. A token contributes
its own share (1/L_i of sequence i), so a sequence that is spread over context-parallel ranks is counted once in
`loss_sum`; `count` and the sequence metrics are non-zero on the one rank whose batch says `counts_sequences`.
sum(loss_sum) / sum(count) over all of them is the loss.

Ratios are computed without gradient, in float64. The gradient comes from a factor exp(log_prob - sg[log_prob]) = 1 at
each token, so that it reaches this rank's tokens only and needs no differentiable collective.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_megatron.algorithm.loss_metrics import ratio_metrics, reduce_metrics
from gspo_megatron.config import GRPOConfig, GSPOConfig, GSPOTokenConfig, LossConfig
from gspo_megatron.types import SequenceBatch, from_lists

__all__ = [
    "LOSSES", "GRPOConfig", "GSPOConfig", "GSPOTokenConfig", "LossConfig", "LossOutput", "NonFiniteError",
    "check_finite", "from_lists", "grpo", "gspo", "gspo_token", "reduce_metrics",
]  # fmt: skip

LOG_RATIO_GUARD = 20.0
"""Bound on log ratios, in nats: beyond it a ratio stays at exp(+-20) and has no gradient."""


class LossOutput(NamedTuple):
    loss_sum: Tensor
    """Scalar to be minimised; its gradient with respect to `batch.log_probs` is right."""
    count: Tensor
    """Scalar, float64: what to divide `loss_sum` by, after summing both over micro-batches and ranks."""
    metrics: dict[str, Tensor]
    """Detached float64 scalars that add up, but for keys ending in `_min` and `_max`; see `reduce_metrics`."""


class NonFiniteError(ValueError):
    """A NaN or an infinity where training needs a number; `quantity` and `sequence` say where."""

    def __init__(self, quantity: str, sequence: int, value: float):
        self.quantity, self.sequence, self.value = quantity, sequence, value
        super().__init__(f"{quantity} of sequence {sequence} in the micro-batch is {value}")


def gspo(config: GSPOConfig, batch: SequenceBatch) -> LossOutput:
    """GSPO, arXiv 2507.18071 Eq. 5-7: -sum_i min(s_i A_i, clip(s_i, 1-low, 1+high) A_i), s_i = exp(mean_t log r_t).

    `batch.advantages` is [N]. count = N; a sequence without trained tokens adds 0 to the sum and 1 to the count.
    Raises ValueError for token advantages, another aggregation, or values of less than 32 bits.
    """
    if batch.advantages.numel() != batch.num_sequences:
        raise ValueError(
            f"loss.name=gspo takes one advantage a sequence ({batch.num_sequences}), got {batch.advantages.numel()}; "
            "loss.name=gspo_token takes one a token"
        )
    # With one advantage a sequence, Eq. 13-17 have the value and the gradient of Eq. 5-7.
    return gspo_token(config, batch)


def gspo_token(config: GSPOConfig, batch: SequenceBatch) -> LossOutput:
    """GSPO-token, Eq. 13-17: -sum_i 1/L_i sum_t min(s_it A_it, clip(s_it) A_it), s_it = sg[s_i] r_it / sg[r_it].

    `batch.advantages` is [N] or [T]. count = N. Raises ValueError as `gspo`, but for token advantages.
    """
    if config.aggregation != "seq-mean-token-mean":
        raise ValueError(
            f"loss.aggregation={config.aggregation} is not GSPO, it weighs sequences by their length: "
            "use seq-mean-token-mean, or loss.name=grpo"
        )
    mask, advantages, log_ratio = _token_values(batch)
    up, down = mask & (advantages > 0), mask & (advantages < 0)
    columns = torch.stack([mask.double(), log_ratio, up.double(), down.double()], dim=1)
    length, log_ratio_sum, num_up, num_down = batch.sequence_sums(columns).unbind(1)

    mean_log_ratio = log_ratio_sum / length.clamp(min=1)
    ratio = _guarded_exp(mean_log_ratio)
    above, below = ratio > 1 + config.clip_high, ratio < 1 - config.clip_low
    owner = batch.token_sequence
    clipped = (above[owner] & up) | (below[owner] & down)
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)[owner]
    weight = torch.where(clipped, bounded, ratio[owner]) * advantages / length.clamp(min=1)[owner]
    flows = ~clipped & (mean_log_ratio.abs() <= LOG_RATIO_GUARD)[owner]

    clipped_sequences = (above & (num_up > 0)) | (below & (num_down > 0))
    metrics = ratio_metrics(batch, mask, log_ratio, clipped, length, mean_log_ratio, ratio, clipped_sequences)
    return LossOutput(_weighted_sum(batch, mask, weight, flows), _num_sequences(batch), metrics)


def grpo(config: GRPOConfig, batch: SequenceBatch) -> LossOutput:
    """GRPO, arXiv 2507.18071 Eq. 2-3 without KL: min(r A, clip(r, 1-low, 1+high) A) at each token.

    `batch.advantages` is [N] or [T]. `aggregation` is the mean over each sequence's tokens, then over sequences
    (count = N), or the mean over all trained tokens (count = their number). In the metrics a sequence counts as clipped
    when one of its tokens is. Raises ValueError for another aggregation, or values of less than 32 bits.
    """
    if config.aggregation not in ("seq-mean-token-mean", "token-mean"):
        raise ValueError(f"loss.aggregation={config.aggregation}: use seq-mean-token-mean or token-mean")
    mask, advantages, log_ratio = _token_values(batch)
    token_ratio = _guarded_exp(log_ratio)
    above = (token_ratio > 1 + config.clip_high) & (advantages > 0)
    below = (token_ratio < 1 - config.clip_low) & (advantages < 0)
    clipped = mask & (above | below)
    columns = torch.stack([mask.double(), log_ratio, clipped.double()], dim=1)
    length, log_ratio_sum, num_clipped = batch.sequence_sums(columns).unbind(1)

    bounded = token_ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    weight = torch.where(clipped, bounded, token_ratio) * advantages
    count = mask.sum(dtype=torch.float64)
    if config.aggregation == "seq-mean-token-mean":
        weight, count = weight / length.clamp(min=1)[batch.token_sequence], _num_sequences(batch)
    flows = ~clipped & (log_ratio.abs() <= LOG_RATIO_GUARD)

    mean_log_ratio = log_ratio_sum / length.clamp(min=1)
    ratio = _guarded_exp(mean_log_ratio)
    metrics = ratio_metrics(batch, mask, log_ratio, clipped, length, mean_log_ratio, ratio, num_clipped > 0)
    return LossOutput(_weighted_sum(batch, mask, weight, flows), count, metrics)


LOSSES: dict[str, tuple[type[LossConfig], Callable[..., LossOutput]]] = {
    "gspo": (GSPOConfig, gspo),
    "gspo_token": (GSPOTokenConfig, gspo_token),
    "grpo": (GRPOConfig, grpo),
}


def check_finite(batch: SequenceBatch) -> None:
    """Raises NonFiniteError for the first trained token or advantage of the batch that is NaN or infinite.

    Sequences without trained tokens on this rank are not looked at.
    """
    mask = batch.mask.bool()
    per_token = batch.advantages if _has_token_advantages(batch) else batch.advantages[batch.token_sequence]
    quantities = {
        "log_probs": batch.log_probs.detach(),
        "old_log_probs": batch.old_log_probs,
        "rollout_log_probs": batch.rollout_log_probs,
        "advantages": per_token,
    }
    for name, values in quantities.items():
        if values is None:
            continue
        bad = mask & ~torch.isfinite(values)
        if bad.any():
            token = int(bad.nonzero()[0, 0])
            raise NonFiniteError(name, int(batch.token_sequence[token]), float(values[token]))


def _has_token_advantages(batch: SequenceBatch) -> bool:
    return batch.advantages.numel() != batch.num_sequences


def _token_values(batch: SequenceBatch) -> tuple[Tensor, Tensor, Tensor]:
    """([T] bool mask, [T] advantages, [T] log ratios in nats), float64, detached, zero where masked out.

    Raises ValueError for values of less than 32 bits: bf16 rounds both 1 - 3e-4 and 1 + 4e-4 to 1.
    """
    for name in ("log_probs", "old_log_probs", "advantages"):
        dtype = getattr(batch, name).dtype
        if not dtype.is_floating_point or torch.finfo(dtype).bits < 32:
            raise ValueError(f"batch.{name} is {dtype}, which cannot hold a ratio of 1 + 4e-4: compute it in float32")
    mask = batch.mask.bool()
    advantages = batch.advantages.detach().double()
    if not _has_token_advantages(batch):
        advantages = advantages[batch.token_sequence]
    # `where` before any arithmetic: (-inf) - (-inf) at a masked token is NaN, and stays NaN when multiplied by 0.
    zero = torch.zeros((), dtype=torch.float64, device=mask.device)
    new, old = (torch.where(mask, v.detach().double(), zero) for v in (batch.log_probs, batch.old_log_probs))
    return mask, torch.where(mask, advantages, zero), new - old


def _guarded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_GUARD, LOG_RATIO_GUARD).exp()


def _weighted_sum(batch: SequenceBatch, mask: Tensor, weight: Tensor, flows: Tensor) -> Tensor:
    """-sum_t weight_t over the mask, with d/d log_prob_t = -weight_t where `flows` and 0 elsewhere. Inputs [T]."""
    log_probs = torch.where(mask & flows, batch.log_probs, 0.0)
    return -(weight.to(log_probs.dtype) * (log_probs - log_probs.detach()).exp()).sum()


def _num_sequences(batch: SequenceBatch) -> Tensor:
    count = batch.num_sequences if batch.counts_sequences else 0
    return torch.tensor(count, dtype=torch.float64, device=batch.log_probs.device)
