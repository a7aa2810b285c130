"""The log-prob head against a float64 reference, in value and gradient, and what it allocates."""

import numpy as np
import pytest
import torch
from log_prob_cases import case, on_tensor_ranks, ours, reference
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gspo_megatron.backend import log_likelihood
from tests.ranks import run_ranks

NATS = 2e-5
"""Largest error of a log-prob."""


def assert_close_to_reference(found, expected, nats=NATS):
    """Log-probs within `nats`; gradients within 1e-4 of their norm. An empty batch has no norm: then all are zero."""
    log_probs, *gradients = (torch.as_tensor(value).double() for value in found)
    torch.testing.assert_close(log_probs, expected[0], rtol=0, atol=nats)
    for gradient, wanted in zip(gradients, expected[1:], strict=True):
        assert gradient.shape == wanted.shape
        assert (gradient - wanted).norm() <= 1e-4 * wanted.norm()


CASES = [
    (1, 13, 40, 8, 1.0, 1.0),
    (2, 13, 37, 8, 1.0, 0.7),  # padding on 2 and 4 ranks
    (3, 16, 41, 8, 3.0, 1.3),
    (4, 1, 37, 8, 1.0, 1.0),
    (5, 0, 37, 8, 1.0, 1.0),
    (6, 9, 37, 8, 60.0, 0.7),  # logits of up to some hundreds
    (7, 5, 9, 8, 1.0, 1.0),  # 4 ranks of 3 rows: the last has padding only
]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_value_and_gradient_on_tensor_ranks(world):
    ranks = run_ranks(on_tensor_ranks, world, CASES, 4)
    for index, (seed, num_tokens, vocab, hidden_size, scale, temperature) in enumerate(CASES):
        arguments = case(seed, num_tokens, vocab, hidden_size, scale)
        expected = reference(*arguments, temperature)
        weight_gradient = np.concatenate([rank[index][2] for rank in ranks])
        assert not weight_gradient[vocab:].any(), "padding gets no gradient"
        for rank in ranks:
            log_probs, hidden_gradient, _ = rank[index]
            found = (log_probs, hidden_gradient, weight_gradient[:vocab])
            # float32 logits of size s are off by s * 2^-24 whatever is done with them
            assert_close_to_reference(found, expected, max(NATS, 2e-6 * scale))


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 16, 17])
def test_chunk_borders(monkeypatch, num_tokens):
    monkeypatch.setattr(log_likelihood, "CHUNK_TOKENS", 8)
    arguments = case(num_tokens, num_tokens, 50, 16)
    assert_close_to_reference(ours(*arguments, 0.9), reference(*arguments, 0.9))


def test_the_number_of_chunks_changes_nothing(monkeypatch):
    arguments = case(1, 24, 50, 16)
    found = {}
    for chunk in (8, 24):
        monkeypatch.setattr(log_likelihood, "CHUNK_TOKENS", chunk)
        found[chunk] = ours(*arguments, 1.0)
    torch.testing.assert_close(found[8][0], found[24][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[8][2], found[24][2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_vocabulary_of_qwen3(scale):
    arguments = case(1, 6, 151_936, 32, scale)
    assert_close_to_reference(ours(*arguments, 1.0), reference(*arguments, 1.0))


def test_extreme_logits_stay_finite():
    """A chosen token at 0 nats, and one at -10,000 nats, which exp() of float32 can't hold."""
    hidden = torch.tensor([[100.0], [100.0]])
    weight = torch.tensor([[1.0], [-99.0], [0.0]])
    log_probs, hidden_gradient, weight_gradient = ours(hidden, weight, torch.tensor([0, 1]), torch.ones(2), 1.0)
    assert log_probs.tolist() == [0.0, -10_000.0]
    assert hidden_gradient.tolist() == [[0.0], [-100.0]]
    torch.testing.assert_close(weight_gradient, torch.tensor([[-100.0], [100.0], [0.0]]), rtol=0, atol=1e-30)


def test_bf16_hidden_states_give_fp32_log_probs():
    hidden, weight, labels, grad = case(1, 20, 200, 32)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    found = ours(hidden, weight, labels, grad, 0.7)
    expected = reference(hidden, weight, labels, grad, 0.7)
    assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == torch.bfloat16
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=NATS)
    for gradient, wanted in zip(found[1:], expected[1:], strict=True):
        assert (gradient.double() - wanted).norm() < 0.01 * wanted.norm()


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor that an operation gives."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_one_chunk_are_all_there_ever_is(monkeypatch, dtype):
    monkeypatch.setattr(log_likelihood, "CHUNK_TOKENS", 16)
    num_tokens, vocab, hidden_size = 160, 1_000, 8
    hidden, weight, labels, grad = case(1, num_tokens, vocab, hidden_size)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    saved = []

    def keep(tensor):
        saved.append(tensor.numel())
        return tensor

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours(hidden, weight, labels, grad, 1.0)
    assert largest.numel == 16 * vocab  # a tenth of [R, V]
    assert max(saved) == vocab * hidden_size and len(saved) == 5
    with Largest() as naive:
        torch.log_softmax(hidden @ weight.t(), dim=-1)
    assert naive.numel == num_tokens * vocab, "the measure sees what it is there to see"
