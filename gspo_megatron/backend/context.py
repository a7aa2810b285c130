"""Context parallelism: which tokens of a packed micro-batch a rank works on, and how its part finds the others.

Shape legend: N sequences in a micro-batch, T packed tokens of the whole micro-batch, S = T / context-parallel size.

Megatron's zigzag order (`context_parallel` in its docs, `_get_thd_freqs_on_this_cp_rank` in
`models/common/embeddings/rope_utils.py`): each sequence is cut into 2 * size chunks of equal length, and rank r holds
chunks r and 2 * size - 1 - r, so that causal attention costs all ranks the same. Labels and per-token values are at the
predicting position before this cut (`algorithm/packing.py`), so that it takes nothing from its neighbour.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def zigzag(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """[S] positions in [T] of the tokens of context-parallel rank `rank`, in the order in which it holds them.

    Raises ValueError where a sequence is no multiple of 2 * size tokens.
    """
    bounds = cu_seqlens.tolist()
    if size == 1:
        return torch.arange(bounds[-1], device=cu_seqlens.device)
    pieces = []
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        chunk, rest = divmod(stop - start, 2 * size)
        if rest:
            raise ValueError(
                f"a sequence of {stop - start} tokens cannot be cut into 2 * parallel.context = {2 * size} chunks; "
                "pack with sequence_multiple"
            )
        for index in (rank, 2 * size - 1 - rank):
            pieces.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
    return torch.cat(pieces).to(cu_seqlens.device)


class ContextParallel:
    """This rank's place on the context-parallel axis; `group` is None where there is no such axis."""

    def __init__(self, group: ProcessGroup | None = None):
        self.group = group
        self.rank = group.rank() if group else 0
        self.size = group.size() if group else 1

    @property
    def counts_sequences(self) -> bool:
        """True on the one rank that counts whole sequences, which all ranks see."""
        return self.rank == 0

    def positions(self, cu_seqlens: Tensor) -> Tensor:
        """[S] positions in [T] of this rank's tokens."""
        return zigzag(cu_seqlens, self.rank, self.size)

    def chunks(self, cu_seqlens: Tensor) -> tuple[int, Tensor]:
        """(chunks of a sequence, [S] which of them each of this rank's tokens is in); `cu_seqlens` are this rank's
        own."""
        lengths = cu_seqlens.diff().long()
        starts = torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
        first_half = torch.arange(starts.numel(), device=starts.device) - starts < torch.repeat_interleave(
            lengths // 2, lengths
        )
        return 2 * self.size, torch.where(first_half, self.rank, 2 * self.size - 1 - self.rank)

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over the context-parallel ranks, in place; no gradient passes. One collective."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, shards: Tensor, bounds: Sequence[Tensor]) -> list[Tensor]:
        """Values of whole micro-batches, [T] each, from this rank's [S] of each, one after the other in `shards`.

        `bounds`: the cu_seqlens of each micro-batch. One collective, which all ranks must enter.
        """
        lengths = [int(cu_seqlens[-1]) for cu_seqlens in bounds]
        if self.size == 1:
            return list(shards.split(lengths))
        gathered = shards.new_empty(self.size * shards.numel())  # gloo takes flat tensors only
        dist.all_gather_into_tensor(gathered, shards.contiguous(), group=self.group)
        parts = gathered.view(self.size, -1).split([length // self.size for length in lengths], dim=1)
        whole = []
        for part, cu_seqlens, length in zip(parts, bounds, lengths, strict=True):
            order = torch.cat([zigzag(cu_seqlens, rank, self.size) for rank in range(self.size)]).to(part.device)
            whole.append(part.new_empty(length).index_copy_(0, order, part.reshape(-1)))
        return whole


class GatherTokens(torch.autograd.Function):
    """[S, ...] of every context-parallel rank -> [T, ...] in the order of the sequences, on all of them.

    Backward adds up what the ranks' queries say about each token and gives every rank its own (a reduce-scatter).
    torch.distributed.nn.functional.all_gather does not serve: its backward fails in groups of less than all ranks.
    """

    @staticmethod
    def forward(ctx, shard: Tensor, order: Tensor, group: ProcessGroup) -> Tensor:
        """`order` [T]: the positions of rank 0's tokens, then of rank 1's, and so on."""
        ctx.order, ctx.group = order, group
        gathered = shard.new_empty(group.size() * shard.shape[0], *shard.shape[1:])
        dist.all_gather_into_tensor(gathered, shard.contiguous(), group=group)
        return torch.empty_like(gathered).index_copy_(0, order, gathered)

    @staticmethod
    def backward(ctx, grad: Tensor):
        by_rank = grad.index_select(0, ctx.order)
        shard = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(shard, by_rank, group=ctx.group)
        return shard, None, None
