"""A real Megatron policy against transformers, token by token and gradient by gradient."""

import math

import numpy as np
import pytest
import torch
import transformers_reference
from policy_runs import VOCABULARY, log_probs_and_gradients, log_probs_by_dtype, sequences

from make_tiny_model import make_tiny_model
from tests.ranks import run_ranks

MODELS = {
    "moe": ("qwen3_moe", {}, 1.0),
    "moe-tied-unnormalised": ("qwen3_moe", {"tie_word_embeddings": True, "norm_topk_prob": False}, 0.7),
    "dense": ("qwen3", {}, 0.7),
    "dense-tied": ("qwen3", {"tie_word_embeddings": True}, 1.0),
}
"""Family, settings, temperature."""

SEQUENCES = [sequence for batch in sequences() for sequence in batch]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(family, root / name, 5, settings | {"vocab_size": VOCABULARY})
        for name, (family, settings, _) in MODELS.items()
    }


@pytest.fixture(scope="module")
def references(models) -> dict:
    return {
        name: transformers_reference.log_probs_and_gradients(models[name], SEQUENCES, temperature)
        for name, (_, _, temperature) in MODELS.items()
    }


LAYOUTS = [
    (1, {}, list(MODELS)),
    (2, {"pipeline": 2}, list(MODELS)),
    # experts are left out: with more than one copy of an expert no rank holds its whole gradient
    (2, {"tensor": 2}, ["dense", "dense-tied"]),
    (2, {"tensor": 2, "sequence_parallel": False}, ["dense", "dense-tied"]),
    (4, {"tensor": 4}, ["dense"]),  # more tensor ranks than KV heads
    (2, {"tensor": 2, "expert_tensor": 2}, ["moe", "moe-tied-unnormalised"]),
]
"""Ranks, layout, models."""


@pytest.mark.parametrize("world, layout, names", LAYOUTS, ids=str)
def test_log_probs_and_gradients_are_those_of_transformers(models, references, world, layout, names):
    cases = [(str(models[name]), MODELS[name][2]) for name in names]
    ranks = run_ranks(log_probs_and_gradients, world, layout, cases)
    for index, name in enumerate(names):
        expected, gradients = references[name]
        sums = torch.stack([values.double().sum() for values in expected])
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        for found in (rank[index] for rank in ranks):  # all stages and tensor ranks know all of it
            for response, values in zip(found["responses"], expected, strict=True):
                np.testing.assert_allclose(response, values.numpy(), rtol=0, atol=1e-5, err_msg=name)
            np.testing.assert_allclose(found["sums"], sums.numpy(), rtol=1e-6, atol=1e-5)
            assert found["outside"] == 0.0
            assert found["loss"] == pytest.approx(float(sums.sum()), rel=1e-6) and found["count"] == len(SEQUENCES)
            assert found["grad_norms"] == pytest.approx([norm, norm], rel=1e-5)
        assert_gradients(ranks[0][index]["gradients"], gradients, name)


def assert_gradients(found: dict[str, np.ndarray], expected: dict[str, torch.Tensor], model: str) -> None:
    """Every tensor within 1e-4 of its norm; a tensor without gradient (an expert that no token chose) has none here."""
    assert found.keys() == expected.keys()
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        distance = float((torch.from_numpy(found[name]) - gradient).norm())
        assert distance <= 1e-4 * float(gradient.norm()) + 1e-7 * largest, f"{model}: {name}"


def test_temperature_changes_what_is_compared(references, models):
    """The two temperatures of the table are far enough apart to be told from each other at 1e-5 nats."""
    at_one, _ = transformers_reference.log_probs_and_gradients(models["dense"], SEQUENCES, 1.0)
    gap = torch.cat(at_one) - torch.cat(references["dense"][0])
    assert gap.abs().min() > 1e-4 and gap.abs().mean() > 0.1


@pytest.mark.parametrize("name, mean_gap, largest_gap", [("dense", 0.02, 0.1), ("moe", 0.05, 1.0)])
def test_bf16_runs_and_stays_near_fp32(models, name, mean_gap, largest_gap):
    """Nats per token. A random router sits on the fence, so that bf16 sends some tokens to other experts."""
    (found,) = run_ranks(log_probs_by_dtype, 1, str(models[name]))
    (exact, exact_norm, exact_type, exact_move), (rounded, norm, kind, move) = found["fp32"], found["bf16"]
    assert (exact_type, kind) == ("torch.float32", "torch.bfloat16") and exact.dtype == rounded.dtype == np.float32
    gap = np.abs(exact - rounded)[exact != 0]
    assert 0 < gap.mean() < mean_gap and gap.max() < largest_gap
    assert norm == pytest.approx(exact_norm, rel=0.05)
    # the loss is the mean of the log-probs' sums, so updates lower them: small ones add up in fp32 and are not lost
    assert exact_move < -10 and move == pytest.approx(exact_move, rel=0.1)
