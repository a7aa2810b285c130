"""Packs named tensors into flat buckets, checking each against what is expected."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from gspo_megatron.rollout.transports.base import Bucket

TensorSpec = tuple[torch.dtype, tuple[int, ...]]


class BucketWriter:
    """Copies tensors one after the other into one buffer of `capacity` bytes, made by `allocate`.

    A tensor larger than that gets a bucket of its own size. `sent` are the names so far, `num_bytes` their size.
    """

    def __init__(self, capacity: int, expected: Mapping[str, TensorSpec], allocate: Callable[[int], Tensor]):
        if capacity < 1:
            raise ValueError(f"weights.bucket_mib: a bucket of {capacity} bytes holds nothing; choose a larger one")
        self._capacity, self._expected, self._allocate = capacity, expected, allocate
        self._buffer: Tensor | None = None
        self.sent: dict[str, None] = {}
        self.num_bytes = 0
        self.last_name = ""

    def buckets(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        """The buckets in order; one is valid until the next is asked for.

        Raises ValueError naming a tensor that is unexpected, comes twice, or has another dtype or shape.
        """
        pending: list[tuple[str, TensorSpec]] = []
        used = 0
        for name, tensor in tensors:
            self._check(name, tensor)
            size = tensor.numel() * tensor.element_size()
            # the engine cuts the buffer without gaps and refuses a tensor that then lies askew
            if pending and (used + size > self._capacity or used % tensor.element_size()):
                yield self._bucket(pending, used)
                pending, used = [], 0
            self._place(used, size, tensor)
            pending.append((name, (tensor.dtype, tuple(tensor.shape))))
            used += size
            self.sent[name] = None
            self.num_bytes += size
            self.last_name = name
        if pending:
            yield self._bucket(pending, used)

    def _check(self, name: str, tensor: Tensor) -> None:
        if name not in self._expected:
            raise ValueError(f"{name} is not expected; the model has no such tensor")
        if name in self.sent:
            raise ValueError(f"{name} comes a second time")
        dtype, shape = self._expected[name]
        if tensor.dtype != dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected {dtype}")
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")

    def _place(self, offset: int, size: int, tensor: Tensor) -> None:
        if self._buffer is None or self._buffer.numel() < offset + size:
            self._buffer = self._allocate(max(self._capacity, size))
        view = self._buffer[offset : offset + size].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor.detach())

    def _bucket(self, pending: list[tuple[str, TensorSpec]], used: int) -> Bucket:
        return Bucket(
            names=tuple(name for name, _ in pending),
            dtypes=tuple(dtype for _, (dtype, _) in pending),
            shapes=tuple(shape for _, (_, shape) in pending),
            flat=self._buffer[:used],
        )
