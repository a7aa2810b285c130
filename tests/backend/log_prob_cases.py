"""Random cases for the log-prob head, its float64 reference, and its run on several tensor ranks."""

import torch
import torch.distributed as dist

from gspo_megatron.backend import log_likelihood
from gspo_megatron.backend.log_likelihood import VocabParallelLogProbs


class OneRank:
    """Stands for a tensor group of one rank, which needs no collective."""

    def rank(self):
        return 0

    def size(self):
        return 1


def case(seed: int, num_tokens: int, vocab: int, hidden_size: int, scale: float = 1.0):
    """hidden [R, H], weight [V, H], labels [R], incoming gradient [R]; `scale` is about the spread of the logits."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator)
    weight = torch.randn(vocab, hidden_size, generator=generator) * scale / hidden_size**0.5
    labels = torch.randint(vocab, (num_tokens,), generator=generator)
    return hidden, weight, labels, torch.randn(num_tokens, generator=generator)


def reference(hidden, weight, labels, grad, temperature):
    """float64 log-probs and the gradients of hidden and weight, by torch's own log_softmax."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_probs = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1).gather(1, labels[:, None])[:, 0]
    log_probs.backward(grad.double())
    return log_probs.detach(), hidden.grad, weight.grad


def ours(hidden, weight, labels, grad, temperature, padding=0, group=None):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs = VocabParallelLogProbs.apply(hidden, weight, labels, temperature, padding, group or OneRank())
    log_probs.backward(grad.to(log_probs.dtype))
    return log_probs.detach(), hidden.grad, weight.grad


def on_tensor_ranks(cases: list, chunk_tokens: int) -> list:
    """Every case `(seed, R, V, H, scale, temperature)` on all ranks: this rank's log-probs, the gradient of hidden
    summed over the ranks, and this rank's rows of the weight's gradient, padding included; as numpy."""
    dist.init_process_group("gloo")
    log_likelihood.CHUNK_TOKENS = chunk_tokens
    rank, size, results = dist.get_rank(), dist.get_world_size(), []
    for seed, num_tokens, vocab, hidden_size, scale, temperature in cases:
        hidden, weight, labels, grad = case(seed, num_tokens, vocab, hidden_size, scale)
        rows = -(-vocab // size)
        # large rows of padding would be seen if they were not left out
        padded = torch.cat([weight, torch.full((rows * size - vocab, hidden_size), 9.0)])
        local = padded[rank * rows : (rank + 1) * rows]
        padding = min(max((rank + 1) * rows - vocab, 0), rows)
        found = ours(hidden, local, labels, grad, temperature, padding, dist.group.WORLD)
        dist.all_reduce(found[1])
        results.append([tensor.numpy() for tensor in found])
    return results
