"""Megatron shards -> whole Hugging Face tensors on the senders of a reshard plan, bucket by bucket.

Every rank packs what it holds of a bucket into one message for the bucket's sender. While a bucket is used, the next
one is on its way (the transfers are asynchronous), in a second buffer: a rank holds two rounds of the plan and no more.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gspo_megatron.weights.reshard import ReshardPlan, SenderBucket, Transfer
from gspo_megatron.weights.rules import Block


@dataclass(frozen=True)
class HFBucket:
    """Tensors laid one after the other in `flat` [bytes] uint8, without gaps, each at a multiple of its item size."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    """Views of `flat`."""
    flat: Tensor


def export_hf_tensors(
    params: Mapping[str, Tensor], plan: ReshardPlan, group: ProcessGroup | None, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Collective over all trainer ranks, each of which must run it to its end; yields (HF name, tensor) on the plan's
    senders, to each its own tensors, in the plan's dtypes; nothing on other ranks.

    A yielded tensor is a view of a bucket: use it before asking for the next. Raises RuntimeError naming rank and
    tensors where a transfer fails or exceeds the group's time-out.
    """
    for bucket in export_buckets(params, plan, group, device):
        yield from zip(bucket.names, bucket.tensors, strict=True)


def export_buckets(
    params: Mapping[str, Tensor], plan: ReshardPlan, group: ProcessGroup | None, device: torch.device
) -> Iterator[HFBucket]:
    """As `export_hf_tensors`, by whole buckets; one is valid until the next is asked for."""
    rank = dist.get_rank()
    own = {bucket.round: bucket for bucket in plan.buckets_of(rank)}
    packed: dict[int, list[tuple[SenderBucket, Transfer]]] = {}
    for bucket, transfer in plan.packed_by(rank):
        packed.setdefault(bucket.round, []).append((bucket, transfer))
    numbers = sorted(own.keys() | packed.keys())
    slots = [torch.empty(size, dtype=torch.uint8, device=device) for size in plan.slot_bytes(rank)]

    def start(number: int) -> _Round:
        return _Round(plan, own.get(number), packed.get(number, []), params, slots[number % 2], group)

    ahead: deque[_Round] = deque()
    for position, number in enumerate(numbers):
        if not ahead:
            ahead.append(start(number))
        following = numbers[position + 1] if position + 1 < len(numbers) else None
        if following is not None and following % 2 != number % 2:
            ahead.append(start(following))
        bucket = ahead.popleft().finish()
        if bucket is not None:
            yield bucket


class _Round:
    """One round's transfers of this rank: started when made, finished by `finish`."""

    def __init__(self, plan, bucket: SenderBucket | None, packed, params, slot: Tensor, group: ProcessGroup | None):
        self._plan, self._bucket = plan, bucket
        self._staged: list[tuple[Transfer, Tensor]] = []
        self._flat, end = slot[: bucket.num_bytes] if bucket else slot[:0], bucket.num_bytes if bucket else 0
        operations, self._waits_for = [], []
        for transfer in bucket.transfers if bucket else ():
            if transfer.offset is not None:
                target = self._flat[transfer.offset : transfer.offset + transfer.num_bytes]
            else:
                target = slot[end : end + transfer.num_bytes]
                self._staged.append((transfer, target))
                end += transfer.num_bytes
            operations.append(dist.P2POp(dist.irecv, target, transfer.source, group, tag=bucket.round))
            self._waits_for.append(f"what rank {transfer.source} holds of {_range(transfer.blocks)}")
        for other, transfer in packed:
            message = slot[end : end + transfer.num_bytes]
            end += transfer.num_bytes
            _copy(_packing(params, transfer.blocks, message, plan))
            operations.append(dist.P2POp(dist.isend, message, other.sender, group, tag=other.round))
            self._waits_for.append(f"rank {other.sender} to take {_range(transfer.blocks)}")
        self._works = dist.batch_isend_irecv(operations) if operations else []
        self._tensors = _tensors(bucket, self._flat, plan) if bucket else {}
        if bucket:
            _copy([(self._target(block), _shard(params, block)) for block in bucket.local])

    def finish(self) -> HFBucket | None:
        """This rank's bucket, whole; None where it has none in this round."""
        # gloo gives a work for every operation, NCCL one for all
        for work, what in zip(self._works, self._waits_for, strict=False):
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"{what}: {error}") from error
        for transfer, message in self._staged:
            _copy([(self._target(block), part) for block, part in _cut(transfer.blocks, message, self._plan)])
        if self._bucket is None:
            return None
        return HFBucket(self._bucket.names, tuple(self._tensors[name] for name in self._bucket.names), self._flat)

    def _target(self, block: Block) -> Tensor:
        return block.of_hf(self._tensors[block.hf])


def _range(blocks: tuple[Block, ...]) -> str:
    first, last = blocks[0].hf, blocks[-1].hf
    return first if first == last else f"{first} to {last}"


def _tensors(bucket: SenderBucket, flat: Tensor, plan: ReshardPlan) -> dict[str, Tensor]:
    """The bucket's tensors as views of its bytes."""
    views = {}
    for name, offset in zip(bucket.names, bucket.offsets, strict=True):
        dtype, shape = plan.specs[name]
        views[name] = flat[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return views


def _cut(blocks: tuple[Block, ...], message: Tensor, plan: ReshardPlan) -> Iterator[tuple[Block, Tensor]]:
    """The blocks of a message as views of its bytes."""
    start = 0
    for block in blocks:
        dtype = plan.specs[block.hf][0]
        end = start + block.numel * dtype.itemsize
        yield block, message[start:end].view(dtype).view(block.shape)
        start = end


def _packing(params, blocks, message: Tensor, plan: ReshardPlan) -> list[tuple[Tensor, Tensor]]:
    return [(part, _shard(params, block)) for block, part in _cut(blocks, message, plan)]


def _shard(params: Mapping[str, Tensor], block: Block) -> Tensor:
    return params[block.param].detach()[block.param_slices]


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """All (target, source) in one call: on a GPU a few kernels in place of one a block."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(sources))
