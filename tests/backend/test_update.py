"""Updates: metrics over micro-batches and ranks, the learning-rate schedule, and values that are not finite."""

import math
import re

import pytest
from policy_runs import learning_rates, update_with_metrics
from update_runs import non_finite_updates

from tests.ranks import run_ranks


@pytest.mark.parametrize(
    "world, layout, data_size", [(1, {}, 1), (4, {"pipeline": 2}, 2), (2, {"tensor": 2}, 1)], ids=str
)
def test_metrics_are_summed_and_extremes_kept_on_all_ranks(tiny_qwen3_moe, world, layout, data_size):
    """Micro-batch i of data rank d reports 10 d + i; there are 4 of them on each."""
    values = [10.0 * d + i for d in range(data_size) for i in range(4)]
    expected = {
        "tokens": sum(values),
        "low_min": min(values) - 3,
        "high_max": max(values) * 2,
        "negative_max": -min(values) - 1,
        "last_only": sum(10.0 * d + 3 for d in range(data_size)),
        "loss_sum": sum(values),
        "loss_count": 2.0 * len(values),
    }
    for metrics, grad_norm, learning_rate in run_ranks(update_with_metrics, world, layout, str(tiny_qwen3_moe)):
        assert metrics == expected
        assert grad_norm == 0.0 and learning_rate == 1e-3


def warm(k: int, warmup: int) -> float:
    return min(k / warmup, 1.0)


def test_learning_rate_of_every_update(tiny_qwen3_moe):
    """Update k, from 0 on, of 8; the schedule is counted in updates, and reported as it was used."""
    peak, low = 1e-3, 1e-4
    schedules = [
        {"lr": peak},
        {"lr": peak, "warmup_steps": 4},
        {"lr": peak, "min_lr": low, "schedule": "cosine", "warmup_steps": 2},
        {"lr": peak, "min_lr": low, "schedule": "linear"},
        {"lr": low, "min_lr": peak, "schedule": "cosine"},
    ]
    found = run_ranks(learning_rates, 1, str(tiny_qwen3_moe), schedules, 8)[0]
    cosine = [low + (peak - low) * (1 + math.cos(math.pi * (k - 2) / 6)) / 2 for k in range(8)]
    expected = [
        [peak] * 8,
        [peak * warm(k, 4) for k in range(8)],
        [peak * warm(k, 2) if k < 2 else cosine[k] for k in range(8)],
        [peak + (low - peak) * k / 8 for k in range(8)],
        [low] * 8,  # a floor above the rate is the rate
    ]
    for rates, wanted in zip(found, expected, strict=True):
        assert rates == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}], ids=str)
def test_values_that_are_not_finite_name_sample_and_rank(tiny_qwen3_moe, layout):
    """On 2 ranks, a gradient of 1e36 a token, then NaN in the embedding of a token that one sample a data rank has. The
    stage that computes no loss says that it waited for the other, which is gone."""
    messages = run_ranks(non_finite_updates, 2, layout, str(tiny_qwen3_moe))
    for rank, (gradient, nan) in enumerate(messages):
        place = f"rank {rank} (tensor 0, pipeline {rank if layout else 0}, "
        assert gradient.startswith(place) and re.search(r"gradient norm is (nan|inf), loss -?[\d.e+]+", gradient)
        if layout and rank == 0:
            assert nan.startswith(f"CollectiveError {place}") and "waiting for other ranks in an update" in nan
        else:
            sample = 3 if layout else 4 * rank + 3
            assert nan.startswith(f"FloatingPointError {place}")
            assert nan.endswith(f"log_probs of sample {sample} is nan")
