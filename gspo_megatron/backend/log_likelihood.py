"""Log-likelihoods of response tokens from hidden states, with the vocabulary cut over tensor ranks.

Shape legend: R response tokens of a micro-batch, H hidden, W = V / tensor-parallel size rows of the output weight.

The whole [T, V] is never there: only the R response tokens enter, in chunks of `CHUNK_TOKENS`, and the backward pass
computes each chunk's logits again. Two all-reduces of [R] floats over the tensor group a micro-batch: the maximum, then
the sum of exponentials together with the label's logit.
"""

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor
from torch.distributed import ProcessGroup

CHUNK_TOKENS = 512
"""Most tokens whose fp32 logits [chunk, W] are held at once: 0.3 GiB at V = 151,936 without tensor parallelism."""
CHUNK_SHARE, SMALLEST_CHUNK = 16, 64
"""A chunk is a sixteenth of the tokens, so that logits take a sixteenth of what all would, but not so few that a matrix
product is mostly the reading of the weight."""


def _logits(hidden: Tensor, weight: Tensor, scale: float, padding: int) -> Tensor:
    """fp32 [chunk, W] logits, already divided by the temperature; the last `padding` rows of the vocabulary
    so low that their probability is 0."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden.float(), weight.float().t())
    logits.mul_(scale)
    if padding:
        # not -inf: on a rank that holds nothing but padding the maximum would be -inf too, and their difference NaN
        logits[:, -padding:] = torch.finfo(torch.float32).min
    return logits


class VocabParallelLogProbs(torch.autograd.Function):
    """log softmax(hidden weight^T / temperature)[label] for every row, exact in fp32; on request with the entropy."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, padding: int, group: ProcessGroup,
        with_entropy: bool = False,
    ):  # fmt: skip
        """hidden [R, H], weight [W, H], labels [R] over the whole vocabulary -> fp32 [R], or [2, R]: log-probs,
        entropies.

        `padding` rows at the end of this rank's weight stand for no token.
        """
        num_rows = weight.shape[0]
        local = labels - group.rank() * num_rows
        here = (local >= 0) & (local < num_rows)
        local = torch.where(here, local, 0)
        maximum = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        # sum of exponentials, label's logit, sum of exponential * logit, each relative to the maximum
        sums = torch.zeros(3 if with_entropy else 2, *labels.shape, dtype=torch.float32, device=hidden.device)
        for rows in _chunks(labels.numel()):
            logits = _logits(hidden[rows], weight, 1.0 / temperature, padding)
            maximum[rows] = logits.amax(dim=-1)
            sums[1, rows] = torch.where(here[rows], logits.gather(1, local[rows, None])[:, 0], 0.0)
            logits.sub_(maximum[rows, None])
            if with_entropy:
                sums[2, rows] = (logits.exp() * logits).sum(dim=-1)
            sums[0, rows] = logits.exp_().sum(dim=-1)
            del logits  # before the next chunk's are made
        if group.size() > 1:
            local_maximum = maximum.clone()
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
            _shift(sums, local_maximum - maximum, with_entropy)
            dist.all_reduce(sums, group=group)
        log_normalizer = maximum + sums[0].log()
        log_probs = sums[1] - log_normalizer
        entropies = sums[0].log() - sums[2] / sums[0] if with_entropy else None
        ctx.save_for_backward(hidden, weight, local, here, log_normalizer, entropies)
        ctx.temperature, ctx.padding = temperature, padding
        return torch.stack([log_probs, entropies]) if with_entropy else log_probs

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Gradients of this rank's part of the vocabulary; that of hidden is summed over the tensor group by the
        caller's mapping (gather or copy into the tensor-parallel region).

        d log p_y / d logit_v = 1[v = y] - p_v, and d entropy / d logit_v = -p_v (log p_v + entropy).
        """
        hidden, weight, local, here, log_normalizer, entropies = ctx.saved_tensors
        grad_log_prob = grad if entropies is None else grad[0]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _chunks(local.numel()):
            log_p = _logits(hidden[rows], weight, 1.0 / ctx.temperature, ctx.padding).sub_(log_normalizer[rows, None])
            scaled = grad_log_prob[rows] / ctx.temperature
            if entropies is None:
                grad_logits = log_p.exp_().mul_(-scaled[:, None])
            else:
                # exp(-200) is 0 in fp32: the bound keeps 0 * (what padding has as log p) from being NaN
                factor = (log_p.clamp(min=-200.0) + entropies[rows, None]).mul_(grad[1, rows, None] / ctx.temperature)
                grad_logits = log_p.exp_().mul_(factor.add_(scaled[:, None]).neg_())
            grad_logits.scatter_add_(1, local[rows, None], torch.where(here[rows], scaled, 0.0)[:, None])
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = torch.mm(grad_logits, weight)
            if weight.dtype == torch.float32:
                grad_weight.addmm_(grad_logits.t(), hidden[rows])  # no second [W, H]
            else:
                grad_weight += torch.mm(grad_logits.t(), hidden[rows])
            del log_p, grad_logits
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _shift(sums: Tensor, shift: Tensor, with_entropy: bool) -> None:
    """Make sums relative to a rank's own maximum relative to the greatest one; `shift` [R] = own - greatest <= 0."""
    factor = shift.exp()
    if with_entropy:
        # where, because a rank of padding only has a shift that overflows, times a factor of 0
        sums[2] = torch.where(factor > 0, factor * (sums[2] + shift * sums[0]), 0.0)
    sums[0] *= factor


def _chunks(num_tokens: int):
    chunk = min(CHUNK_TOKENS, max(SMALLEST_CHUNK, num_tokens // CHUNK_SHARE))
    return (slice(start, start + chunk) for start in range(0, num_tokens, chunk))


class LogProbHead(tensor_parallel.ColumnParallelLinear):
    """Megatron's output layer, whose forward gives log-probs of labels instead of logits.

    It stays a ColumnParallelLinear with the same parameter, so that DDP's hooks, checkpoints and tied embeddings work
    as ever; `adopt` turns the layer that GPTModel built into one.
    """

    temperature: float = 1.0
    vocab_size: int = 0
    """True vocabulary; rows beyond it are padding."""
    with_entropy: bool = False
    """Whether passes with a gradient also give the entropy at every position."""

    @classmethod
    def adopt(
        cls, layer: tensor_parallel.ColumnParallelLinear, vocab_size: int, temperature: float, with_entropy: bool
    ) -> "LogProbHead":
        layer.__class__ = cls
        layer.vocab_size, layer.temperature, layer.with_entropy = vocab_size, temperature, with_entropy
        return layer

    def forward(
        self, hidden: Tensor, labels: Tensor, mask: Tensor, weight: Tensor | None, group: ProcessGroup
    ) -> Tensor:
        """hidden [T or T/tensor, 1, H], labels and mask [T] -> fp32 log-probs [T], 0 where mask is 0; with entropies
        [2, T]."""
        weight = self.weight if weight is None else weight
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        index = mask.nonzero()[:, 0]
        rows = weight.shape[0]
        padding = min(max((group.rank() + 1) * rows - self.vocab_size, 0), rows)
        with_entropy = self.with_entropy and torch.is_grad_enabled()
        values = VocabParallelLogProbs.apply(
            hidden[:, 0].index_select(0, index), weight, labels[index], self.temperature, padding, group, with_entropy
        )
        whole = torch.zeros(*values.shape[:-1], labels.numel(), dtype=torch.float32, device=hidden.device)
        return whole.index_copy(-1, index, values)
