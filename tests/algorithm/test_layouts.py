"""Every loss, with corrections on, gives one gradient on a real model whatever the layout and the split."""

import pytest
from make_tiny_model import make_tiny_model

from gspo_megatron.algorithm.losses import LOSSES
from tests.algorithm.layout_runs import all_losses, with_reference
from tests.ranks import run_ranks

LAYOUTS = [
    (1, {}, 3),
    (2, {"context": 2}, 1),
    (2, {"context": 2}, 2),
    (2, {"pipeline": 2}, 2),
    (2, {"pipeline": 2, "virtual_pipeline": 2}, 2),
    (2, {"tensor": 2}, 1),
    (2, {"expert": 2}, 1),
]
"""Ranks, axes (the rest is data parallel), least number of micro-batches."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Four layers, for two pipeline stages of two chunks each."""
    directory = tmp_path_factory.mktemp("model") / "four_layers"
    return str(make_tiny_model("qwen3_moe", directory, seed=2, overrides={"num_hidden_layers": 4}))


@pytest.fixture(scope="module")
def one_rank(model):
    (result,) = run_ranks(all_losses, 1, model, {}, 1)
    return result


@pytest.mark.parametrize("world, parallel, splits", LAYOUTS, ids=[f"{p or 'one rank'} {s}" for _, p, s in LAYOUTS])
def test_every_loss_is_the_same_on(world, parallel, splits, one_rank, model):
    results = run_ranks(all_losses, world, model, parallel, splits)
    for name in [*LOSSES, "overlong", "all_overlong"]:
        for result in results:
            assert result[name] == pytest.approx(one_rank[name], rel=2e-4, abs=1e-6), name


def test_the_reference_is_not_trivial(one_rank):
    for name in LOSSES:
        assert one_rank[name]["grad_norm"] > 1e-3, name
        assert 0 < one_rank[name]["correction/token_truncated_fraction"] < 1
    norms = {round(one_rank[name]["grad_norm"], 5) for name in LOSSES}
    assert len(norms) > len(LOSSES) - 3  # gspo and gspo_token agree; others are losses of their own


def test_overlong_responses_leave_the_sum_and_the_count(one_rank):
    """12 of 16 samples are left to divide by, and a batch of cut responses only is no gradient at all."""
    assert one_rank["gspo"]["loss_count"] == 16 and one_rank["overlong"]["loss_count"] == 12
    assert one_rank["overlong"]["grad_norm"] != pytest.approx(one_rank["gspo"]["grad_norm"], rel=1e-3)
    assert one_rank["all_overlong"] == {"loss_sum": 0.0, "loss_count": 0.0, "grad_norm": 0.0}


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_reference_is_the_start_and_leaves_the_policy_as_it_is(estimator, model):
    """No divergence before the first update, some after it; the same on other layouts."""
    (one,) = run_ranks(with_reference, 1, model, {}, estimator)
    assert all(step["unchanged"] for step in one)
    assert one[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert min(one[1]["kl"], one[2]["kl"]) > 1e-3
    for parallel in ({"context": 2}, {"pipeline": 2}):
        for result in run_ranks(with_reference, 2, model, parallel, estimator):
            assert result == [pytest.approx(step, rel=1e-3, abs=1e-8) for step in one]
