"""The worked example of a loss of one's own: its configuration, its gradient, and training with it."""

import math
from pathlib import Path

import pytest
import torch

from examples.custom_loss.my_losses import SoftGateConfig, short_and_right, soft_gate
from gspo_megatron.algorithm.losses import LossOutput, reduce_metrics
from gspo_megatron.algorithm.objective import make_objective
from gspo_megatron.algorithm_config import CorrectionConfig
from gspo_megatron.config import Config
from gspo_megatron.config_loader import dump_config, read_config
from gspo_megatron.plugins import load_loss
from gspo_megatron.rewards import load_reward
from tests.algorithm.loss_cases import context_parallel_batches, make_batch, random_sequences, run_functions

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_loss" / "custom_loss.yaml"
NAME = "examples.custom_loss.my_losses:soft_gate"


def test_the_example_s_configuration_is_read_strictly(tmp_path):
    config, faults = read_config(EXAMPLE)
    assert faults == [] and config.loss == SoftGateConfig(name=NAME, width=2e-3)
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert read_config(tmp_path / "again.yaml") == (config, [])
    _, faults = read_config(EXAMPLE, ["loss.widht=1"])
    assert len(faults) == 1 and "loss.widht: unknown key of SoftGateConfig" in faults[0] and "mean width?" in faults[0]
    _, faults = read_config(EXAMPLE, ["loss.width=wide"])
    assert len(faults) == 1 and "must be a number" in faults[0]
    assert load_loss(NAME) == (SoftGateConfig, soft_gate)


def plain(new, sequences, width):
    total, start = 0.0, 0
    for s in sequences:
        part = new[start : start + len(s["new"])]
        start += len(part)
        logs = [n - o for n, o, m in zip(part, s["old"], s["mask"], strict=True) if m]
        if logs:
            mean = sum(logs) / len(logs)
            total -= math.exp(mean - (mean / width) ** 2) * s["adv"]
    return total / len(sequences)


@pytest.mark.parametrize("seed", range(3))
def test_the_example_s_value_and_gradient(seed):
    sequences, config = random_sequences(seed, width=0.1), SoftGateConfig(width=0.05)
    batch = make_batch(sequences)
    out = soft_gate(config, batch)
    (gradient,) = torch.autograd.grad(out.loss_sum / out.count, batch.log_probs)
    new = batch.log_probs.tolist()
    assert float(out.loss_sum.detach() / out.count) == pytest.approx(plain(new, sequences, 0.05), rel=1e-12)
    for t in range(len(new)):
        high, low = (plain([*new[:t], new[t] + step, *new[t + 1 :]], sequences, 0.05) for step in (1e-6, -1e-6))
        assert float(gradient[t]) == pytest.approx((high - low) / 2e-6, rel=1e-6, abs=1e-8)


def test_the_example_is_right_over_ranks_and_under_corrections():
    """What a loss that is built of the package's parts gets for nothing."""
    sequences, config = random_sequences(4, width=0.1, gap=0.1), SoftGateConfig(width=0.05)
    correction = CorrectionConfig(token="truncate", token_cap=1.02)
    objective = make_objective(soft_gate, Config(loss=config, correction=correction))
    batch = make_batch(sequences)
    out = objective(config, batch)
    batches = context_parallel_batches(sequences, 3, lambda t, length: t % 3)
    loss, _, metrics = run_functions(lambda part: objective(config, part), batches)
    assert loss == pytest.approx(float(out.loss_sum.detach() / out.count), rel=1e-12)
    assert metrics == pytest.approx(reduce_metrics(out.metrics), rel=1e-12)


def test_a_loss_may_give_no_more_than_a_sum_a_count_and_metrics_of_its_own():
    def bare(config, batch):
        total = -(batch.log_probs * batch.mask).sum()
        count = torch.tensor(2.0, dtype=torch.float64)
        return LossOutput(total, count, {"mine/mean": total.detach().double(), "mine/mean_count": count})

    batch = make_batch(random_sequences(0))
    out = make_objective(bare, Config())(None, batch)
    assert out.loss_sum.requires_grad
    assert reduce_metrics(out.metrics)["mine/mean"] == pytest.approx(float(out.loss_sum.detach()) / 2)


def test_the_example_s_reward():
    reward = load_reward("examples.custom_loss.my_losses:short_and_right")
    assert reward is short_and_right
    assert reward("7", {"answer": 7}) == 1.0 and reward("7" + " so" * 20, {"answer": "7"}) == 0.5
    assert reward("8", {"answer": "7"}) == 0.0
