"""The corrections between engine and trainer: hand-computed vectors, every kind, context parallelism, and what they
log."""

import dataclasses
import math

import pytest
import torch

from gspo_megatron.algorithm.corrections import correct, measure_gap, token_weights
from gspo_megatron.algorithm.loss_metrics import add_metrics
from gspo_megatron.algorithm.losses import LOSSES, from_lists, reduce_metrics
from gspo_megatron.algorithm.objective import make_objective
from gspo_megatron.algorithm_config import CorrectionConfig
from gspo_megatron.config import Config
from tests.algorithm.loss_cases import (
    VECTORS,
    assert_parts_of,
    context_parallel_batches,
    flat,
    make_batch,
    make_config,
    random_sequences,
    run_functions,
)

CASES = [case for case in VECTORS["cases"] if case["loss_fn"] == "gspo_rollout_is"]
KINDS = [
    {"token": "truncate", "token_cap": 1.05},
    {"token": "mask", "token_low": 0.95, "token_high": 1.05},
    {"sequence": "truncate", "sequence_cap": 1.0},
    {"sequence": "mask"},
    {"off_policy": "mask", "off_policy_delta": 0.0},
    {"token": "truncate", "sequence": "mask", "sequence_low": 0.97, "sequence_high": 1.03, "off_policy": "mask"},
]


def corrected(name, loss_config, correction):
    objective = make_objective(LOSSES[name][1], Config(loss=loss_config, correction=correction))
    return lambda batch: objective(loss_config, batch)


def evaluate(function, batch):
    out = function(batch)
    (gradient,) = torch.autograd.grad(out.loss_sum / out.count, batch.log_probs)
    return float(out.loss_sum.detach() / out.count), gradient, reduce_metrics(out.metrics)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_vector(case):
    settings = dict(case["config"])
    mode = settings.pop("mode")
    config = make_config("gspo", {key: settings.pop(key) for key in ("eps_low", "eps_high")})
    correction = CorrectionConfig(sequence=mode, **{f"sequence_{key}": value for key, value in settings.items()})
    loss, gradient, _ = evaluate(corrected("gspo", config, correction), make_batch(case["batch"]))
    assert loss == pytest.approx(case["loss"], rel=1e-9, abs=1e-9)
    torch.testing.assert_close(gradient, flat(case["grad"]), rtol=1e-9, atol=1e-9)


LOG = math.log(2.0)
PAIR = from_lists(
    [[-1.0, -1.0], [-2.0, -2.0, -2.0]], [[-1.0, -1.0], [-1.0, -1.0, -1.0]], [[1, 1], [1, 1, 0]], [1.0, -1.0], [0, 0],
    [[-1.0 - 2 * LOG, -1.0], [-1.0 + LOG, -1.0 - LOG, 5.0]],
)  # fmt: skip
"""pi_old / mu: (4, 1) with geometric mean 2, and (1/2, 2, masked) with 1; pi_theta has left pi_old by -1 in the
second."""


@pytest.mark.parametrize("settings, expected", [
    ({}, [1, 1, 1, 1, 0]),
    ({"token": "truncate", "token_cap": 3.0}, [3, 1, 0.5, 2, 0]),
    ({"token": "mask", "token_low": 0.6, "token_high": 4.5}, [4, 1, 0, 2, 0]),
    ({"token": "mask", "token_low": 0.5 - 1e-9, "token_high": 2.0 + 1e-9}, [0, 1, 0.5, 2, 0]),
    ({"sequence": "truncate", "sequence_cap": 1.5}, [1.5, 1.5, 1, 1, 0]),
    ({"sequence": "mask"}, [0, 0, 1, 1, 0]),
    ({"off_policy": "mask"}, [1, 1, 0, 0, 0]),
    ({"off_policy": "mask", "off_policy_delta": 1.1}, [1, 1, 1, 1, 0]),
    ({"token": "truncate", "token_cap": 3.0, "sequence": "truncate"}, [6, 2, 0.5, 2, 0]),
])  # fmt: skip
def test_weights(settings, expected):
    weights = token_weights(CorrectionConfig(**settings), PAIR, measure_gap(PAIR))
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_is_weighed_token_by_token(name, kind):
    """The gradient is the plain one times the weight, the count is unchanged, and off means untouched."""
    config, correction = LOSSES[name][0](), CorrectionConfig(**kind)
    batch = make_batch(random_sequences(2, width=0.1, gap=0.1))
    plain = LOSSES[name][1](config, batch)
    (gradient,) = torch.autograd.grad(plain.loss_sum, batch.log_probs)
    out = correct(correction, batch, LOSSES[name][1](config, batch))
    (found,) = torch.autograd.grad(out.loss_sum, batch.log_probs)
    weights = token_weights(correction, batch, measure_gap(batch))
    torch.testing.assert_close(found, weights * gradient, rtol=1e-12, atol=1e-15)
    assert out.count == plain.count
    off = correct(CorrectionConfig(), batch, plain)
    assert off.loss_sum is plain.loss_sum


@pytest.mark.parametrize("name", ["gspo", "grpo", "ctpo", "real"])
@pytest.mark.parametrize("kind", KINDS)
def test_context_parallel_and_splits_equal_whole(name, kind):
    sequences = random_sequences(6, width=0.1, gap=0.1)
    config = LOSSES[name][0]()
    if name == "gspo":
        config = dataclasses.replace(config, clip_low=0.02, clip_high=0.02)
    function = corrected(name, config, CorrectionConfig(**kind))
    loss, gradient, metrics = evaluate(function, make_batch(sequences))
    batches = context_parallel_batches(sequences, 2, lambda t, length: t % 2)
    cp_loss, cp_gradients, cp_metrics = run_functions(function, batches)
    assert cp_loss == pytest.approx(loss, rel=1e-12)
    assert cp_metrics == pytest.approx(metrics, rel=1e-12)
    assert_parts_of(gradient, sequences, batches, cp_gradients)
    outs = [function(make_batch(sequences[:2])), function(make_batch(sequences[2:]))]
    assert float(sum(o.loss_sum.detach() for o in outs) / sum(o.count for o in outs)) == pytest.approx(loss, rel=1e-12)
    assert reduce_metrics(add_metrics(outs[0].metrics, outs[1].metrics)) == pytest.approx(metrics, rel=1e-12)


def test_metrics_are_there_when_all_is_off():
    metrics = evaluate(corrected("grpo", LOSSES["grpo"][0](), CorrectionConfig()), as_leaf(PAIR))[2]
    assert metrics["correction/token_ratio_mean"] == pytest.approx(7.5 / 4)
    assert metrics["correction/token_truncated_fraction"] == pytest.approx(1 / 4)
    assert metrics["correction/token_masked_fraction"] == pytest.approx(0.0)
    assert metrics["correction/token_kl"] == pytest.approx((3 - 2 * LOG + (-0.5 + LOG) + 1 - LOG) / 4)
    assert metrics["correction/sequence_ratio_mean"] == pytest.approx(1.5)
    assert metrics["correction/sequence_ratio_min"] == pytest.approx(1.0)
    assert metrics["correction/sequence_ratio_max"] == pytest.approx(2.0)
    assert metrics["correction/sequence_masked_fraction"] == pytest.approx(1 / 2)
    assert metrics["correction/sequence_truncated_fraction"] == pytest.approx(0.0)
    assert metrics["correction/off_policy_fraction"] == pytest.approx(1 / 2)
    assert not [name for name in metrics if name.endswith("_count")]


def as_leaf(batch):
    return dataclasses.replace(batch, log_probs=batch.log_probs.detach().clone().requires_grad_())


def test_a_batch_without_trained_tokens_reports_nothing():
    empty = from_lists([[-1.0]], [[-1.0]], [[0]], [1.0], [0], [[-2.0]])
    assert evaluate(corrected("grpo", LOSSES["grpo"][0](), CorrectionConfig(token="mask")), empty)[2] == {}


def test_what_a_correction_needs():
    batch = make_batch(random_sequences(0))
    out = LOSSES["gspo"][1](LOSSES["gspo"][0](), batch)
    with pytest.raises(ValueError, match="no token_losses to weigh: build its output with loss_output"):
        correct(CorrectionConfig(token="mask"), batch, out._replace(token_losses=None))
    batch.rollout_log_probs = None
    assert correct(CorrectionConfig(), batch, out) is out
    with pytest.raises(ValueError, match="correction needs the rollout engine's log-probs"):
        correct(CorrectionConfig(sequence="mask"), batch, out)
