"""What silently ruins a run of these algorithms: rules about losses, corrections, regularizers and rewards.

A guard has a name, and `loss.i_know_what_i_do: [name]` switches it off; the other rules are about what cannot work at
all. No torch here.
"""

import dataclasses
from collections.abc import Callable, Iterable

from gspo_megatron.algorithm_config import (
    GROUP_LOSSES,
    LOSS_CONFIGS,
    ROLLOUT_ANCHORED_LOSSES,
    SEQUENCE_LOSSES,
    TOKEN_ADVANTAGE_LOSSES,
)
from gspo_megatron.config import Config, ConfigError
from gspo_megatron.plugins import load_function

WIDEST_SEQUENCE_CLIP = 0.05


def algorithm_faults(config: Config) -> list[str]:
    """All faults of the algorithm's sections, one line each: key, value, what is allowed, what to do."""
    faults = []
    for name in config.loss.i_know_what_i_do:
        if name not in GUARDS:
            faults.append(f"loss.i_know_what_i_do: {name!r} is no guard; allowed: {', '.join(GUARDS)}")
    faults += _loss_ranges(config)
    for name, (_, rule) in _GUARDS.items():
        if name not in config.loss.i_know_what_i_do:
            faults += [f"{fault}, or set loss.i_know_what_i_do=[{name}]" for fault in rule(config)]
    return faults + [*_bands(config), *_advantages(config), *_groups(config), *_overlong(config)]


def _wide_clip(config: Config) -> Iterable[str]:
    loss = config.loss
    for name in ("clip_low", "clip_high") if loss.name in SEQUENCE_LOSSES else ():
        value = getattr(loss, name)
        if value > WIDEST_SEQUENCE_CLIP and not (name == "clip_low" and value >= 1):
            yield (
                f"loss.{name}: {value} is refused for {loss.name}, must be at most {WIDEST_SEQUENCE_CLIP}: the ratio "
                "of a sequence is a mean over its tokens and stays within about 1e-3 of 1, so that this range never "
                "clips (the paper: 3e-4 and 4e-4); lower it"
            )


def _token_mean(config: Config) -> Iterable[str]:
    loss = config.loss
    if loss.name in SEQUENCE_LOSSES and getattr(loss, "aggregation", "seq-mean-token-mean") != "seq-mean-token-mean":
        yield (
            f"loss.aggregation: {loss.aggregation} is refused for {loss.name}: the mean over sequences is what makes "
            "the loss GSPO, token-mean would weigh a sequence by its length; use seq-mean-token-mean, or loss.name=grpo"
        )


def _summed_ratio(config: Config) -> Iterable[str]:
    if getattr(config.loss, "log_ratio", "mean") == "sum":
        yield (
            f"loss.log_ratio: sum is refused for {config.loss.name}: the product of a response's token ratios spreads "
            "with its length, from 1e-3 around 1 to factors of e, and the clip range cuts nearly all; use mean"
        )


def _engine_filter(config: Config) -> Iterable[str]:
    rollout = config.rollout
    for key, value, neutral in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        if value != neutral:
            yield (
                f"rollout.{key}: {value} is refused: the servers then sample from a cut distribution whose log-probs "
                f"they do not give and the trainer does not model; use {neutral}"
            )


def _k1_in_loss(config: Config) -> Iterable[str]:
    if config.regularizer.kl and config.regularizer.kl_estimator == "k1":
        yield (
            "regularizer.kl_estimator: k1 is refused as a term of the loss: its gradient is that of the log-probs "
            "alone, zero on average, and pulls nowhere near the reference; use k2 or k3"
        )


def _double_correction(config: Config) -> Iterable[str]:
    loss, correction = config.loss, config.correction
    anchored = loss.name in ROLLOUT_ANCHORED_LOSSES or getattr(loss, "rollout_correction", False)
    for key in ("token", "sequence"):
        if anchored and getattr(correction, key) != "none":
            yield (
                f"correction.{key}: {getattr(correction, key)} is refused with loss.name={loss.name}, whose own weight "
                "is against the rollout policy already, so that the gap would be corrected twice; use none"
            )


def _idle_correction(config: Config) -> Iterable[str]:
    for key in ("token", "sequence"):
        value = getattr(config.correction, key)
        if value != "none" and config.loss.old_log_probs == "rollout":
            yield (
                f"correction.{key}: {value} does nothing with loss.old_log_probs=rollout, where pi_old is the rollout "
                "policy and its weight 1; use none, or loss.old_log_probs=recompute"
            )


Rule = Callable[[Config], Iterable[str]]

_GUARDS: dict[str, tuple[str, Rule]] = {
    "wide_clip": (f"a clip range above {WIDEST_SEQUENCE_CLIP} for a loss with sequence ratios", _wide_clip),
    "token_mean": ("a mean over tokens for a loss with sequence ratios", _token_mean),
    "summed_ratio": ("a sequence ratio of the sum, not the mean, of log ratios", _summed_ratio),
    "engine_filter": ("top-p or top-k on the servers, which the trainer does not model", _engine_filter),
    "k1_in_loss": ("the k1 estimator as a term of the loss", _k1_in_loss),
    "double_correction": ("a correction on a loss that is against the rollout policy already", _double_correction),
    "idle_correction": ("a correction where pi_old is the rollout policy", _idle_correction),
}

GUARDS = {name: text for name, (text, _) in _GUARDS.items()}
"""Names for `loss.i_know_what_i_do` -> what the guard refuses."""

_POSITIVE = ("above 0", lambda value: value > 0)
_LOSS_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    **dict.fromkeys(("log_eps_low", "log_eps_high", "k_pos", "k_neg", "lam_pos", "lam_neg", "tau"), _POSITIVE),
    **dict.fromkeys(("tau_pos", "tau_neg", "is_high", "eps", "delta_low", "delta_high", "tis_cap"), _POSITIVE),
    **dict.fromkeys(("lo", "hi", "dual"), _POSITIVE),
    **dict.fromkeys(("is_low", "power", "weight_cap"), ("at least 0", lambda value: value >= 0)),
    "alpha": ("at least 0 and below 1", lambda value: 0 <= value < 1),
    "cap": ("above 1", lambda value: value > 1),
}
"""Field of a registered loss -> the values allowed, in words and as a test."""


def _loss_ranges(config: Config) -> Iterable[str]:
    loss = config.loss
    if loss.name not in LOSS_CONFIGS:
        return
    for field in dataclasses.fields(loss):
        path, value = f"loss.{field.name}", getattr(loss, field.name)
        if field.name in _LOSS_RANGES and not _LOSS_RANGES[field.name][1](value):
            yield f"{path}: {value} is out of range, must be {_LOSS_RANGES[field.name][0]}"
        elif field.name in ("clip_low", "clip_high") and value <= 0:
            yield f"{path}: {value} is out of range, must be above 0 (the ratio is 1 at the first update)"
        elif field.name == "clip_low" and value >= 1:
            yield f"{path}: {value} is out of range, must be below 1 (a ratio is never below 0)"


def _bands(config: Config) -> Iterable[str]:
    correction = config.correction
    for low, high in (("token_low", "token_high"), ("sequence_low", "sequence_high")):
        if not 0 <= getattr(correction, low) < getattr(correction, high):
            yield (
                f"correction.{low}: {getattr(correction, low)} must be at least 0 and below correction.{high} "
                f"({getattr(correction, high)})"
            )
    if getattr(config.loss, "is_low", 0.0) > getattr(config.loss, "is_high", 1.0):
        yield f"loss.is_low: {config.loss.is_low} is above loss.is_high ({config.loss.is_high}); lower it"


def _advantages(config: Config) -> Iterable[str]:
    name, loss = config.advantage.per_token, config.loss
    if not name:
        return
    if loss.name in LOSS_CONFIGS and loss.name not in TOKEN_ADVANTAGE_LOSSES:
        yield (
            f"advantage.per_token: {name!r} is refused with loss.name={loss.name}, which takes one advantage a "
            f"sequence; use one of {', '.join(sorted(TOKEN_ADVANTAGE_LOSSES))}"
        )
    try:
        load_function("advantage.per_token", name)
    except ConfigError as error:
        yield from error.faults


def _groups(config: Config) -> Iterable[str]:
    """A loss that compares the samples of a group sees them all in one micro-batch."""
    if config.loss.name not in GROUP_LOSSES:
        return
    samples = config.rollout.samples_per_prompt
    longest = samples * (config.data.max_prompt_tokens + config.rollout.max_response_tokens)
    if config.train.tokens_per_micro_batch < longest:
        yield (
            f"train.tokens_per_micro_batch: {config.train.tokens_per_micro_batch} is less than a group's longest "
            f"samples together, which loss.name={config.loss.name} compares in one micro-batch: "
            f"rollout.samples_per_prompt ({samples}) times prompt and response, {longest}; raise it, or lower them"
        )


def _overlong(config: Config) -> Iterable[str]:
    penalty, limit = config.reward.soft_overlong, config.rollout.max_response_tokens
    if penalty is not None and penalty.cache_tokens > limit:
        yield (
            f"reward.soft_overlong.cache_tokens: {penalty.cache_tokens} is more than rollout.max_response_tokens "
            f"({limit}), so that every response is punished; lower it"
        )
