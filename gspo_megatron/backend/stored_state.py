"""Adam's state from the files of a checkpoint: a rank reads only the elements that it holds, to where they belong.

Megatron has every data-parallel rank load whole parameters, all of them, before it takes its share (megatron-core,
`load_parameter_state_from_fully_reshardable`): 12 bytes for each parameter of the rank's part of the model, from the
disk and in host memory. Floor: 12 bytes for each parameter of which it holds the state, 1/d of these with d
data-parallel ranks, and no memory beside the state. Here that is what is read, and `RawTensor` keeps at most some
megabytes beside.
"""

from collections.abc import Iterator
from math import prod

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from gspo_megatron.weights.torch_dist_files import TorchDistReader


class StoredTensor:
    """A whole tensor of Adam's state as Megatron's loader wants it (`tensor.flatten()[start:stop]`), read when asked.

    `described`: what `StateSpace.describe` says of it. Raises ValueError where the checkpoint holds no such tensor, or
    one of another shape; then and when asked for elements, where its files are broken, OSError too.
    """

    def __init__(self, reader: TorchDistReader, described: ShardedTensor | ShardedTensorFactory):
        self._reader = reader
        built = described.build() if isinstance(described, ShardedTensorFactory) else described
        first = described.data.storage_offset()
        shards = [shard for shard in nested_values({"": built}) if isinstance(shard, ShardedTensor)]
        self._shards = [(shard.data.storage_offset() - first, shard) for shard in shards]
        for _, shard in self._shards:
            stored = reader.tensors.get(shard.key)
            if stored is None:
                raise ValueError(f"{reader.directory} holds no {shard.key}")
            if stored.shape != tuple(shard.global_shape) and not shard.allow_shape_mismatch:
                raise ValueError(
                    f"{reader.directory}: {shard.key} is {list(stored.shape)}, the model's {list(shard.global_shape)}"
                )

    def flatten(self) -> "StoredTensor":
        return self

    def __getitem__(self, elements: slice) -> "StoredElements":
        return StoredElements(self, elements.start, elements.stop)

    def read_into(self, start: int, out: Tensor) -> None:
        """Elements from `start` on, counted in C order, as many as `out` [elements] has."""
        stop, filled = start + out.numel(), 0
        for first, shard in self._shards:
            low, high = max(start, first), min(stop, first + shard.data.numel())
            if low < high:
                self._read(shard, low - first, out[low - start : high - start])
                filled += high - low
        assert filled == out.numel(), f"{filled} of {out.numel()} elements are described"

    def _read(self, shard: ShardedTensor, first: int, out: Tensor) -> None:
        """Elements of a shard from the `first` on."""
        lead, at = shard.prepend_axis_num, 0
        for start, shape in rectangles(tuple(shard.local_shape), first, first + out.numel()):
            block = out[at : at + prod(shape)].view((1,) * lead + shape)
            at += prod(shape)
            offset = (*(0,) * lead, *start)
            self._read_block(shard.key, tuple(a + b for a, b in zip(shard.global_offset, offset, strict=True)), block)

    def _read_block(self, key: str, start: tuple[int, ...], out: Tensor) -> None:
        """What lies beyond the stored tensor (the vocabulary's padding, which differs between layouts) is 0."""
        ends = [min(low + size, whole) for low, size, whole in zip(start, out.shape, self._reader.tensors[key].shape)]
        inside = tuple(slice(0, max(0, end - low)) for low, end in zip(start, ends, strict=True))
        if out[inside].shape != out.shape:
            out.zero_()
        if out[inside].numel():
            self._reader.read_into(key, start, out[inside])


class StoredElements:
    """A range of the elements of a stored tensor, not read yet."""

    def __init__(self, tensor: StoredTensor, start: int, stop: int):
        self._tensor, self._start, self._stop = tensor, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def read_into(self, out: Tensor) -> None:
        """`out`: contiguous, on any device; where it is fp32 on the CPU, without a copy."""
        assert out.numel() == len(self)
        self._tensor.read_into(self._start, out.view(-1))

    def read(self) -> Tensor:
        """fp32, on the CPU."""
        values = torch.empty(len(self), dtype=torch.float32)
        self.read_into(values)
        return values


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and shapes of the blocks which elements [start, stop) of a tensor of this shape, in C order, make up; in
    their order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        for offset, inner in rectangles(shape[1:], start - last * row, stop - last * row):
            yield (last, *offset), (1, *inner)
        return
    for offset, inner in rectangles(shape[1:], start - (first - 1) * row, row):
        yield (first - 1, *offset), (1, *inner)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    for offset, inner in rectangles(shape[1:], 0, stop - last * row):
        yield (last, *offset), (1, *inner)
