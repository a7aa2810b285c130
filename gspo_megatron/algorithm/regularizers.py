"""Terms added to the loss: the divergence from a reference policy, and an entropy bonus.

Shape legend: T packed tokens on this rank. Both are weighed over tokens and sequences as the loss weighs them
(`LossOutput.token_share`), so that a coefficient means the same whatever the aggregation.
"""

import torch
from torch import Tensor

from gspo_megatron.algorithm.loss_terms import LossOutput, guarded_exp, masked
from gspo_megatron.algorithm_config import RegularizerConfig
from gspo_megatron.types import SequenceBatch


def regularize(config: RegularizerConfig, batch: SequenceBatch, out: LossOutput) -> LossOutput:
    """`out` plus kl * KL(pi_theta || pi_ref) - entropy * H(pi_theta), and their means as `regularizer/...` metrics.

    A term with coefficient 0 is not computed. Raises ValueError where the batch lacks what a term needs
    (`reference_log_probs` [T], `entropies` [T] with gradient), or the loss gives no token_share.
    """
    if not config.kl and not config.entropy:
        return out
    if out.token_share is None:
        raise ValueError("regularizer: this loss gives no token_share to weigh by: build its output with loss_output")
    mask, loss_sum, metrics = batch.mask.bool(), out.loss_sum, dict(out.metrics)
    share, count = out.token_share.to(loss_sum.dtype), mask.sum(dtype=torch.float64)
    if config.kl:
        if batch.reference_log_probs is None:
            raise ValueError("regularizer.kl needs the log-probs of a reference policy, this batch has none")
        divergence = kl_estimate(config.kl_estimator, mask, batch.log_probs, batch.reference_log_probs)
        loss_sum = loss_sum + config.kl * (share * divergence.to(loss_sum.dtype)).sum()
        metrics["regularizer/kl"] = divergence.detach().sum(dtype=torch.float64)
        metrics["regularizer/kl_count"] = count
    if config.entropy:
        if batch.entropies is None:
            raise ValueError("regularizer.entropy needs the policy's entropies, this batch has none")
        entropies = torch.where(mask, batch.entropies, 0.0)
        loss_sum = loss_sum - config.entropy * (share * entropies.to(loss_sum.dtype)).sum()
        metrics["regularizer/entropy"] = entropies.detach().sum(dtype=torch.float64)
        metrics["regularizer/entropy_count"] = count
    return out._replace(loss_sum=loss_sum, metrics=metrics)


def kl_estimate(estimator: str, mask: Tensor, log_probs: Tensor, reference: Tensor) -> Tensor:
    """[T] estimate of KL(pi_theta || pi_ref) at each trained token, with its gradient in `log_probs`; 0 elsewhere.

    With log r = log pi_ref - log pi_theta: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r (Schulman,
    "Approximating KL divergence"). On samples of pi_theta k1 and k3 have the divergence as their mean; as a term of
    the loss the gradient of k2 is the divergence's, that of k3 is the reverse divergence's, that of k1 is zero on
    average.
    """
    log_ratio = masked(mask, reference) - masked(mask, log_probs)
    if estimator == "k1":
        value, slope = -log_ratio, torch.ones_like(log_ratio)
    elif estimator == "k2":
        value, slope = log_ratio.square() / 2, -log_ratio
    elif estimator == "k3":
        ratio = guarded_exp(log_ratio)
        value, slope = ratio - 1 - log_ratio, 1 - ratio
    else:
        raise ValueError(f"regularizer.kl_estimator={estimator}: use k1, k2 or k3")
    live = torch.where(mask, log_probs, 0.0)
    return value.to(live.dtype) + masked(mask, slope).to(live.dtype) * (live - live.detach())
