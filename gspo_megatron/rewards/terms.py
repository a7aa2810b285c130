"""Terms that are added to the reward: what a response costs beside what its task says. One group at a time, no torch.

Shape legend: G samples of one prompt.
"""

from collections.abc import Sequence

from gspo_megatron.algorithm_config import LengthRewardConfig, RepetitionConfig, SoftOverlongConfig, VerbosityConfig
from gspo_megatron.config import RewardConfig


def reward_terms(
    config: RewardConfig, rewards: Sequence[float], responses: Sequence[Sequence[int]], max_tokens: int
) -> dict[str, list[float]]:
    """[G] values of each term that has a section in `config`, in the order of the configuration.

    `rewards` [G] are the task's own, `responses` [G] token ids, `max_tokens` is rollout.max_response_tokens.
    """
    lengths = [len(response) for response in responses]
    terms = {}
    if config.soft_overlong is not None:
        terms["soft_overlong"] = [soft_overlong(config.soft_overlong, length, max_tokens) for length in lengths]
    if config.length is not None:
        terms["length"] = length_reward(config.length, rewards, lengths)
    if config.repetition is not None:
        terms["repetition"] = [repetition(config.repetition, response) for response in responses]
    if config.verbosity is not None:
        terms["verbosity"] = [verbosity(config.verbosity, length, max_tokens) for length in lengths]
    return terms


def soft_overlong(config: SoftOverlongConfig, length: int, max_tokens: int) -> float:
    """DAPO, arXiv 2503.14476 Eq. 13: 0 up to max - cache tokens, then linearly down to -factor at max."""
    over = length - (max_tokens - config.cache_tokens)
    return -config.factor * min(max(over / config.cache_tokens, 0.0), 1.0)


def length_reward(config: LengthRewardConfig, rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Kimi k1.5, arXiv 2501.12599: coefficient * (0.5 - (L - shortest) / (longest - shortest)) in the group, at most 0
    for a response that is not correct; 0 for a group of one length."""
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    scores = [config.coefficient * (0.5 - (length - shortest) / (longest - shortest)) for length in lengths]
    return [
        score if reward >= config.correct_at else min(score, 0.0) for score, reward in zip(scores, rewards, strict=True)
    ]


def repetition(config: RepetitionConfig, response: Sequence[int]) -> float:
    """-coefficient * (1 - distinct n-grams / all n-grams); 0 for a response shorter than n tokens."""
    count = len(response) - config.ngram + 1
    if count <= 0:
        return 0.0
    distinct = len({tuple(response[start : start + config.ngram]) for start in range(count)})
    return -config.coefficient * (1 - distinct / count)


def verbosity(config: VerbosityConfig, length: int, max_tokens: int) -> float:
    """-coefficient * L / max_tokens: every token costs the same."""
    return -config.coefficient * length / max_tokens
