"""Losses with one weight a token: grpo, sapo, cispo, cfpo, pspo, dppo_tv, minirl, ctpo, aspo, dcpo.

Shape legend: N sequences in a micro-batch, T packed tokens on this rank. A: advantage, r = pi_theta / pi_old of a
token, mu: the rollout policy. All take `batch.advantages` as [N] or [T], sum what they minimise over tokens as
`aggregation` says (count = N, or the trained tokens for token-mean), and raise ValueError for another aggregation or
values of less than 32 bits. In the metrics a sequence counts as clipped when one of its tokens is.
"""

import torch
from torch import Tensor

from gspo_megatron.algorithm.loss_terms import (
    LOG_RATIO_GUARD,
    LossOutput,
    TokenValues,
    aggregate,
    guarded_exp,
    loss_output,
    rollout_values,
    sequence_values,
    token_values,
)
from gspo_megatron.algorithm_config import (
    ASPOConfig,
    CFPOConfig,
    CISPOConfig,
    CTPOConfig,
    DCPOConfig,
    DPPOTVConfig,
    GRPOConfig,
    MiniRLConfig,
    PSPOConfig,
    SAPOConfig,
    SequenceMeanConfig,
)
from gspo_megatron.types import SequenceBatch


def grpo(config: GRPOConfig, batch: SequenceBatch) -> LossOutput:
    """GRPO, arXiv 2507.18071 Eq. 2-3 without KL: -min(r A, clip(r, 1-low, 1+high) A) at each token."""
    tokens = token_values(batch)
    ratio = guarded_exp(tokens.log_ratio)
    low, high = ratio.new_tensor(1 - config.clip_low), ratio.new_tensor(1 + config.clip_high)
    return _clipped(config, batch, tokens, ratio, low, high)


def dcpo(config: DCPOConfig, batch: SequenceBatch) -> LossOutput:
    """DCPO, arXiv 2509.02333: GRPO's objective, clipped to the token's own band.

    With q = pi_old the bounds are 0.5 + 0.5 sqrt(max(1 - 4 low / q, 0)) and 0.5 + 0.5 sqrt(1 + 4 high / q), at most
    `cap`. The paper's smoothed advantages are not part of the loss.
    """
    tokens = token_values(batch)
    old_probability = (tokens.new - tokens.log_ratio).clamp(min=-LOG_RATIO_GUARD).exp()
    low = 0.5 + 0.5 * (1 - 4 * config.clip_low / old_probability).clamp(min=0).sqrt()
    high = (0.5 + 0.5 * (1 + 4 * config.clip_high / old_probability).sqrt()).clamp(max=config.cap)
    return _clipped(config, batch, tokens, guarded_exp(tokens.log_ratio), low, high)


def sapo(config: SAPOConfig, batch: SequenceBatch) -> LossOutput:
    """SAPO, arXiv 2511.20347: -(4 / tau) sigmoid(tau (r - 1)) A; tau by the sign of A.

    The factor of the gradient is 4 p (1 - p) r A with p the sigmoid: 1 at r = 1, fading on both sides. No clip.
    """
    tokens = token_values(batch)
    ratio = guarded_exp(tokens.log_ratio)
    tau = torch.full_like(ratio, config.tau_neg).masked_fill(tokens.advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1))
    slope = _guarded(tokens, 4 * gate * (1 - gate) * ratio * tokens.advantages)
    return _token_output(config, batch, tokens, 4 / tau * gate * tokens.advantages, slope, tokens.mask & False)


def cispo(config: CISPOConfig, batch: SequenceBatch) -> LossOutput:
    """CISPO, arXiv 2506.13585: -sg(clip(r, low, high)) A log pi. A clipped token keeps its gradient, with the bound."""
    tokens = token_values(batch)
    ratio = guarded_exp(tokens.log_ratio)
    slope = ratio.clamp(config.is_low, config.is_high) * tokens.advantages
    clipped = (ratio < config.is_low) | (ratio > config.is_high)
    return _token_output(config, batch, tokens, slope * tokens.new, slope, clipped)


def cfpo(config: CFPOConfig, batch: SequenceBatch) -> LossOutput:
    """CFPO, arXiv 2601.22801: -(r A - |A| / (2 eps) (r - 1)^2).

    The gradient vanishes at r = 1 + eps (A > 0) or 1 - eps (A < 0) and turns there. Nothing is clipped.
    """
    tokens = token_values(batch)
    ratio, size = guarded_exp(tokens.log_ratio), tokens.advantages.abs() / config.eps
    value = ratio * tokens.advantages - size / 2 * (ratio - 1).square()
    slope = _guarded(tokens, ratio * (tokens.advantages - size * (ratio - 1)))
    return _token_output(config, batch, tokens, value, slope, tokens.mask & False)


def pspo(config: PSPOConfig, batch: SequenceBatch) -> LossOutput:
    """PSPO, arXiv 2509.21282: -((1 - alpha) r + alpha) A.

    The factor is the ratio of the smoothed policy (1 - alpha) pi_theta + alpha pi_old to pi_old. Nothing is clipped.
    """
    tokens = token_values(batch)
    slope = (1 - config.alpha) * guarded_exp(tokens.log_ratio) * tokens.advantages
    value = slope + config.alpha * tokens.advantages
    return _token_output(config, batch, tokens, value, _guarded(tokens, slope), tokens.mask & False)


def dppo_tv(config: DPPOTVConfig, batch: SequenceBatch) -> LossOutput:
    """DPPO with total variation, arXiv 2602.04879: -sg(M r) A log pi with r = pi_theta / mu.

    M = 0 where the token has gone away from mu in its advantage's direction (A > 0 and r > 1, or A < 0 and r < 1) and
    |mu - pi_theta| > delta. Needs `batch.rollout_log_probs`; raises ValueError without.
    """
    tokens = token_values(batch)
    rollout = rollout_values(batch, tokens.mask, "loss.name=dppo_tv")
    ratio = guarded_exp(tokens.new - rollout)
    distance = (rollout.exp() - tokens.new.exp()).abs()
    away_up = (tokens.advantages > 0) & (ratio > 1) & (distance > config.delta_high)
    away_down = (tokens.advantages < 0) & (ratio < 1) & (distance > config.delta_low)
    dropped = away_up | away_down
    slope = ratio * tokens.advantages * ~dropped
    return _token_output(config, batch, tokens, slope * tokens.new, slope, dropped)


def minirl(config: MiniRLConfig, batch: SequenceBatch) -> LossOutput:
    """MiniRL, arXiv 2512.01374: -M sg(min(pi_theta / mu, cap)) A log pi, summed over a sequence's tokens.

    M = 0 where r = pi_theta / pi_old is above 1 + high (A > 0) or below 1 - low (A < 0). The paper's advantage is R
    minus the group's mean (`advantage.std: none`). Needs `batch.rollout_log_probs`; raises ValueError without.
    """
    tokens = token_values(batch)
    rollout = rollout_values(batch, tokens.mask, "loss.name=minirl")
    dropped = _moved_too_far(tokens, config.clip_low, config.clip_high)
    slope = guarded_exp(tokens.new - rollout).clamp(max=config.tis_cap) * tokens.advantages * ~dropped
    return _token_output(config, batch, tokens, slope * tokens.new, slope, dropped)


def aspo(config: ASPOConfig, batch: SequenceBatch) -> LossOutput:
    """ASPO, arXiv 2510.06062: -M w A with w = r for A < 0 and w = 1 / r for A > 0.

    The gradient is -M w A d log pi for both signs: 1 / r stands for pi_old pi_theta / sg(pi_theta^2). M = 0 where r <
    1 - low (A < 0) or r > 1 + high (A > 0). `weight_cap` bounds 1 / r, whose token keeps its gradient.
    """
    tokens = token_values(batch)
    dropped = _moved_too_far(tokens, config.clip_low, config.clip_high)
    turned = torch.where(tokens.advantages > 0, -tokens.log_ratio, tokens.log_ratio)
    weight = guarded_exp(turned)
    if config.weight_cap:
        weight = torch.where(tokens.advantages > 0, weight.clamp(max=config.weight_cap), weight)
    value = weight * tokens.advantages * ~dropped
    return _token_output(config, batch, tokens, value, _guarded(tokens, value), dropped)


def ctpo(config: CTPOConfig, batch: SequenceBatch) -> LossOutput:
    """CTPO, arXiv 2605.07331: GRPO's objective with rho_t = sg(prod_{k<t} r_k) r_t in place of r_t.

    log rho_t is clipped at +hi t^power where A > 0; where A < 0 at -lo t^power, and at +dual t^power from above. t
    counts a sequence's trained tokens from 1; over context-parallel ranks it comes from `batch.sequence_prefix_sums`.
    """
    tokens = token_values(batch)
    columns = torch.stack([tokens.mask.double(), tokens.log_ratio], dim=1)
    position, total = batch.sequence_prefix_sums(columns).unbind(1)
    width = position.clamp(min=0) ** config.power
    positive = tokens.advantages > 0
    low = torch.where(positive, -torch.inf, -config.lo * width)
    high = torch.where(positive, config.hi, config.dual) * width
    clipped = tokens.mask & (tokens.advantages != 0) & ((total < low) | (total > high))
    value = guarded_exp(total.clamp(low, high)) * tokens.advantages
    slope = value * (~clipped & (total.abs() <= LOG_RATIO_GUARD))
    return _token_output(config, batch, tokens, value, slope, clipped)


def _clipped(
    config: GRPOConfig | DCPOConfig, batch: SequenceBatch, tokens: TokenValues, ratio: Tensor, low: Tensor, high: Tensor
) -> LossOutput:
    """min(ratio A, clip(ratio, low, high) A); the clip is active only strictly outside its band."""
    above, below = (tokens.advantages > 0) & (ratio > high), (tokens.advantages < 0) & (ratio < low)
    clipped = above | below
    value = torch.where(clipped, ratio.clamp(low, high), ratio) * tokens.advantages
    return _token_output(config, batch, tokens, value, _guarded(tokens, value * ~clipped), clipped)


def _moved_too_far(tokens: TokenValues, low: float, high: float) -> Tensor:
    """[T] bool: the ratio to pi_old has left the band in the advantage's direction."""
    ratio = guarded_exp(tokens.log_ratio)
    return ((tokens.advantages > 0) & (ratio > 1 + high)) | ((tokens.advantages < 0) & (ratio < 1 - low))


def _guarded(tokens: TokenValues, slope: Tensor) -> Tensor:
    return slope * (tokens.log_ratio.abs() <= LOG_RATIO_GUARD)


def _token_output(
    config: SequenceMeanConfig, batch: SequenceBatch, tokens: TokenValues, value: Tensor, slope: Tensor, clipped: Tensor
) -> LossOutput:
    """The output of a loss whose terms are a token's own: value, slope, clipped [T]."""
    clipped = tokens.mask & clipped
    sequences = sequence_values(batch, tokens, clipped)
    share, count = aggregate(batch, config.aggregation, tokens.mask, sequences.length)
    return loss_output(
        batch, tokens, sequences, value=value, slope=slope, clipped=clipped, share=share, count=count,
        clipped_sequences=sequences.extra[0] > 0,
    )  # fmt: skip
