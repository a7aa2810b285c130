"""Alarms on a step's metrics: thresholds of `health`, judged from this step alone, so that a resumed run says the same.

No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gspo_megatron.config import HealthConfig


@dataclass(frozen=True)
class Alarm:
    """`metric` beyond the threshold in field `threshold` of `HealthConfig` (below it for a `min_`)."""

    metric: str
    threshold: str
    advice: str
    """What it means, and what helps."""

    def rings(self, value: float, bound: float) -> bool:
        if not bound:
            return False
        return value < bound if self.threshold.startswith("min_") else value > bound


ALARMS = {
    "expert_change": Alarm(
        "moe/expert_change_last", "max_expert_change",
        "updates send tokens to other experts than pi_old did, token ratios say little; lower optimizer.lr, or "
        "train.updates_per_rollout",
    ),
    "load_imbalance": Alarm(
        "moe/load_imbalance", "max_load_imbalance",
        "a few experts take most tokens; look at moe/idle_experts, lower optimizer.lr",
    ),
    "ess": Alarm(
        "gspo/ess", "min_ess", "few tokens carry the importance weight; lower optimizer.lr or train.updates_per_rollout"
    ),
    "clip_fraction": Alarm(
        "gspo/clip_fraction_sequences", "max_clip_fraction",
        "next to no sequence has a gradient; lower optimizer.lr, or widen loss.clip_low and loss.clip_high",
    ),
    "log_ratio": Alarm(
        "gspo/log_ratio_std", "max_log_ratio_std", "the policy moves far within one step; lower optimizer.lr"
    ),
    "token_log_ratio": Alarm(
        "gspo/token_log_ratio_std", "max_token_log_ratio_std",
        "single tokens move far within one step; lower optimizer.lr",
    ),
    "grad_norm": Alarm(
        "grad_norm", "max_grad_norm",
        "a few sequences decide where an update goes, cut to optimizer.clip_grad; look at gspo/ratio_max, lower "
        "optimizer.lr if it comes again",
    ),
    "logprob_gap": Alarm(
        "rollout/logprob_gap_mean", "max_logprob_gap",
        "the servers drift from the policy; compare types and kernels of both sides",
    ),
    "zero_std": Alarm(
        "rollout/zero_std_fraction", "max_zero_std",
        "next to no group has different rewards; problems are too easy, too hard, or the reward is broken",
    ),
    "truncated": Alarm(
        "rollout/truncated_fraction", "max_truncated",
        "responses run into rollout.max_response_tokens; raise it, or see reward.soft_overlong",
    ),
}  # fmt: skip
"""Name -> alarm, `health/alarm_<name>` in the metrics."""


class Alarms:
    def __init__(self, config: HealthConfig):
        self._config = config
        self._ringing: dict[str, str] = {}
        self._news: list[str] = []

    def judge(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """`health/alarm_<name>` (0 or 1) of each alarm whose metric is there, and their sum `health/alarms`."""
        ringing, results = {}, {}
        for name, alarm in ALARMS.items():
            if alarm.metric not in metrics:
                continue
            value, bound = metrics[alarm.metric], getattr(self._config, alarm.threshold)
            rings = alarm.rings(value, bound)
            results[f"health/alarm_{name}"] = int(rings)
            if rings:
                side = "below" if alarm.threshold.startswith("min_") else "above"
                limit = f"{side} health.{alarm.threshold} = {bound:g}"
                ringing[name] = f"ALARM {name}: {alarm.metric} is {value:.4g}, {limit}: {alarm.advice}"
        self._news = [message for name, message in ringing.items() if name not in self._ringing]
        self._news += [f"alarm {name} is over" for name in self._ringing if name not in ringing]
        self._ringing = ringing
        return {**results, "health/alarms": sum(results.values())}

    def news(self) -> list[str]:
        """One line for each alarm that the last step set off or ended."""
        return self._news
