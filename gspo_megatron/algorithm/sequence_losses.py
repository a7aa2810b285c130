"""Losses with one weight a sequence: gspo, gspo_token, luspo, gmpo, fspo, vespo.

Shape legend: N sequences in a micro-batch, T packed tokens on this rank. A_i, L_i: advantage and trained tokens of
sequence i; r_t = pi_theta / pi_old of a token. All want `batch.advantages` [N], but for gspo_token. All raise
ValueError for values of less than 32 bits.
"""

from gspo_megatron.algorithm.loss_terms import (
    LOG_RATIO_GUARD,
    LossOutput,
    aggregate,
    guarded_exp,
    loss_output,
    masked,
    require_sequence_advantages,
    rollout_values,
    sequence_values,
    token_values,
)
from gspo_megatron.algorithm_config import FSPOConfig, GMPOConfig, GSPOConfig, LUSPOConfig, VESPOConfig
from gspo_megatron.types import SequenceBatch


def gspo(config: GSPOConfig, batch: SequenceBatch) -> LossOutput:
    """GSPO, arXiv 2507.18071 Eq. 5-7: -sum_i min(s_i A_i, clip(s_i, 1-low, 1+high) A_i), s_i = exp(mean_t log r_t).

    count = N; a sequence without trained tokens adds 0 to the sum and 1 to the count. Raises ValueError for token
    advantages, and for token-mean aggregation unless its guard is off.
    """
    require_sequence_advantages(batch, "gspo")
    # With one advantage a sequence, Eq. 13-17 have the value and the gradient of Eq. 5-7.
    return gspo_token(config, batch)


def gspo_token(config: GSPOConfig, batch: SequenceBatch) -> LossOutput:
    """GSPO-token, arXiv 2507.18071 Eq. 13-17: -sum_i 1/L_i sum_t min(s_it A_it, clip(s_it) A_it).

    s_it = sg[s_i] r_it / sg[r_it] with GSPO's s_i, so that a token's gradient is its own. `batch.advantages` is [N] or
    [T]. count = N. With log_ratio=sum, s_i = exp(sum_t log r_t) and its gradient. Raises ValueError for token-mean
    aggregation unless its guard is off.
    """
    if config.aggregation != "seq-mean-token-mean" and "token_mean" not in config.i_know_what_i_do:
        raise ValueError(
            f"loss.aggregation={config.aggregation} is not GSPO, it weighs sequences by their length: "
            "use seq-mean-token-mean, or loss.name=grpo"
        )
    return _clipped_by_sequence(config, batch, config.aggregation, summed=config.log_ratio == "sum")


def luspo(config: LUSPOConfig, batch: SequenceBatch) -> LossOutput:
    """LUSPO, arXiv 2602.05261: -sum_i L_i min(s_i A_i, clip(s_i, 1-low, 1+high) A_i), s_i as in GSPO.

    count = N. The factor L_i takes back GSPO's 1/L_i in a token's gradient, so that a long one is not weighed less.
    """
    require_sequence_advantages(batch, "luspo")
    return _clipped_by_sequence(config, batch, "seq-mean-token-sum", summed=False)


def _clipped_by_sequence(
    config: GSPOConfig | LUSPOConfig, batch: SequenceBatch, aggregation: str, summed: bool
) -> LossOutput:
    """The clipped objective with one ratio a sequence, of the mean or of the sum of its log ratios."""
    tokens = token_values(batch)
    mask, advantages = tokens.mask, tokens.advantages
    up, down = mask & (advantages > 0), mask & (advantages < 0)
    sequences = sequence_values(batch, tokens, up, down)
    num_up, num_down = sequences.extra
    exponent = sequences.log_ratio_sum if summed else sequences.mean_log_ratio
    ratio, owner = guarded_exp(exponent), batch.token_sequence
    above, below = ratio > 1 + config.clip_high, ratio < 1 - config.clip_low
    clipped = (above[owner] & up) | (below[owner] & down)
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)[owner]
    value = ratio[owner].where(~clipped, bounded) * advantages
    flows = ~clipped & (exponent.abs() <= LOG_RATIO_GUARD)[owner]
    # d mean / d log_prob is 1 / L, which is in the share already; d sum / d log_prob is 1
    slope = value * flows * (sequences.length[owner] if summed else 1.0)
    share, count = aggregate(batch, aggregation, mask, sequences.length)
    return loss_output(
        batch, tokens, sequences, value=value, slope=slope, clipped=clipped, share=share, count=count,
        clipped_sequences=(above & (num_up > 0)) | (below & (num_down > 0)),
    )  # fmt: skip


def gmpo(config: GMPOConfig, batch: SequenceBatch) -> LossOutput:
    """GMPO, arXiv 2507.20673: -sum_i s'_i A_i, s'_i = exp(mean_t of log r_t clipped at +high (A > 0), -low (A < 0)).

    count = N. A clipped token has no gradient, the others of its sequence keep theirs.
    """
    require_sequence_advantages(batch, "gmpo")
    tokens = token_values(batch)
    mask, advantages, log_ratio = tokens.mask, tokens.advantages, tokens.log_ratio
    above = mask & (advantages > 0) & (log_ratio > config.log_eps_high)
    below = mask & (advantages < 0) & (log_ratio < -config.log_eps_low)
    bounded = log_ratio.masked_fill(above, config.log_eps_high).masked_fill(below, -config.log_eps_low)
    clipped, owner = above | below, batch.token_sequence
    sequences = sequence_values(batch, tokens, bounded, clipped)
    bounded_sum, num_clipped = sequences.extra
    mean = bounded_sum / sequences.length.clamp(min=1)
    value = guarded_exp(mean)[owner] * advantages
    slope = value * (~clipped & (mean.abs() <= LOG_RATIO_GUARD)[owner])
    share, count = aggregate(batch, "seq-mean-token-mean", mask, sequences.length)
    return loss_output(
        batch, tokens, sequences, value=value, slope=slope, clipped=clipped, share=share, count=count,
        clipped_sequences=num_clipped > 0,
    )  # fmt: skip


def fspo(config: FSPOConfig, batch: SequenceBatch) -> LossOutput:
    """FSPO, arXiv 2509.09177 Eq. 3-5: -sum_i min(exp(S_i) A_i, exp(clip(S_i, -low sqrt L_i, high sqrt L_i)) A_i).

    S_i = sum_t log r_t, not divided by the length: the band that grows with sqrt(L_i) does that. count = N.
    """
    require_sequence_advantages(batch, "fspo")
    tokens = token_values(batch)
    mask, owner = tokens.mask, batch.token_sequence
    up, down = mask & (tokens.advantages > 0), mask & (tokens.advantages < 0)
    sequences = sequence_values(batch, tokens, up, down)
    total, width = sequences.log_ratio_sum, sequences.length.sqrt()
    above, below = total > config.clip_high * width, total < -config.clip_low * width
    clipped = (above[owner] & up) | (below[owner] & down)
    bounded = total.clamp(-config.clip_low * width, config.clip_high * width)
    value = guarded_exp(total)[owner].where(~clipped, guarded_exp(bounded)[owner]) * tokens.advantages
    # every token of the sum has derivative 1; the share has 1 / L, as the value is given to L tokens
    slope = value * sequences.length[owner] * (~clipped & (total.abs() <= LOG_RATIO_GUARD)[owner])
    share, count = aggregate(batch, "seq-mean-token-mean", mask, sequences.length)
    num_up, num_down = sequences.extra
    return loss_output(
        batch, tokens, sequences, value=value, slope=slope, clipped=clipped, share=share, count=count,
        clipped_sequences=(above & (num_up > 0)) | (below & (num_down > 0)),
    )  # fmt: skip


def vespo(config: VESPOConfig, batch: SequenceBatch) -> LossOutput:
    """VESPO, arXiv 2602.10693: -sum_t sg(phi(W_i)) A_i log pi_t, phi(W) = W^k exp(lambda (1 - W)), W_i = prod_t r_t.

    count = trained tokens. (k, lambda) go by the sign of A. With `rollout_correction` W is multiplied by the sequence's
    pi_old / mu, which needs `batch.rollout_log_probs`. Nothing is clipped: phi fades on both sides of its top.
    """
    require_sequence_advantages(batch, "vespo")
    tokens = token_values(batch)
    mask, advantages, owner = tokens.mask, tokens.advantages, batch.token_sequence
    weight_log_ratio = tokens.log_ratio
    if config.rollout_correction:
        weight_log_ratio = tokens.new - rollout_values(batch, mask, "loss.rollout_correction")
    sequences = sequence_values(batch, tokens, weight_log_ratio)
    log_weight = sequences.extra[0].clamp(-LOG_RATIO_GUARD, LOG_RATIO_GUARD)[owner]
    negative = advantages < 0
    k = masked(mask, advantages.new_tensor(config.k_pos)).masked_fill(negative, config.k_neg)
    lam = masked(mask, advantages.new_tensor(config.lam_pos)).masked_fill(negative, config.lam_neg)
    slope = (k * log_weight + lam * (1 - log_weight.exp())).exp() * advantages
    share, count = aggregate(batch, "token-mean", mask, sequences.length)
    return loss_output(
        batch, tokens, sequences, value=slope * tokens.new, slope=slope, clipped=mask & False, share=share, count=count,
        clipped_sequences=sequences.length < 0,
    )  # fmt: skip
