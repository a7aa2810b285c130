"""Reference divergence and entropy bonus: estimators, gradients, how they are weighed, and what they need."""

import math

import pytest
import torch

from gspo_megatron.algorithm.losses import LOSSES, from_lists, reduce_metrics
from gspo_megatron.algorithm.regularizers import kl_estimate, regularize
from gspo_megatron.algorithm_config import RegularizerConfig
from tests.algorithm.loss_cases import make_batch, random_sequences


def with_reference(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(batch.log_probs.numel(), generator=generator, dtype=torch.float64)
    batch.reference_log_probs = batch.log_probs.detach() + noise - 0.5
    return batch


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_and_their_gradients(estimator):
    new = torch.tensor([-1.0, -2.0, -0.5, math.nan], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.2, -1.0, -0.5, -math.inf], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    value = kl_estimate(estimator, mask, new, reference)
    log_ratio = torch.tensor([-0.2, 1.0, 0.0, 0.0], dtype=torch.float64)
    expected = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}[estimator]
    slope = {"k1": torch.ones(4).double(), "k2": -log_ratio, "k3": 1 - log_ratio.exp()}[estimator] * mask
    torch.testing.assert_close(value.detach(), expected)
    torch.testing.assert_close(torch.autograd.grad(value.sum(), new)[0], slope)


def test_k1_and_k3_have_the_divergence_as_their_mean():
    """Over all tokens of a small vocabulary, weighed by their probability."""
    logits, other = torch.randn(2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    new, reference = logits.log_softmax(0), other.log_softmax(0)
    divergence = (new.exp() * (new - reference)).sum()
    for estimator in ("k1", "k3"):
        estimate = kl_estimate(estimator, torch.ones(6).bool(), new, reference)
        torch.testing.assert_close((new.exp() * estimate).sum(), divergence)


def test_as_a_term_of_the_loss_k2_has_the_gradient_of_the_divergence_and_k1_none():
    logits = torch.randn(6, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, generator=torch.Generator().manual_seed(3), dtype=torch.float64).log_softmax(0)

    def gradient(of):
        return torch.autograd.grad(of, logits)[0]

    new = logits.log_softmax(0)
    exact = gradient((new.exp() * (new - reference)).sum())
    sampled = {
        name: gradient((new.exp().detach() * kl_estimate(name, torch.ones(6).bool(), new, reference)).sum())
        for name in ("k1", "k2")
        if (new := logits.log_softmax(0)) is not None
    }
    torch.testing.assert_close(sampled["k2"], exact)
    torch.testing.assert_close(sampled["k1"], torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("name", list(LOSSES))
def test_terms_are_weighed_as_the_loss_weighs_its_tokens(name):
    """Mean over tokens then sequences, over all tokens, or over groups: the term over the count is such a mean."""
    sequences = random_sequences(3, width=0.1, gap=0.1)
    batch = with_reference(make_batch(sequences))
    batch.entropies = torch.rand(batch.log_probs.numel(), dtype=torch.float64).requires_grad_()
    config = LOSSES[name][0]()
    out = LOSSES[name][1](config, batch)
    added = regularize(RegularizerConfig(kl=0.5, entropy=0.25), batch, out)
    share = out.token_share
    divergence = kl_estimate("k3", batch.mask.bool(), batch.log_probs, batch.reference_log_probs)
    expected = (share * (0.5 * divergence - 0.25 * batch.entropies)).sum()
    torch.testing.assert_close(added.loss_sum - out.loss_sum, expected)
    torch.testing.assert_close(torch.autograd.grad(added.loss_sum, batch.entropies)[0], -0.25 * share)
    trained = sum(1 for s in sequences if sum(s["mask"]))
    total = {"real": None, "fspo": trained, "gmpo": trained}.get(name, trained)
    if float(out.count) == batch.num_sequences and name not in ("minirl", "luspo"):
        assert float(share.sum()) == pytest.approx(total)
    elif name in ("minirl", "luspo"):
        assert float(share.sum()) == pytest.approx(float(batch.mask.sum()))
    else:
        assert float(share.sum()) == pytest.approx(float(out.count))


def test_metrics_and_the_empty_case():
    batch = from_lists([[-1.0, -1.0, -3.0]], [[-1.0] * 3], [[1, 1, 0]], [1.0], [0])
    batch.reference_log_probs = torch.tensor([-1.0, -1.5, 9.0], dtype=torch.float64)
    batch.entropies = torch.tensor([1.0, 2.0, math.nan], dtype=torch.float64)
    out = LOSSES["gspo"][1](LOSSES["gspo"][0](), batch)
    metrics = reduce_metrics(regularize(RegularizerConfig(kl=1.0, kl_estimator="k2", entropy=1.0), batch, out).metrics)
    assert metrics["regularizer/kl"] == pytest.approx(0.125 / 2)
    assert metrics["regularizer/entropy"] == pytest.approx(1.5)
    assert regularize(RegularizerConfig(), batch, out) is out


def test_what_a_term_needs():
    batch = make_batch(random_sequences(0))
    out = LOSSES["gspo"][1](LOSSES["gspo"][0](), batch)
    with pytest.raises(ValueError, match="regularizer.kl needs the log-probs of a reference policy"):
        regularize(RegularizerConfig(kl=0.1), batch, out)
    with pytest.raises(ValueError, match="regularizer.entropy needs the policy's entropies"):
        regularize(RegularizerConfig(entropy=0.1), batch, out)
    with pytest.raises(ValueError, match="no token_share"):
        regularize(RegularizerConfig(kl=0.1), batch, out._replace(token_share=None))
    with pytest.raises(ValueError, match="kl_estimator=k4: use k1, k2 or k3"):
        regularize(RegularizerConfig(kl=0.1, kl_estimator="k4"), with_reference(batch), out)
