"""What the regularizers need of the backend: entropies with their gradient, and a reference policy that stays put."""

import numpy as np
import pytest
import torch
from entropy_cases import incoming, on_tensor_ranks, reference, reference_weights
from log_prob_cases import case

from tests.ranks import run_ranks
from tests.training.runs import from_files, from_servers, metrics, overrides, train, untimed

CASES = [
    (1, 13, 40, 8, 1.0, 1.0),
    (2, 13, 37, 8, 1.0, 0.7),  # padding on 2 and 4 ranks
    (3, 16, 41, 8, 3.0, 1.3),
    (5, 0, 37, 8, 1.0, 1.0),
    (7, 5, 9, 8, 1.0, 1.0),  # 4 ranks of 3 rows: the last has padding only
]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_entropies_and_their_gradient_on_tensor_ranks(world):
    ranks = run_ranks(on_tensor_ranks, world, CASES)
    for index, (seed, num_tokens, vocab, hidden_size, scale, temperature) in enumerate(CASES):
        hidden, weight, labels, _ = case(seed, num_tokens, vocab, hidden_size, scale)
        values, hidden_grad, weight_grad = reference(hidden, weight, labels, incoming(seed, num_tokens), temperature)
        found_weight = np.concatenate([rank[index][2] for rank in ranks])
        assert not found_weight[vocab:].any(), "padding gets no gradient"
        for rank in ranks:
            torch.testing.assert_close(torch.as_tensor(rank[index][0]).double(), values, rtol=0, atol=2e-5)
            assert (torch.as_tensor(rank[index][1]) - hidden_grad).norm() <= 1e-4 * hidden_grad.norm()
        assert (torch.as_tensor(found_weight[:vocab]) - weight_grad).norm() <= 1e-4 * weight_grad.norm()


@pytest.mark.parametrize("world", [1, 2])
def test_the_reference_policy_stays_where_the_run_began(tiny_qwen3_moe, world):
    for result in run_ranks(reference_weights, world, str(tiny_qwen3_moe)):
        assert result["moved"] > 1e-3
        assert result["reference at the start"] == 0
        assert result["reference after an update"] == 0
        assert result["weights after the swap"] == 0
        assert result["policy after the swap"] == 0


def test_a_run_with_both_terms_gives_the_same_numbers_on_every_layout(sglang_server, tmp_path):
    url, model = sglang_server
    terms = ["regularizer.kl=0.05", "regularizer.entropy=0.01", "train.steps=2"]
    live = train(2, overrides(model, tmp_path / "live", *from_servers(url), "rollout.save=true", *terms))
    assert live.returncode == 0, live.stdout[-4000:]
    first, second = metrics(tmp_path / "live")
    # Before the first update policy and reference are one; later mini-batches of the step and the next step part.
    assert 0 <= first["regularizer/kl"] < second["regularizer/kl"]
    assert 0 < first["regularizer/entropy"] < np.log(512)
    saved = from_files(tmp_path / "live" / "rollouts")
    for name, settings in {"tensor": ["parallel.tensor=2"], "context": ["parallel.context=2"]}.items():
        replay = train(2, overrides(model, tmp_path / name, *saved, *terms, "parallel.expert=1", *settings))
        assert replay.returncode == 0, replay.stdout[-4000:]
        found = untimed(metrics(tmp_path / name))[0]
        for key in ("loss", "regularizer/kl", "regularizer/entropy"):
            assert found[key] == pytest.approx(first[key], rel=1e-4, abs=1e-6), (name, key)
