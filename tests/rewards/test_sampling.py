"""Dynamic sampling with a made-up source: refilled, bounded, reported; and reward terms added up."""

import itertools
from dataclasses import replace

import pytest

from gspo_megatron.algorithm_config import SamplingConfig, SoftOverlongConfig, VerbosityConfig
from gspo_megatron.config import Config, RewardConfig, RolloutConfig, TrainConfig
from gspo_megatron.sampling import add_reward_terms, collect_groups
from gspo_megatron.types import Rollout, Sample


def sample(group, reward, length=2, prompt=0):
    ids = tuple(range(length))
    return Sample(group, (prompt,), ids, (0.0,) * length, reward, "stop", 0)


class Source:
    """Groups of two samples, numbered from 0 in each call as the collector does; prompt id = the group's overall
    number."""

    def __init__(self, spreads):
        self.spreads, self.calls, self.number = itertools.chain(spreads, itertools.repeat(False)), [], itertools.count()

    def __call__(self, num_prompts):
        self.calls.append(num_prompts)
        groups = [(group, next(self.number), next(self.spreads)) for group in range(num_prompts)]
        return Rollout(tuple(sample(g, reward, prompt=n) for g, n, s in groups for reward in (1.0, 0.0 if s else 1.0)))


def config(prompts=4, **sampling):
    return Config(
        rollout=RolloutConfig(prompts_per_step=prompts, max_response_tokens=10),
        sampling=SamplingConfig(**{"dynamic": True, **sampling}),
    )


def prompts_of(rollout):
    return [sample.prompt_ids[0] for sample in rollout.samples[::2]]


def test_off_is_one_call():
    source = Source([False] * 4)
    rollout, metrics = collect_groups(config(dynamic=False), source)
    assert source.calls == [4] and prompts_of(rollout) == [0, 1, 2, 3] and metrics == {}


def test_refills_until_every_group_has_spread():
    source = Source([True, False, True, False, False, False, True, True, True, True])
    rollout, metrics = collect_groups(config(oversample=1.5), source)
    assert source.calls == [6, 3] and prompts_of(rollout) == [0, 2, 6, 7]
    assert [sample.group for sample in rollout.samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert metrics == {
        "sampling/rounds": 2, "sampling/groups_asked": 9, "sampling/groups_equal": 4, "sampling/groups_surplus": 1,
        "sampling/groups_filled": 0,
    }  # fmt: skip


def test_the_rounds_are_bounded_and_equal_groups_fill_the_rest():
    source = Source([True])
    rollout, metrics = collect_groups(config(oversample=1.0, max_rounds=3), source)
    assert source.calls == [4, 3, 3] and prompts_of(rollout) == [0, 1, 2, 3]
    assert metrics["sampling/rounds"] == 3 and metrics["sampling/groups_filled"] == 3


def test_no_round_starts_when_the_other_ranks_have_waited_for_half_their_time():
    times = iter([0.0, 40.0, 51.0])
    settings = Config(
        rollout=RolloutConfig(prompts_per_step=2), sampling=SamplingConfig(dynamic=True, oversample=1.0),
        train=TrainConfig(timeout_s=100.0),
    )  # fmt: skip
    source = Source([])
    _, metrics = collect_groups(settings, source, clock=lambda: next(times))
    assert source.calls == [2, 2] and metrics["sampling/groups_filled"] == 2


def test_rounding_noise_is_no_spread():
    def noisy(num_prompts):
        return Rollout(tuple(sample(g, r) for g in range(num_prompts) for r in (0.1, 0.1 + 1e-17)))

    assert collect_groups(config(max_rounds=2), noisy)[1]["sampling/groups_equal"] == 12


def test_terms_are_added_and_logged_one_by_one():
    settings = Config(
        rollout=RolloutConfig(max_response_tokens=10, prompts_per_step=2),
        reward=RewardConfig(soft_overlong=SoftOverlongConfig(4), verbosity=VerbosityConfig(coefficient=1.0)),
    )
    rollout = Rollout((sample(0, 1.0, 10), sample(0, 0.0, 2), sample(1, 1.0, 8), sample(1, 1.0, 0)))
    total, parts = add_reward_terms(settings, rollout)
    assert [s.reward for s in total.samples] == pytest.approx([1 - 1 - 1, -0.2, 1 - 0.5 - 0.8, 1.0])
    assert parts["task"] == [1.0, 0.0, 1.0, 1.0]
    _, metrics = collect_groups(settings, lambda number: rollout)
    assert metrics == pytest.approx({"reward/task": 0.75, "reward/soft_overlong": -1.5 / 4, "reward/verbosity": -0.5})


def test_spread_is_of_the_whole_reward():
    """Equal task rewards, but one response costs more: the group has something to teach."""
    settings = replace(config(prompts=1), reward=RewardConfig(verbosity=VerbosityConfig()))
    _, metrics = collect_groups(settings, lambda number: Rollout((sample(0, 1.0, 2), sample(0, 1.0, 6))))
    assert metrics["sampling/rounds"] == 1 and metrics["reward/verbosity"] == pytest.approx(-0.04)
