"""Group-relative advantages: A_i = (r_i - mean of the group) / (std of the group + eps), arXiv 2507.18071 Eq. 6.

Shape legend: M samples of a rollout, G samples per prompt (groups may differ in size), R response tokens of a sample.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_megatron.config import AdvantageConfig


@dataclass(frozen=True)
class GroupAdvantages:
    advantages: Tensor
    """[M] float32."""
    num_groups: int
    num_zero_std_groups: int
    """Groups of equal rewards: their advantages are exactly 0, they teach nothing."""


def group_advantages(
    rewards: Sequence[float] | Tensor, groups: Sequence[int] | Tensor, config: AdvantageConfig
) -> GroupAdvantages:
    """Advantages of M samples with `rewards` [M] and group ids `groups` [M], in any order.

    Computed in float64 with the sample standard deviation (ddof 1), so that the result does not depend on the order of
    groups. The baseline is the group's mean, or with `leave_one_out` that of the group's other samples.
    Raises ValueError for a reward that is not finite, a group of one sample, or lists of unequal length.
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    groups = torch.as_tensor(groups, dtype=torch.long)
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must be two [M] lists")
    for sample in (~torch.isfinite(rewards)).nonzero().flatten().tolist():
        raise ValueError(f"reward of sample {sample} (group {int(groups[sample])}) is {float(rewards[sample])}")

    advantages = torch.zeros_like(rewards)
    num_zero_std_groups = 0
    group_ids = groups.unique().tolist()
    for group in group_ids:
        members = (groups == group).nonzero().flatten()
        if members.numel() < 2:
            raise ValueError(
                f"group {group} has one sample and no group to compare it with: "
                "set rollout.samples_per_prompt to 2 or more"
            )
        values = rewards[members]
        if is_zero_std(values, config.equal_tolerance):
            num_zero_std_groups += 1
        else:
            centered = center(values, ddof=1, eps=config.eps, divide=config.std == "group")
            if config.baseline == "leave_one_out":
                # r_i - mean of the others = G / (G - 1) * (r_i - mean of all), arXiv 2402.14740
                centered = centered * (values.numel() / (values.numel() - 1))
            advantages[members] = centered
    return GroupAdvantages(advantages.float(), len(group_ids), num_zero_std_groups)


TokenFunction = Callable[[list[float], list[float], list[list[int]]], Sequence[Sequence[float]]]
"""(advantages [G], rewards [G], response token ids [G][R]) of one group -> advantages [G][R]."""


def token_advantages(
    function: TokenFunction, advantages: GroupAdvantages, rewards: Sequence[float], groups: Sequence[int],
    responses: Sequence[Sequence[int]],
) -> list[list[float]]:  # fmt: skip
    """One advantage a response token of each of the M samples, by `advantage.per_token`, group by group.

    The function runs on every rank and must give the same numbers on each. Raises ValueError naming the sample where it
    gives another number of values than the response has tokens, or one that is not finite.
    """
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(groups):
        members.setdefault(int(group), []).append(sample)
    result: list[list[float]] = [[] for _ in responses]
    for samples in members.values():
        given = function(
            [float(advantages.advantages[s]) for s in samples],
            [float(rewards[s]) for s in samples],
            [[int(token) for token in responses[s]] for s in samples],
        )
        if len(given) != len(samples):
            raise ValueError(f"advantage.per_token gave {len(given)} lists for a group of {len(samples)} samples")
        for sample, values in zip(samples, given, strict=True):
            values = [float(value) for value in values]
            length = len(responses[sample])
            if len(values) != length:
                raise ValueError(
                    f"advantage.per_token gave {len(values)} values for the {length} tokens of sample {sample}"
                )
            if not all(map(math.isfinite, values)):
                raise ValueError(f"advantage.per_token gave a value that is not finite for sample {sample}: {values}")
            result[sample] = values
    return result


def is_zero_std(rewards: Tensor, tolerance: float) -> bool:
    """Whether the rewards [G] of one group differ by no more than `tolerance`, or by no more than float64 rounding.

    Without a tolerance the rounding noise of equal rewards, divided by its own std, becomes advantages near 1.
    """
    spread = float(rewards.max() - rewards.min())
    return spread <= max(tolerance, 8 * torch.finfo(torch.float64).eps * float(rewards.abs().max()))


def center(rewards: Tensor, ddof: int, eps: float, divide: bool) -> Tensor:
    """[G] float64 rewards of one group minus their mean, divided by (std with `ddof`) + eps where `divide`."""
    centered = rewards - rewards.mean()
    if not divide:
        return centered
    return centered / ((centered.square().sum() / (rewards.numel() - ddof)).sqrt() + eps)
