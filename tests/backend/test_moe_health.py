"""Routing metrics count the same on every layout, leave padding out, and are exactly 0 under routing replay."""

from pathlib import Path

import pytest
from make_tiny_model import make_tiny_model
from moe_health_runs import routing_of_cases

from gspo_megatron.batches import RolloutArrays
from gspo_megatron.rollout.records import load_rollout
from tests.distributed.cases import CP, EP, PP, TP, VPP, Case, case
from tests.distributed.rollout import NUM_STEPS, SPAN, save_rollouts
from tests.distributed.runs import free_ports
from tests.ranks import run_ranks

NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_UPDATES = 4, 8, 2, 4
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ON_TWO = [
    case(2, **TP), case(2, **PP), case(2, **VPP), case(2, **CP), case(2, **EP),
    case(2, **PP, micro_batches=3, transformer=RECOMPUTED),
]  # fmt: skip
ON_FOUR = [case(4, **TP, **VPP, micro_batches=3), case(4, **TP, **CP), case(4, **EP, micro_batches=5)]
"""Slices of padded micro-batches, slices of chunks, and micro-batches without a sequence."""

Steps = list[dict[str, float]]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A four-layer model, and the two saved steps of the layouts' tests."""
    directory = tmp_path_factory.mktemp("moe_health")
    make_tiny_model("qwen3_moe", directory / "model", seed=1, overrides={"num_hidden_layers": NUM_LAYERS})
    save_rollouts(directory / "rollouts")
    return directory / "model", directory / "rollouts"


def run(files, cases: list[Case], **settings) -> list[Steps]:
    """[case][step] metrics, which all ranks agree on."""
    (world,) = {one.world for one in cases}
    model, rollouts = files
    arguments = (model, rollouts, cases, free_ports(len(cases)), settings)
    answers = run_ranks(routing_of_cases, world, *arguments, timeout_s=60 + 40 * len(cases))
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.fixture(scope="module")
def one_rank(files) -> Steps:
    return run(files, [case(1)])[0]


def arrays(files, step: int) -> RolloutArrays:
    return RolloutArrays.from_rollout(load_rollout(files[1], step))


def num_choices(files, step: int) -> int:
    """Of all trained tokens, layers and chosen experts."""
    span = SPAN.stop - SPAN.start
    return (int(arrays(files, step).response_lengths.sum()) - span) * NUM_LAYERS * TOP_K


def test_choices_change_from_the_second_mini_batch_on(files, one_rank):
    for step, metrics in enumerate(one_rank):
        assert metrics["choices"] == num_choices(files, step)
        assert metrics["load"] == int(arrays(files, step).lengths.sum()) * NUM_LAYERS * TOP_K
        assert metrics["moe/expert_change_first"] == 0.0
        assert 0.01 < metrics["moe/expert_change_last"] < 0.5
        assert 0 < metrics["moe/expert_change_mean"] < metrics["moe/expert_change_last"]
        assert 1 < metrics["moe/load_imbalance"] <= metrics["moe/load_imbalance_max"] <= NUM_EXPERTS / TOP_K
        assert metrics["moe/idle_experts"] == 0.0


def assert_same_counts(found: Steps, expected: Steps, name: str) -> None:
    """Counts of tokens and choices exactly. What is chosen, but for near ties of two experts: with these routers one
    choice in 1e5 or so is near enough to be decided by rounding, of the 4,000 here; 8 are allowed."""
    for step in range(NUM_STEPS):
        for key in ("choices", "load"):
            assert found[step][key] == expected[step][key], (name, step, key)
        allowed = 8 / (expected[step]["choices"] / NUM_UPDATES)
        for key in ("first", "last", "mean"):
            key = f"moe/expert_change_{key}"
            assert abs(found[step][key] - expected[step][key]) <= allowed, (name, step, key)
        for key in ("moe/load_imbalance", "moe/load_imbalance_max"):
            assert abs(found[step][key] - expected[step][key]) <= 0.02, (name, step, key)


@pytest.mark.slow
def test_all_layouts_count_the_same(files, one_rank):
    cases = [[case(1, micro_batches=5)], ON_TWO, ON_FOUR]
    for group in cases:
        for one, found in zip(group, run(files, group), strict=True):
            assert_same_counts(found, one_rank, one.name)


@pytest.mark.slow
def test_replay_changes_no_choice_on_any_layout(files, one_rank):
    for group in ([case(1)], ON_TWO, ON_FOUR[:1]):
        for one, found in zip(group, run(files, group, replay=True), strict=True):
            for metrics in found:
                assert metrics["moe/expert_change_mean"] == metrics["moe/expert_change_last"] == 0.0, one.name
                # the choices in the same order give the same bits where the weights are the same
                assert metrics["first_ratio_min"] == metrics["first_ratio_max"] == 1.0, one.name
            assert found[0]["choices"] == one_rank[0]["choices"]
            # the second step's pass chooses anew, by other weights than the first's
            assert found[1]["load"] == one_rank[1]["load"]


def test_without_a_recorded_pass_only_the_load_is_reported(files, one_rank):
    (steps,) = run(files, [case(1)], record=False)
    for metrics, expected in zip(steps, one_rank, strict=True):
        assert not [key for key in metrics if "expert_change" in key]
        assert metrics["moe/load_imbalance"] == expected["moe/load_imbalance"]


def test_it_can_be_switched_off(files):
    (steps,) = run(files, [case(1)], health=False)
    assert all(metrics["first_loss_count"] == 8 for metrics in steps)
    assert not [key for metrics in steps for key in metrics if key.startswith("moe/")]


def test_a_replay_without_a_recorded_pass_is_an_error(files):
    with pytest.raises(RuntimeError, match="train.routing_replay: an update of micro-batches whose expert choices"):
        run(files, [case(1)], replay=True, record=False)


def test_a_dense_model_has_none(tmp_path, files):
    make_tiny_model("qwen3", tmp_path, seed=1)
    (steps,) = run((tmp_path, files[1]), [case(1)])
    assert not [key for metrics in steps for key in metrics if key.startswith("moe/")]


def test_a_stage_of_dense_layers_only_takes_part(tmp_path, files):
    """Layers 0 and 2 on the first rank, 1 and 3 on the second, of which only 3 has experts."""
    dense = {"num_hidden_layers": NUM_LAYERS, "mlp_only_layers": [0, 1, 2]}
    make_tiny_model("qwen3_moe", tmp_path, seed=1, overrides=dense)
    (expected,) = run((tmp_path, files[1]), [case(1)])
    (found,) = run((tmp_path, files[1]), [case(2, **VPP, micro_batches=3)])
    assert expected[0]["choices"] == num_choices(files, 0) / NUM_LAYERS and expected[0]["moe/expert_change_last"] > 0
    assert_same_counts(found, expected, "one layer of experts")
