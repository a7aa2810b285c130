"""Which samples a step trains on: reward terms added up, and groups of equal rewards replaced (dynamic sampling).

Shape legend: P groups of a step, M samples.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from gspo_megatron.algorithm.advantages import is_zero_std
from gspo_megatron.config import Config
from gspo_megatron.rewards.terms import reward_terms
from gspo_megatron.types import Rollout, Sample

Group = list[Sample]
Collect = Callable[[int], Rollout]
"""Number of prompts -> their samples, group by group."""


def groups_of(rollout: Rollout) -> list[Group]:
    """The samples of each group, in the order of the rollout."""
    return [list(samples) for _, samples in itertools.groupby(rollout.samples, key=lambda sample: sample.group)]


def add_reward_terms(config: Config, rollout: Rollout) -> tuple[Rollout, dict[str, list[float]]]:
    """The rollout with the terms of `config.reward` added to its rewards, and the [M] parts by name, `task` being the
    reward's own; no parts where no term is configured."""
    samples: list[Sample] = []
    parts: dict[str, list[float]] = {}
    for group in groups_of(rollout):
        rewards = [sample.reward for sample in group]
        responses = [sample.response_ids for sample in group]
        terms = reward_terms(config.reward, rewards, responses, config.rollout.max_response_tokens)
        if not terms:
            return rollout, {}
        for name, values in {"task": rewards, **terms}.items():
            parts.setdefault(name, []).extend(values)
        totals = [reward + sum(values) for reward, *values in zip(rewards, *terms.values(), strict=True)]
        samples += [replace(sample, reward=total) for sample, total in zip(group, totals, strict=True)]
    return Rollout(tuple(samples)), parts


def collect_groups(
    config: Config, collect: Collect, clock: Callable[[], float] = time.monotonic
) -> tuple[Rollout, dict[str, float]]:
    """rollout.prompts_per_step groups with their reward terms, and what to log of how they were found.

    With `sampling.dynamic` they are groups whose rewards differ: more prompts are asked for until there are enough,
    for at most `sampling.max_rounds` rounds, none of which starts after half of train.timeout_s, for which the other
    ranks wait. Groups of equal rewards fill what is missing then. Groups are numbered from 0 anew.
    """
    wanted = config.rollout.prompts_per_step
    if not config.sampling.dynamic:
        rollout, parts = add_reward_terms(config, collect(wanted))
        return rollout, _part_means(parts)
    kept, equal, asked, rounds, started = [], [], 0, 0, clock()
    while len(kept) < wanted and rounds < config.sampling.max_rounds:
        if rounds and clock() - started > config.train.timeout_s / 2:
            break
        number = math.ceil((wanted - len(kept)) * config.sampling.oversample)
        found = _with_parts(*add_reward_terms(config, collect(number)))
        rounds, asked = rounds + 1, asked + number
        for group, parts in found:
            rewards = torch.tensor([sample.reward for sample in group], dtype=torch.float64)
            (equal if is_zero_std(rewards, config.advantage.equal_tolerance) else kept).append((group, parts))
    filled = (kept + equal)[:wanted]
    samples = [replace(sample, group=number) for number, (group, _) in enumerate(filled) for sample in group]
    parts = {name: [value for _, own in filled for value in own[name]] for name in filled[0][1]}
    report = {
        "sampling/rounds": rounds,
        "sampling/groups_asked": asked,
        "sampling/groups_equal": len(equal),
        "sampling/groups_surplus": max(len(kept) - wanted, 0),
        "sampling/groups_filled": max(wanted - len(kept), 0),
    }
    return Rollout(tuple(samples)), {**_part_means(parts), **report}


def _with_parts(rollout: Rollout, parts: dict[str, list[float]]) -> list[tuple[Group, dict[str, list[float]]]]:
    """Each group beside its own stretch of the parts."""
    result, start = [], 0
    for group in groups_of(rollout):
        stop = start + len(group)
        result.append((group, {name: values[start:stop] for name, values in parts.items()}))
        start = stop
    return result


def _part_means(parts: dict[str, list[float]]) -> dict[str, float]:
    return {f"reward/{name}": sum(values) / len(values) for name, values in parts.items()}
