"""How DeepSeek-V2 chooses groups of experts, which Megatron-Core's router lacks."""

from functools import partial

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


def set_router(layer: ModuleSpec, router: type[TopKRouter]) -> None:
    """Have the experts of this layer spec chosen by `router`."""
    mlp = layer.submodules.mlp
    # a spec in 0.16.1, a partial call in 0.19
    submodules = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    submodules.router = router


class BestOfGroupRouter(TopKRouter):
    """Softmax router that keeps the groups with the best single expert (DeepSeek-V2, `group_limited_greedy`).

    Megatron's `group_limited_topk` (`transformer/moe/moe_utils.py`) ranks groups by the sum of their topk // group_topk
    best experts, as DeepSeek-V3 does, which is another choice wherever that number exceeds 1: for DeepSeek-V2 it is 2.
    """

    def routing(self, logits: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """logits [..., experts] -> weights [tokens, experts], 0 for experts not chosen, and which were chosen, bool."""
        scores = torch.softmax(logits.view(-1, self.config.num_moe_experts), dim=-1, dtype=torch.float32)
        sizes = (self.topk, self.config.moe_router_num_groups, self.config.moe_router_group_topk)
        replay = self.router_replay
        weights, experts = (
            _choose(scores, *sizes) if replay is None else replay.get_replay_topk(scores, *sizes, _choose)
        )
        weights = weights * (self.config.moe_router_topk_scaling_factor or 1.0)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts, True)
        return torch.zeros_like(scores).scatter(1, experts, weights).type_as(logits), chosen


def _choose(scores: Tensor, topk: int, num_groups: int, group_topk: int) -> tuple[Tensor, Tensor]:
    """[tokens, topk] scores and indices of the experts chosen."""
    groups = scores.view(len(scores), num_groups, -1)
    best = groups.amax(dim=-1).topk(group_topk, dim=-1).indices
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, True)
    return groups.masked_fill(~kept[..., None], 0.0).view_as(scores).topk(topk, dim=-1)
