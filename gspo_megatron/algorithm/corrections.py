"""Weights for the gap between the rollout engine (mu) and the trainer (pi_old), on top of any loss.

Shape legend: N sequences in a micro-batch, T packed tokens on this rank. All weights are without gradient. A dropped
token or sequence has weight 0 and still counts in what the loss is divided by, so that the others are not raised.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_megatron.algorithm.loss_terms import LossOutput, guarded_exp, rollout_values, token_values
from gspo_megatron.algorithm_config import CorrectionConfig
from gspo_megatron.types import SequenceBatch


class Gap(NamedTuple):
    """How far the policies of a batch are apart; float64, no gradient."""

    mask: Tensor
    """[T] bool."""
    token_ratio: Tensor
    """[T] pi_old / mu, guarded."""
    token_log_ratio: Tensor
    """[T] log pi_old - log mu, nats."""
    sequence_ratio: Tensor
    """[N] geometric mean of pi_old / mu over a sequence's trained tokens."""
    drift: Tensor
    """[N] mean(log pi_old - log pi_theta), nats per token."""
    trained: Tensor
    """[N] bool: has trained tokens."""
    negative: Tensor
    """[N] bool: has a negative advantage; with token advantages, a negative sum of them."""


def correct(config: CorrectionConfig, batch: SequenceBatch, out: LossOutput) -> LossOutput:
    """`out` with each token's loss times its weight, and `correction/...` metrics, which are there when all is off too.

    - token truncate (TIS): min(pi_old / mu, cap); token mask (IcePop): pi_old / mu inside [low, high], else 0.
    - sequence truncate: min(g, cap), sequence mask: g inside [low, high], else 0; g: the geometric mean of pi_old / mu.
    - off-policy mask: 0 where A < 0 and mean(log pi_old - log pi_theta) > delta, else 1.

    Raises ValueError where a weight is asked for and the batch has no rollout log-probs or the loss no token losses.
    """
    wanted = config.token != "none" or config.sequence != "none" or config.off_policy != "none"
    if batch.rollout_log_probs is None and not wanted:
        return out
    gap = measure_gap(batch)
    metrics = {**out.metrics, **_metrics(config, batch, gap)}
    if not wanted:
        return out._replace(metrics=metrics)
    if out.token_losses is None:
        raise ValueError("correction: this loss gives no token_losses to weigh: build its output with loss_output")
    token_losses = out.token_losses * token_weights(config, batch, gap).to(out.token_losses.dtype)
    return out._replace(loss_sum=token_losses.sum(), token_losses=token_losses, metrics=metrics)


def measure_gap(batch: SequenceBatch) -> Gap:
    """One collective over context-parallel ranks. Raises ValueError for a batch without rollout log-probs."""
    tokens = token_values(batch)
    old = tokens.new - tokens.log_ratio
    log_ratio = old - rollout_values(batch, tokens.mask, "correction")
    columns = torch.stack([tokens.mask.double(), log_ratio, -tokens.log_ratio, tokens.advantages], dim=1)
    length, total, drift, advantage = batch.sequence_sums(columns).unbind(1)
    token_ratio = torch.where(tokens.mask, guarded_exp(log_ratio), 0.0)
    sequence_ratio = guarded_exp(total / length.clamp(min=1))
    return Gap(
        tokens.mask, token_ratio, log_ratio, sequence_ratio, drift / length.clamp(min=1), length > 0, advantage < 0
    )


def token_weights(config: CorrectionConfig, batch: SequenceBatch, gap: Gap) -> Tensor:
    """[T] float64: the product of what the three kinds of correction make of each token."""
    weights, sequences = gap.mask.double(), torch.ones_like(gap.sequence_ratio)
    if config.token == "truncate":
        weights = gap.token_ratio.clamp(max=config.token_cap)
    elif config.token == "mask":
        weights = torch.where(_outside(gap.token_ratio, config.token_low, config.token_high), 0.0, gap.token_ratio)
    if config.sequence == "truncate":
        sequences = gap.sequence_ratio.clamp(max=config.sequence_cap)
    elif config.sequence == "mask":
        outside = _outside(gap.sequence_ratio, config.sequence_low, config.sequence_high)
        sequences = torch.where(outside, 0.0, gap.sequence_ratio)
    if config.off_policy == "mask":
        sequences = sequences * ~_off_policy(config, gap)
    return weights * sequences[batch.token_sequence]


def _outside(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio < low) | (ratio > high)


def _off_policy(config: CorrectionConfig, gap: Gap) -> Tensor:
    return gap.negative & (gap.drift > config.off_policy_delta)


def _metrics(config: CorrectionConfig, batch: SequenceBatch, gap: Gap) -> dict[str, Tensor]:
    """Sums of what the corrections do, or would do at the configured bounds; each beside its `_count`."""
    mask, ratio = gap.mask, gap.token_ratio
    counted = gap.trained if batch.counts_sequences else torch.zeros_like(gap.trained)
    infinity = ratio.new_full((1,), torch.inf)  # for a micro-batch of no sequences
    by_token = {
        "token_ratio_mean": ratio,
        "token_ratio_square": ratio.square(),
        "token_kl": torch.where(mask, ratio - 1 - gap.token_log_ratio, 0.0),
        "token_truncated_fraction": mask & (ratio > config.token_cap),
        "token_masked_fraction": mask & _outside(ratio, config.token_low, config.token_high),
    }
    by_sequence = {
        "sequence_ratio_mean": torch.where(counted, gap.sequence_ratio, 0.0),
        "sequence_truncated_fraction": counted & (gap.sequence_ratio > config.sequence_cap),
        "sequence_masked_fraction": counted & _outside(gap.sequence_ratio, config.sequence_low, config.sequence_high),
        "off_policy_fraction": counted & _off_policy(config, gap),
    }
    sums = {}
    for values, count in ((by_token, mask), (by_sequence, counted)):
        for name, value in values.items():
            sums[f"correction/{name}"] = value.sum(dtype=torch.float64)
            sums[f"correction/{name}_count"] = count.sum(dtype=torch.float64)
    sums["correction/sequence_ratio_min"] = torch.cat([gap.sequence_ratio[gap.trained], infinity]).amin()
    sums["correction/sequence_ratio_max"] = torch.cat([gap.sequence_ratio[gap.trained], -infinity]).amax()
    return sums
