"""Packs named tensors into flat buckets, checking each against what is expected."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from gspo_megatron.rollout.transports.base import Bucket

TensorSpec = tuple[torch.dtype, tuple[int, ...]]


class BucketWriter:
    """Copies tensors one after the other into one buffer of `capacity` bytes, made by `allocate`.

    A tensor larger than that gets a bucket of its own size. `together`: name -> all names that must be in one bucket
    with it, which are held until the last of them comes. `sent` are the names so far, `num_bytes` their size.
    """

    def __init__(
        self,
        capacity: int,
        expected: Mapping[str, TensorSpec],
        allocate: Callable[[int], Tensor],
        together: Mapping[str, frozenset[str]] | None = None,
    ):
        if capacity < 1:
            raise ValueError(f"weights.bucket_mib: a bucket of {capacity} bytes holds nothing; choose a larger one")
        self._capacity, self._expected, self._allocate = capacity, expected, allocate
        self._together, self._held = dict(together or {}), dict[str, Tensor]()
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
        for unit in self._units(tensors):
            sizes = [tensor.numel() * tensor.element_size() for _, tensor in unit]
            # the engine cuts the buffer without gaps and refuses a tensor that then lies askew
            if pending and (used + sum(sizes) > self._capacity or used % unit[0][1].element_size()):
                yield self._bucket(pending, used)
                pending, used = [], 0
            if self._buffer is None or self._buffer.numel() < used + sum(sizes):
                self._buffer = self._allocate(max(self._capacity, sum(sizes)))
            for (name, tensor), size in zip(unit, sizes, strict=True):
                self._place(used, size, tensor)
                pending.append((name, (tensor.dtype, tuple(tensor.shape))))
                used += size
                self.sent[name] = None
                self.num_bytes += size
                self.last_name = name
        if pending:
            yield self._bucket(pending, used)

    def _units(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        """What goes into one bucket, complete; raises ValueError where the rest of a held group does not come."""
        for name, tensor in tensors:
            self._check(name, tensor)
            group = self._together.get(name)
            if group is None:
                yield [(name, tensor)]
            elif group <= self._held.keys() | {name}:
                others = [(other, self._held.pop(other)) for other in sorted(group - {name})]
                yield [*others, (name, tensor)]
            else:
                self._held[name] = tensor.detach().clone()
        if self._held:
            raise ValueError(f"{', '.join(sorted(self._held))} came without what must be in one bucket with it")

    def _check(self, name: str, tensor: Tensor) -> None:
        if name not in self._expected:
            raise ValueError(f"{name} is not expected; the model has no such tensor")
        if name in self.sent or name in self._held:
            raise ValueError(f"{name} comes a second time")
        dtype, shape = self._expected[name]
        if tensor.dtype != dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected {dtype}")
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")

    def _place(self, offset: int, size: int, tensor: Tensor) -> None:
        view = self._buffer[offset : offset + size].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor.detach())

    def _bucket(self, pending: list[tuple[str, TensorSpec]], used: int) -> Bucket:
        return Bucket(
            names=tuple(name for name, _ in pending),
            dtypes=tuple(dtype for _, (dtype, _) in pending),
            shapes=tuple(shape for _, (_, shape) in pending),
            flat=self._buffer[:used],
        )
