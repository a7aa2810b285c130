"""Whole runs from saved rollouts with what is chosen in the configuration: own loss, token advantages, sampling
rules."""

import numpy as np
import pytest

from gspo_megatron.metrics import read_metrics
from gspo_megatron.rollout.records import save_rollout
from gspo_megatron.types import Rollout, Sample
from tests.algorithm.training_runs import train_from
from tests.ranks import REPOSITORY, run_ranks

EXAMPLE = REPOSITORY / "examples" / "custom_loss" / "custom_loss.yaml"
NUM_STEPS = 2


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """Two steps of 4 groups of 4; every fourth response is cut by the length limit."""
    directory, random = tmp_path_factory.mktemp("rollouts"), np.random.default_rng(3)
    for step in range(NUM_STEPS):
        samples = []
        for group in range(4):
            prompt = tuple(random.integers(3, 500, 4).tolist())
            for member in range(4):
                ids = tuple(random.integers(3, 500, int(random.integers(1, 9))).tolist())
                log_probs = tuple(random.normal(-6.2, 0.1, len(ids)).tolist())
                reason = "length" if member == 3 else "stop"
                samples.append(Sample(group, prompt, ids, log_probs, float(random.random()), reason, step))
        save_rollout(Rollout(tuple(samples)), directory, step)
    return directory


@pytest.fixture
def run(tiny_qwen3_moe, rollouts, tmp_path):
    """A function: number of ranks, overrides -> the metrics of its steps."""

    def train(num_ranks, *overrides):
        arguments = [
            f"run.dir={tmp_path}", f"model.hf={tiny_qwen3_moe}", "rollout.launch=null", f"rollout.replay={rollouts}",
            f"train.steps={NUM_STEPS}", "train.updates_per_rollout=2", "rollout.prompts_per_step=4",
            "rollout.samples_per_prompt=4", "rollout.max_logprob_gap=100", "export.hf_final=false", *overrides,
        ]  # fmt: skip
        run_ranks(train_from, num_ranks, str(EXAMPLE), arguments)
        lines = read_metrics(tmp_path / "metrics.jsonl")
        assert len(lines) == NUM_STEPS
        return lines

    return train


def test_the_example_trains_and_logs_what_corrections_would_do(run):
    for line in run(2):
        assert line["grad_norm"] > 0
        assert 0 <= line["correction/token_masked_fraction"] <= 1 and line["correction/sequence_ratio_max"] > 0


def test_corrections_change_the_run(run):
    assert run(1, "correction={token: mask, token_low: 0.9, token_high: 1.1}")[0]["grad_norm"] > 0


def test_overlong_filtering_leaves_cut_responses_out(run):
    full = run(1)
    filtered = run(1, "sampling.overlong_filtering=true", "run.overwrite=true")
    assert filtered[0]["rollout/truncated_fraction"] == full[0]["rollout/truncated_fraction"] == 0.25
    assert filtered[0]["grad_norm"] != pytest.approx(full[0]["grad_norm"], rel=1e-3)


def test_token_advantages(run):
    name = "advantage.per_token='tests.algorithm.training_runs:by_position'"
    plain, shaped = run(1), run(1, name, "run.overwrite=true")
    assert shaped[0]["grad_norm"] != pytest.approx(plain[0]["grad_norm"], rel=1e-3)


def test_old_log_probs_from_the_rollout_skip_the_pass(run):
    (first, _) = run(1, "loss.old_log_probs=rollout")
    assert first["time/log_likelihood_s"] < 0.05
    assert first["correction/token_ratio_mean"] == pytest.approx(1.0)
    assert first["rollout/logprob_gap_mean"] > 0


def test_a_reference_divergence_is_logged(run):
    first, second = run(1, "regularizer.kl=0.1", "optimizer.lr=1e-2")
    assert 0 <= first["regularizer/kl"] < second["regularizer/kl"]
