"""The head with entropies on tensor ranks, and its float64 reference; the reference weights of a policy."""

import dataclasses
import os

import torch
import torch.distributed as dist
from log_prob_cases import OneRank, case

from gspo_megatron.backend import log_likelihood
from gspo_megatron.backend.log_likelihood import VocabParallelLogProbs


def reference(hidden, weight, labels, grads, temperature):
    """float64 [2, R] log-probs and entropies, and the gradients of hidden and weight for incoming `grads` [2, R]."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    values = torch.stack([log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])
    values.backward(grads.double())
    return values.detach(), hidden.grad, weight.grad


def incoming(seed: int, num_tokens: int) -> torch.Tensor:
    return torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(seed + 100))


def on_tensor_ranks(cases: list) -> list:
    """As `log_prob_cases.on_tensor_ranks`, with entropies."""
    group = OneRank()
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    log_likelihood.CHUNK_TOKENS = 4
    rank, size, results = group.rank(), group.size(), []
    for seed, num_tokens, vocab, hidden_size, scale, temperature in cases:
        hidden, weight, labels, _ = case(seed, num_tokens, vocab, hidden_size, scale)
        rows = -(-vocab // size)
        padded = torch.cat([weight, torch.full((rows * size - vocab, hidden_size), 9.0)])
        local = padded[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        padding = min(max((rank + 1) * rows - vocab, 0), rows)
        hidden.requires_grad_()
        values = VocabParallelLogProbs.apply(hidden, local, labels, temperature, padding, group, True)
        values.backward(incoming(seed, num_tokens))
        if size > 1:
            dist.all_reduce(hidden.grad)
        results.append([tensor.numpy() for tensor in (values.detach(), hidden.grad, local.grad)])
    return results


def reference_weights(model: str) -> dict[str, float]:
    """A policy with a reference: log-likelihoods of both before and after an update, and what the swap left behind."""
    from gspo_megatron.algorithm.losses import LossOutput
    from gspo_megatron.algorithm.packing import pack
    from gspo_megatron.backend.mesh import Mesh
    from gspo_megatron.backend.policy import Policy
    from gspo_megatron.config import Config, ModelConfig, OptimizerConfig, RegularizerConfig, TrainConfig

    config = Config(
        model=ModelConfig(hf=model), train=TrainConfig(dtype="fp32"), optimizer=OptimizerConfig(lr=1e-2),
        regularizer=RegularizerConfig(kl=0.1), parallel=dataclasses.replace(Config().parallel, tensor=int(os.environ["WORLD_SIZE"])),
    )  # fmt: skip
    mesh = Mesh.create(config.parallel, seed=1, timeout_s=60)
    policy = Policy(config, mesh)
    batch = pack([([5, 6, 7], [8, 9, 10, 11]), ([3, 4], [5, 6])], alignment=config.parallel.tensor)
    start = policy.log_likelihoods([batch])[0]
    first = policy.reference_log_likelihoods([batch])[0]
    policy.update([batch], lambda index, values: LossOutput(-values.sum(), torch.tensor(2.0), {}))
    moved = policy.log_likelihoods([batch])[0]
    weights = {name: param.detach().clone() for name, param in policy.params.items()}
    second = policy.reference_log_likelihoods([batch])[0]
    result = {
        "reference at the start": float((first - start).abs().max()),
        "moved": float((moved - start).abs().max()),
        "reference after an update": float((second - start).abs().max()),
        "weights after the swap": max(float((weights[n] - p).abs().max()) for n, p in policy.params.items()),
        "policy after the swap": float((policy.log_likelihoods([batch])[0] - moved).abs().max()),
    }
    mesh.close()
    return result
