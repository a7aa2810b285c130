"""Alarms: which value rings, what is printed once, and what a threshold of 0 does."""

import dataclasses
import math

import pytest
import torch

from gspo_megatron.algorithm.loss_metrics import LOG_RATIO_BINS, LOG_RATIO_EDGES, add_metrics, reduce_metrics
from gspo_megatron.algorithm.losses import gspo
from gspo_megatron.config import Config, GSPOConfig, HealthConfig, TrainConfig
from gspo_megatron.health import ALARMS, Alarms
from gspo_megatron.types import from_lists

HEALTHY = {
    "moe/expert_change_last": 0.1, "moe/load_imbalance": 3.0, "gspo/ess": 0.99, "gspo/clip_fraction_sequences": 0.5,
    "gspo/log_ratio_std": 0.001, "gspo/token_log_ratio_std": 0.1, "grad_norm": 3.0, "rollout/logprob_gap_mean": 0.01,
    "rollout/zero_std_fraction": 0.3, "rollout/truncated_fraction": 0.1,
}  # fmt: skip


def test_a_healthy_step_rings_nothing():
    result = Alarms(HealthConfig()).judge(HEALTHY)
    assert result == {**{f"health/alarm_{name}": 0 for name in ALARMS}, "health/alarms": 0}


@pytest.mark.parametrize("name", ALARMS)
def test_each_alarm_rings_beyond_its_threshold_and_not_at_it(name):
    alarm = ALARMS[name]
    bound = getattr(HealthConfig(), alarm.threshold)
    beyond = bound - 1e-6 if alarm.threshold.startswith("min_") else bound + 1e-6
    alarms = Alarms(HealthConfig())
    assert alarms.judge({**HEALTHY, alarm.metric: bound})["health/alarms"] == 0
    result = alarms.judge({**HEALTHY, alarm.metric: beyond})
    assert result[f"health/alarm_{name}"] == result["health/alarms"] == 1
    (message,) = alarms.news()
    assert alarm.metric in message and f"health.{alarm.threshold} = {bound:g}" in message
    off = dataclasses.replace(HealthConfig(), **{alarm.threshold: 0.0})
    assert Alarms(off).judge({**HEALTHY, alarm.metric: beyond})["health/alarms"] == 0


def test_every_threshold_belongs_to_an_alarm():
    thresholds = {field.name for field in dataclasses.fields(HealthConfig)} - {"routing"}
    assert {alarm.threshold for alarm in ALARMS.values()} == thresholds


def test_an_alarm_is_printed_when_it_goes_on_and_off_and_judged_in_every_step():
    alarms, ringing = Alarms(HealthConfig()), {**HEALTHY, "gspo/ess": 0.1}
    told = []
    for metrics in (HEALTHY, ringing, ringing, HEALTHY, HEALTHY):
        told.append((alarms.judge(metrics)["health/alarms"], len(alarms.news())))
    assert told == [(0, 0), (1, 1), (1, 0), (0, 1), (0, 0)]


def test_a_metric_that_is_not_there_rings_nothing():
    dense = {name: value for name, value in HEALTHY.items() if not name.startswith("moe/")}
    assert not [key for key in Alarms(HealthConfig()).judge(dense) if "expert" in key or "load" in key]


def ratio_metrics(log_ratios: list[list[float]]) -> dict[str, torch.Tensor]:
    old = [[-1.0] * len(row) for row in log_ratios]
    new = [[-1.0 + value for value in row] for row in log_ratios]
    batch = from_lists(new, old, [[1] * len(row) for row in log_ratios], [1.0] * len(old), [0] * len(old))
    return gspo(GSPOConfig(), batch).metrics


def test_the_histogram_and_the_spreads():
    """Sequence log-ratios, one in the middle of every bin, over two micro-batches; an empty sequence is in none."""
    middles = [(low + high) / 2 for low, high in zip(LOG_RATIO_EDGES, LOG_RATIO_EDGES[1:], strict=False)]
    means = [-0.5, *middles, 0.5]
    rows = [[mean - 0.25, mean + 0.25] for mean in means]
    found = reduce_metrics(add_metrics(ratio_metrics([*rows[:8], []]), ratio_metrics(rows[8:])))
    assert [found[f"gspo/log_ratio_hist/{name}"] for name in LOG_RATIO_BINS] == [1 / 15] * 15
    assert all(low < 0 < high for low, high in [LOG_RATIO_EDGES[6:8]]), "no edge at 0"
    spread = torch.tensor(means, dtype=torch.float64).std(correction=0)
    assert found["gspo/log_ratio_std"] == pytest.approx(float(spread), rel=1e-9)
    # the variance of tokens is that of the sequences and, in each of them, 0.25 squared
    assert found["gspo/token_log_ratio_std"] == pytest.approx(math.sqrt(float(spread) ** 2 + 0.25**2), rel=1e-9)


def test_a_replay_that_cannot_work_is_refused(tiny_qwen3_moe, tmp_path):
    from make_tiny_model import make_tiny_model

    from gspo_megatron.checks import check_config
    from gspo_megatron.config import MegatronConfig, ModelConfig

    def faults(**sections) -> list[str]:
        model = {"model": ModelConfig(hf=str(tiny_qwen3_moe))}
        config = Config(train=TrainConfig(routing_replay=True), **{**model, **sections})
        return [fault for fault in check_config(config) if fault.startswith("train.routing_replay")]

    assert faults() == []
    assert "no pass of the trainer's" in faults(loss=GSPOConfig(old_log_probs="rollout"))[0]
    assert "chooses by itself" in faults(megatron=MegatronConfig(transformer={"moe_router_fusion": True}))[0]
    dense = make_tiny_model("qwen3", tmp_path, seed=1)
    assert "has no experts" in faults(model=ModelConfig(hf=str(dense)))[0]
