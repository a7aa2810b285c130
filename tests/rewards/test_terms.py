"""The terms of the reward against hand-computed numbers, and how they add up."""

import pytest

from gspo_megatron.algorithm_config import LengthRewardConfig, RepetitionConfig, SoftOverlongConfig, VerbosityConfig
from gspo_megatron.config import RewardConfig
from gspo_megatron.rewards.terms import length_reward, repetition, reward_terms, soft_overlong, verbosity


@pytest.mark.parametrize("length, expected", [(0, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0), (101, -2.0)])
def test_soft_overlong(length, expected):
    assert soft_overlong(SoftOverlongConfig(cache_tokens=20, factor=2.0), length, 100) == pytest.approx(expected)


def test_length_reward_prefers_short_and_never_pays_for_wrong_ones():
    config = LengthRewardConfig(coefficient=2.0)
    assert length_reward(config, [1.0, 1.0, 0.0, 0.0], [10, 30, 10, 20]) == pytest.approx([1.0, -1.0, 0.0, 0.0])
    assert length_reward(config, [1.0, 1.0, 0.0], [10, 30, 30]) == pytest.approx([1.0, -1.0, -1.0])
    assert length_reward(config, [1.0, 0.0], [7, 7]) == [0.0, 0.0]
    assert length_reward(LengthRewardConfig(correct_at=0.4), [0.5, 0.3], [1, 2]) == pytest.approx([0.5, -0.5])


def test_repetition():
    config = RepetitionConfig(coefficient=0.5, ngram=2)
    assert repetition(config, [1, 2, 3, 4]) == 0.0
    assert repetition(config, [1, 2, 1, 2]) == pytest.approx(-0.5 * (1 - 2 / 3))
    assert repetition(config, [7] * 11) == pytest.approx(-0.5 * 0.9)
    assert repetition(config, [1]) == 0.0 and repetition(config, []) == 0.0


def test_verbosity():
    assert verbosity(VerbosityConfig(coefficient=0.2), 50, 100) == pytest.approx(-0.1)


def test_only_configured_terms_are_there_in_order():
    assert reward_terms(RewardConfig(), [1.0], [[1]], 10) == {}
    config = RewardConfig(
        verbosity=VerbosityConfig(), repetition=RepetitionConfig(ngram=1), length=LengthRewardConfig(),
        soft_overlong=SoftOverlongConfig(cache_tokens=2),
    )  # fmt: skip
    terms = reward_terms(config, [1.0, 0.0], [[1, 2], [3] * 9], 10)
    assert list(terms) == ["soft_overlong", "length", "repetition", "verbosity"]
    assert terms["soft_overlong"] == pytest.approx([0.0, -0.5])
    assert terms["length"] == pytest.approx([0.5, -0.5])
    assert terms["repetition"] == pytest.approx([0.0, -8 / 9])
    assert terms["verbosity"] == pytest.approx([-0.02, -0.09])
