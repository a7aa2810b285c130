"""Losses that compare the sequences of a group with each other: real.

Every sequence of a group must be in the same micro-batch (`GROUP_LOSSES` in the configuration tells the planner so).
Shape legend: N sequences in a micro-batch, T packed tokens on this rank.
"""

import torch
from torch import Tensor

from gspo_megatron.algorithm.loss_terms import (
    LOG_RATIO_GUARD,
    LossOutput,
    loss_output,
    require_sequence_advantages,
    sequence_values,
    token_values,
)
from gspo_megatron.algorithm_config import REALConfig
from gspo_megatron.types import SequenceBatch


def real(config: REALConfig, batch: SequenceBatch) -> LossOutput:
    """REAL, arXiv 2602.05630: sum over groups of log(1 + sum_pos exp(-l_i / tau)) + log(1 + sum_neg exp(l_i / tau)).

    l_i = mean_t log r_t, the logarithm of GSPO's ratio; pos and neg are the group's sequences with A_i > 0 and A_i < 0
    (only the sign of A_i enters). count = groups. Needs `batch.advantages` [N] and whole groups; raises ValueError for
    token advantages or values of less than 32 bits.
    """
    require_sequence_advantages(batch, "real")
    tokens = token_values(batch)
    sequences = sequence_values(batch, tokens)
    sign = batch.advantages.detach().double().sign() * (sequences.length > 0)
    group_ids, group = batch.groups.unique(return_inverse=True)
    logit = -sign * sequences.mean_log_ratio.clamp(-LOG_RATIO_GUARD, LOG_RATIO_GUARD) / config.tau
    # one class a group and sign; log(1 + sum exp) by its largest logit, so that no exponent overflows
    side = 2 * group + (sign < 0)
    top = logit.new_zeros(2 * group_ids.numel()).scatter_reduce(0, side, logit, "amax")
    total = (-top).exp().index_add(0, side, (logit - top[side]).exp() * sign.abs())
    probability = (logit - top[side]).exp() / total[side]
    objective = -(top + total.log()).view(-1, 2).sum(1)

    owner, length = batch.token_sequence, sequences.length.clamp(min=1)
    tokens_of_group = _tokens_of_group(sequences.length, group, group_ids.numel())
    # the group's objective is spread evenly over its tokens, so that their sum counts it once on any number of ranks
    share = tokens.mask / tokens_of_group[group][owner]
    slope = sign * probability / (config.tau * length)
    slope = slope * (sequences.mean_log_ratio.abs() <= LOG_RATIO_GUARD)
    count = torch.tensor(group_ids.numel() if batch.counts_sequences else 0, dtype=torch.float64, device=share.device)
    return loss_output(
        batch, tokens, sequences, value=objective[group][owner], slope=(slope * tokens_of_group[group])[owner],
        clipped=tokens.mask & False, share=share, count=count, clipped_sequences=sequences.length < 0,
    )  # fmt: skip


def _tokens_of_group(length: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """[groups] float64 trained tokens, at least 1."""
    return length.new_zeros(num_groups).index_add(0, group, length).clamp(min=1)
