"""Megatron shards -> whole Hugging Face tensors on rank 0, bucket by bucket, by one message a source rank and bucket.

Each rank packs the blocks it owns of a bucket into one buffer and sends it to rank 0, which puts the blocks of all
buffers in their places. The number of messages does not grow with the number of tensors or experts; rank 0 holds one
bucket and what the sources sent for it, other ranks hold their part of one bucket.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gspo_megatron.weights.plan import Bucket
from gspo_megatron.weights.rules import Block


def export_hf_tensors(
    params: Mapping[str, Tensor],
    buckets: Sequence[Bucket],
    shapes: Mapping[str, tuple[int, ...]],
    group: ProcessGroup | None,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Collective over all trainer ranks, each of which must run it to its end; yields (HF name, tensor) on rank 0 only.

    A yielded tensor is a view of the bucket's buffer: use it before asking for the next bucket's.
    """
    rank = dist.get_rank()
    for bucket in buckets:
        dtype = dtypes[bucket.names[0]]  # the plan puts one dtype in a bucket
        if rank != 0:
            if rank in bucket.sources:
                dist.send(_pack(params, bucket.sources[rank], dtype, device), dst=0, group=group)
            continue
        received = {
            source: torch.empty(_numel(blocks), dtype=dtype, device=device)
            for source, blocks in bucket.sources.items()
            if source != 0
        }
        waits = [dist.irecv(buffer, src=source, group=group) for source, buffer in received.items()]
        if 0 in bucket.sources:
            received[0] = _pack(params, bucket.sources[0], dtype, device)
        for wait in waits:
            wait.wait()
        yield from _unpack(bucket, received, shapes, dtype, device).items()


def _numel(blocks: Sequence[Block]) -> int:
    return sum(block.numel for block in blocks)


def _pack(params: Mapping[str, Tensor], blocks: Sequence[Block], dtype: torch.dtype, device: torch.device) -> Tensor:
    buffer, offset = torch.empty(_numel(blocks), dtype=dtype, device=device), 0
    for block in blocks:
        block_data = params[block.param].detach()[block.param_slices]
        buffer[offset : offset + block.numel].view(block.shape).copy_(block_data)
        offset += block.numel
    return buffer


def _unpack(bucket: Bucket, received: Mapping[int, Tensor], shapes, dtype, device) -> dict[str, Tensor]:
    tensors = {name: torch.empty(shapes[name], dtype=dtype, device=device) for name in bucket.names}
    for source, blocks in bucket.sources.items():
        offset = 0
        for block in blocks:
            data = received[source][offset : offset + block.numel].view(block.shape)
            block.of_hf(tensors[block.hf]).copy_(data)
            offset += block.numel
    return tensors
