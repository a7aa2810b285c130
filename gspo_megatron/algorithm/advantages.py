"""Group-relative advantages: A_i = (r_i - mean of the group) / (std of the group + eps), arXiv 2507.18071 Eq. 6.

Shape legend: M samples of a rollout, G samples per prompt (groups may differ in size).
"""

from collections.abc import Sequence
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
    groups. Raises ValueError for a reward that is not finite, a group of one sample, or lists of unequal length.
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
            advantages[members] = center(values, ddof=1, eps=config.eps, divide=config.std == "group")
    return GroupAdvantages(advantages.float(), len(group_ids), num_zero_std_groups)


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
