"""Group advantages against hand-computed numbers."""

import json
import math
from pathlib import Path

import pytest
import torch

from gspo_megatron.algorithm.advantages import center, group_advantages, is_zero_std, token_advantages
from gspo_megatron.config import AdvantageConfig

ENTRIES = json.loads((Path(__file__).parents[1] / "data_files" / "gspo_vectors.json").read_text())["advantages"]


@pytest.mark.parametrize("entry", ENTRIES, ids=[str(k) for k in range(len(ENTRIES))])
def test_vector(entry):
    rewards = torch.tensor(entry["rewards"], dtype=torch.float64)
    expected = torch.tensor(entry["adv"], dtype=torch.float64)
    if is_zero_std(rewards, 1e-8):
        assert not expected.any()
    else:
        divide = entry.get("std", True)
        result = center(rewards, entry.get("ddof", 1), entry.get("eps", 0.0), divide)
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    if len(rewards) > 1 and (entry.get("ddof"), entry.get("eps")) == (1, 1e-6):
        result = group_advantages(rewards, [3] * len(rewards), AdvantageConfig())
        torch.testing.assert_close(result.advantages, expected.float())


def test_groups_are_apart_in_any_order():
    rewards, groups = [1.0, 5.0, 0.0, 5.0, 0.0, 7.0], [8, 2, 8, 2, 8, 2]
    result = group_advantages(rewards, groups, AdvantageConfig(std="none"))
    expected = [2 / 3, -2 / 3, -1 / 3, -2 / 3, -1 / 3, 4 / 3]
    torch.testing.assert_close(result.advantages, torch.tensor(expected))
    assert result.advantages.dtype == torch.float32
    assert (result.num_groups, result.num_zero_std_groups) == (2, 0)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, 1e9 + 0.1])
def test_equal_rewards_give_exact_zero(value):
    noisy = [value, value * (1 + 2e-16), value, value * (1 - 1e-16)]
    result = group_advantages(noisy + [0.0, 1.0], [0] * 4 + [1] * 2, AdvantageConfig())
    assert result.advantages[:4].tolist() == [0.0] * 4
    assert result.num_zero_std_groups == 1 and result.num_groups == 2


def test_a_small_difference_above_the_tolerance_counts():
    result = group_advantages([0.0, 1e-4], [0, 0], AdvantageConfig())
    assert result.num_zero_std_groups == 0 and result.advantages[1] > 0.6
    assert group_advantages([0.0, 1e-4], [0, 0], AdvantageConfig(equal_tolerance=1e-3)).num_zero_std_groups == 1


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="group 4 has one sample.*rollout.samples_per_prompt"):
        group_advantages([1.0, 0.0, 1.0], [3, 3, 4], AdvantageConfig())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_names_its_sample(value):
    with pytest.raises(ValueError, match=f"sample 2 .group 7. is {value}"):
        group_advantages([1.0, 0.0, value], [7, 7, 7], AdvantageConfig())


def test_unequal_lists_are_refused():
    with pytest.raises(ValueError, match="rewards"):
        group_advantages([1.0], [0, 0], AdvantageConfig())


def test_leave_one_out_compares_with_the_others():
    config = AdvantageConfig(baseline="leave_one_out", std="none")
    rewards = [1.0, 0.0, 0.5, 2.0, 4.0]
    result = group_advantages(rewards, [0, 0, 0, 1, 1], config)
    expected = [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5, 2.0 - 4.0, 4.0 - 2.0]
    torch.testing.assert_close(result.advantages, torch.tensor(expected))
    divided = group_advantages(rewards, [0, 0, 0, 1, 1], AdvantageConfig(baseline="leave_one_out")).advantages
    torch.testing.assert_close(divided[:3], torch.tensor(expected[:3]) / (0.5 + 1e-6))


def spread(advantages, rewards, responses):
    """The advantage at the last token, half of it before, plus the reward so that it is seen to come through."""
    return [
        [advantage / 2 + reward] * (len(ids) - 1) + [advantage] * bool(ids)
        for advantage, reward, ids in zip(advantages, rewards, responses, strict=True)
    ]


def test_token_advantages_come_group_by_group():
    rewards, groups, responses = [1.0, 0.0, 0.0, 2.0], [4, 9, 4, 9], [[1, 2, 3], [4], [], [5, 6]]
    group = group_advantages(rewards, groups, AdvantageConfig(std="none"))
    result = token_advantages(spread, group, rewards, groups, responses)
    assert result == [[1.25, 1.25, 0.5], [-1.0], [], [2.5, 1.0]]


@pytest.mark.parametrize("function, message", [
    (lambda a, r, ids: [[1.0]], "1 lists for a group of 2 samples"),
    (lambda a, r, ids: [[1.0], [1.0]], "1 values for the 2 tokens of sample 1"),
    (lambda a, r, ids: [[math.nan], [1.0, 2.0]], "not finite for sample 0"),
])  # fmt: skip
def test_token_advantages_that_do_not_fit_are_refused(function, message):
    group = group_advantages([0.0, 1.0], [0, 0], AdvantageConfig())
    with pytest.raises(ValueError, match=message):
        token_advantages(function, group, [0.0, 1.0], [0, 0], [[1], [2, 3]])
