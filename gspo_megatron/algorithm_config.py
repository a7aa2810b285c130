"""Settings of the algorithm: losses, advantages, corrections, regularizers, sampling rules and reward terms.

`config.py` imports them all; they stand apart because they grow with every loss. No torch here.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LossConfig:
    """What all losses share. `loss.name` chooses the subclass whose fields are allowed beside these."""

    name: str = "gspo"
    """A registered loss, or `package.module:function` (see docs/algorithms.md)."""
    old_log_probs: Literal["recompute", "rollout"] = "recompute"
    """Where pi_old comes from: a pass of the trainer before the first update, or the servers' own log-probs."""
    i_know_what_i_do: tuple[str, ...] = ()
    """Names of guards to switch off, as printed by their messages."""


@dataclass(frozen=True)
class GSPOConfig(LossConfig):
    """Group Sequence Policy Optimization, arXiv 2507.18071 Eq. 5-7."""

    name: str = "gspo"
    clip_low: float = 3e-4
    """The sequence ratio is clipped below 1 - clip_low where the advantage is negative."""
    clip_high: float = 4e-4
    """The sequence ratio is clipped above 1 + clip_high where the advantage is positive."""
    log_ratio: Literal["mean", "sum"] = "mean"
    """The exponent of the sequence ratio: the mean of its tokens' log ratios is GSPO; their sum is the plain importance
    weight of a sequence, whose spread grows with its length."""
    aggregation: Literal["seq-mean-token-mean", "token-mean"] = "seq-mean-token-mean"
    """The mean over sequences is GSPO; token-mean weighs a sequence by its length."""


@dataclass(frozen=True)
class GSPOTokenConfig(GSPOConfig):
    """GSPO-token, arXiv 2507.18071 Eq. 13-17: the same ratio, token-wise gradient and advantages."""

    name: str = "gspo_token"


@dataclass(frozen=True)
class LUSPOConfig(LossConfig):
    """Length-unbiased sequence policy optimization, arXiv 2602.05261: the GSPO term times the sequence's length."""

    name: str = "luspo"
    clip_low: float = 2e-3
    """The sequence ratio is clipped below 1 - clip_low where the advantage is negative."""
    clip_high: float = 2.5e-3
    """The sequence ratio is clipped above 1 + clip_high where the advantage is positive."""


@dataclass(frozen=True)
class GMPOConfig(LossConfig):
    """Geometric-mean policy optimization, arXiv 2507.20673: token log ratios clipped on one side, then averaged."""

    name: str = "gmpo"
    log_eps_low: float = 0.4
    """A token's log ratio is clipped below -log_eps_low where the advantage is negative."""
    log_eps_high: float = 0.4
    """A token's log ratio is clipped above log_eps_high where the advantage is positive."""


@dataclass(frozen=True)
class FSPOConfig(LossConfig):
    """Fair sequence policy optimization, arXiv 2509.09177 Eq. 3-5: the summed log ratio, in a band that grows with the
    square root of the length."""

    name: str = "fspo"
    clip_low: float = 0.03
    """The summed log ratio is clipped below -clip_low * sqrt(length) where the advantage is negative."""
    clip_high: float = 0.03
    """The summed log ratio is clipped above clip_high * sqrt(length) where the advantage is positive."""


@dataclass(frozen=True)
class VESPOConfig(LossConfig):
    """Variational sequence-level soft policy optimization, arXiv 2602.10693: weight W^k exp(lambda (1 - W)) with the
    product W of a sequence's token ratios."""

    name: str = "vespo"
    k_pos: float = 2.0
    """k where the advantage is not negative."""
    lam_pos: float = 3.0
    """lambda where the advantage is not negative."""
    k_neg: float = 3.0
    """k where the advantage is negative."""
    lam_neg: float = 2.0
    """lambda where the advantage is negative."""
    rollout_correction: bool = False
    """Multiply W by the sequence's pi_old / mu, the gap to the rollout engine."""


@dataclass(frozen=True)
class REALConfig(LossConfig):
    """Rewards as labels, arXiv 2602.05630: samples of a group told apart by their sequence ratios, as a classifier."""

    name: str = "real"
    tau: float = 0.5
    """Temperature of the mean log ratios."""


@dataclass(frozen=True)
class SequenceMeanConfig(LossConfig):
    """Losses that are a mean over tokens, then over sequences, unless asked for another."""

    aggregation: Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"] = "seq-mean-token-mean"
    """Mean over each sequence's tokens, then over sequences; or over all trained tokens; or a sum over each sequence's
    tokens, then a mean over sequences."""


@dataclass(frozen=True)
class TokenMeanConfig(SequenceMeanConfig):
    """Losses that are a mean over all trained tokens, unless asked for another."""

    aggregation: Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"] = "token-mean"


@dataclass(frozen=True)
class GRPOConfig(SequenceMeanConfig):
    """GRPO as in arXiv 2507.18071 Eq. 2-3, without the KL term."""

    name: str = "grpo"
    clip_low: float = 0.2
    """A token's ratio is clipped below 1 - clip_low where the advantage is negative."""
    clip_high: float = 0.27
    """A token's ratio is clipped above 1 + clip_high where the advantage is positive."""


@dataclass(frozen=True)
class SAPOConfig(SequenceMeanConfig):
    """Soft adaptive policy optimization, arXiv 2511.20347: a sigmoid gate in place of the clip."""

    name: str = "sapo"
    tau_pos: float = 1.0
    """Steepness of the gate where the advantage is positive."""
    tau_neg: float = 1.05
    """Steepness of the gate where it is not."""


@dataclass(frozen=True)
class CISPOConfig(TokenMeanConfig):
    """Clipped importance sampling weights, arXiv 2506.13585: every token keeps a gradient, its weight is bounded."""

    name: str = "cispo"
    is_low: float = 0.0
    """Lower bound of the weight."""
    is_high: float = 5.0
    """Upper bound of the weight."""


@dataclass(frozen=True)
class CFPOConfig(SequenceMeanConfig):
    """Clipping-free policy optimization, arXiv 2601.22801: a quadratic penalty in place of the clip."""

    name: str = "cfpo"
    eps: float = 0.2
    """Distance of the ratio from 1 at which the gradient vanishes."""


@dataclass(frozen=True)
class PSPOConfig(SequenceMeanConfig):
    """Probability smoothing, arXiv 2509.21282: the new policy is mixed with the old one."""

    name: str = "pspo"
    alpha: float = 0.1
    """Share of the old policy in the mixture."""


@dataclass(frozen=True)
class DPPOTVConfig(TokenMeanConfig):
    """Divergence PPO by total variation, arXiv 2602.04879, anchored at the rollout policy."""

    name: str = "dppo_tv"
    delta_low: float = 0.2
    """Change of a token's probability beyond which lowering it further is masked (no published default)."""
    delta_high: float = 0.2
    """Change of a token's probability beyond which raising it further is masked (no published default)."""


@dataclass(frozen=True)
class MiniRLConfig(SequenceMeanConfig):
    """MiniRL, arXiv 2512.01374: REINFORCE with the token weight pi / mu, masked by the ratio to pi_old. Meant for
    `advantage.std: none`."""

    name: str = "minirl"
    clip_low: float = 0.2
    """A token is masked below the ratio 1 - clip_low where the advantage is negative."""
    clip_high: float = 0.27
    """A token is masked above the ratio 1 + clip_high where the advantage is positive."""
    tis_cap: float = 5.0
    """Bound on the token weight pi / mu."""
    aggregation: Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"] = "seq-mean-token-sum"


@dataclass(frozen=True)
class CTPOConfig(TokenMeanConfig):
    """Cumulative token policy optimization, arXiv 2605.07331: the product of the ratios up to each token, in a band
    that grows with its position."""

    name: str = "ctpo"
    lo: float = 0.025
    """The cumulative log ratio at token t is clipped below -lo * t^power where the advantage is negative."""
    hi: float = 0.05
    """It is clipped above hi * t^power where the advantage is positive."""
    dual: float = 0.05
    """It is clipped above dual * t^power where the advantage is negative."""
    power: float = 0.5


@dataclass(frozen=True)
class ASPOConfig(SequenceMeanConfig):
    """Asymmetric importance sampling, arXiv 2510.06062: the weight is turned over where the advantage is positive."""

    name: str = "aspo"
    clip_low: float = 0.2
    """A token is masked below the ratio 1 - clip_low where the advantage is negative."""
    clip_high: float = 0.2
    """A token is masked above the ratio 1 + clip_high where the advantage is positive."""
    weight_cap: float = 0.0
    """Bound on the turned weight 1 / ratio (the paper's dual clip, whose number is not published); 0 sets none."""


@dataclass(frozen=True)
class DCPOConfig(SequenceMeanConfig):
    """Dynamic clipping, arXiv 2509.02333: the rarer a token was, the wider its clip range."""

    name: str = "dcpo"
    clip_low: float = 0.16
    clip_high: float = 0.2
    cap: float = 10.0
    """Largest ratio that any token may have before it is clipped."""


LOSS_CONFIGS: dict[str, type[LossConfig]] = {
    config.name: config
    for config in (
        GSPOConfig, GSPOTokenConfig, LUSPOConfig, GMPOConfig, FSPOConfig, VESPOConfig, GRPOConfig, SAPOConfig,
        CISPOConfig, CFPOConfig, PSPOConfig, DPPOTVConfig, MiniRLConfig, CTPOConfig, ASPOConfig, DCPOConfig, REALConfig,
    )
}  # fmt: skip
"""Loss name -> its configuration class. `algorithm/losses.py` adds the function."""

SEQUENCE_LOSSES = frozenset({"gspo", "gspo_token", "luspo"})
"""Losses that clip the length-normalised sequence ratio: a range as wide as a token loss's never clips it."""

GROUP_LOSSES = frozenset({"real"})
"""Losses that compare the sequences of a group: a group stays in one micro-batch."""

TOKEN_ADVANTAGE_LOSSES = frozenset(LOSS_CONFIGS) - {"gspo", "luspo", "gmpo", "fspo", "vespo", "real"}
"""Losses that take one advantage a token."""

ROLLOUT_ANCHORED_LOSSES = frozenset({"dppo_tv", "minirl"})
"""Losses whose own weight is against the rollout policy."""


@dataclass(frozen=True)
class AdvantageConfig:
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its group, or the mean of the group's other samples (RLOO)."""
    std: Literal["group", "none"] = "group"
    """Divide by the group's standard deviation, or not (Dr.GRPO, MiniRL)."""
    eps: float = 1e-6
    """Added to the standard deviation."""
    equal_tolerance: float = 1e-8
    """A group whose rewards differ by no more than this has advantage 0 and counts as a zero-std group."""
    per_token: str = ""
    """`package.module:function` that spreads each sample's advantage over its tokens, for losses that take such."""


@dataclass(frozen=True)
class CorrectionConfig:
    """Weights for the gap between rollout engine (mu) and trainer (pi_old), on top of any loss. All are off by default;
    their metrics are logged in any case."""

    token: Literal["none", "truncate", "mask"] = "none"
    """Weigh each token by pi_old / mu: `truncate` bounds the weight by token_cap (TIS), `mask` drops tokens outside
    [token_low, token_high] (IcePop)."""
    token_cap: float = 2.0
    token_low: float = 0.5
    token_high: float = 5.0
    sequence: Literal["none", "truncate", "mask"] = "none"
    """Weigh each sequence by the geometric mean of pi_old / mu over its tokens: `truncate` bounds the weight by
    sequence_cap; `mask` drops the sequence outside [sequence_low, sequence_high]. What is dropped still counts."""
    sequence_cap: float = 2.0
    sequence_low: float = 0.999
    sequence_high: float = 1.002
    off_policy: Literal["none", "mask"] = "none"
    """`mask` drops a sequence with a negative advantage and mean(log pi_old - log pi_theta) above off_policy_delta."""
    off_policy_delta: float = 0.1
    """In nats per token; no number is published."""


@dataclass(frozen=True)
class RegularizerConfig:
    """Terms added to the loss, weighed over tokens and sequences as the loss weighs them."""

    kl: float = 0.0
    """Coefficient of the divergence from the policy that the run started from, whose weights are held in host memory;
    0 holds none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of log r = log pi_ref - log pi_theta: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus; 0 computes no entropies."""


@dataclass(frozen=True)
class SamplingConfig:
    """Which samples are trained on."""

    dynamic: bool = False
    """Ask for more prompts until the batch holds only groups whose rewards differ (DAPO, arXiv 2503.14476)."""
    oversample: float = 1.5
    """Prompts asked for in a round, relative to the groups that are still missing."""
    max_rounds: int = 10
    """Rounds a step may take; groups of equal rewards fill what is missing then, with advantage 0."""
    overlong_filtering: bool = False
    """Leave responses cut by the length limit out of the loss: out of its sum and of what it is divided by. They still
    count in their group's advantages."""


@dataclass(frozen=True)
class SoftOverlongConfig:
    """DAPO's penalty (arXiv 2503.14476 Eq. 13): from 0 to -factor over the last cache_tokens before the limit."""

    cache_tokens: int = 256
    """Tokens before rollout.max_response_tokens over which the penalty grows."""
    factor: float = 1.0


@dataclass(frozen=True)
class LengthRewardConfig:
    """Kimi k1.5's length reward (arXiv 2501.12599): coefficient * (0.5 - (length - shortest) / (longest - shortest))
    within the group, and never above 0 for a response that is not correct."""

    coefficient: float = 1.0
    correct_at: float = 1.0
    """A response whose own reward is at least this is correct."""


@dataclass(frozen=True)
class RepetitionConfig:
    """-coefficient * the share of a response's n-grams of tokens that stood in it before."""

    coefficient: float = 1.0
    ngram: int = 20
    """n, in tokens."""


@dataclass(frozen=True)
class VerbosityConfig:
    """-coefficient * length / rollout.max_response_tokens (the price of tokens that Agent-GSPO, arXiv 2510.22477, adds
    to GSPO)."""

    coefficient: float = 0.1
