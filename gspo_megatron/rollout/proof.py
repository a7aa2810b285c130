"""Proof that engines hold what was sent: their own checksums against checksums of the tensors on their way out."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gspo_megatron.weights.engine_layout import Piece

Checksums = dict[str, str]
"""Engine parameter -> 16 hexadecimal digits."""
MOST_WIDENED = 1 << 23
"""Elements of the largest parameter that an engine may hold in fp32 though it was sent in less."""
Layout = Mapping[str, Sequence[Sequence[Piece]]]
"""Engine parameter -> [engine rank] -> pieces, of `weights.engine_layout`."""


class Sha256:
    """SGLang's checksum of a tensor on the CPU: the first 8 bytes of SHA-256 over its bytes."""

    def __init__(self):
        self._digest = hashlib.sha256()

    def add(self, block: Tensor) -> None:
        # through uint8: numpy knows no bfloat16
        self._digest.update(memoryview(block.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))

    def value(self) -> str:
        return self._digest.digest()[:8].hex()


class OnGpu:
    """SGLang's checksum of a tensor on a GPU, by its own kernel; holds the parameter's blocks until all are there."""

    def __init__(self):
        self._blocks: list[Tensor] = []

    def add(self, block: Tensor) -> None:
        self._blocks.append(block.detach().to("cuda", copy=True).reshape(-1).view(torch.uint8))

    def value(self) -> str:
        from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

        return f"{gpu_tensor_hash(torch.cat(self._blocks)):016x}"


class _Stream:
    """The bytes of one parameter of one engine rank, fed piece by piece in their order.

    A small one that is no fusion is hashed as fp32 too: engines keep some, routers say, as fp32 whatever was sent. The
    values are the same then; where an engine rounds to less than was sent neither checksum is its own.
    """

    def __init__(self, pieces: Sequence[Piece], dtype: torch.dtype, hasher: Callable[[], Sha256 | OnGpu]):
        self._pieces, self._dtype, self._next, self._hasher = pieces, dtype, 0, hasher()
        narrow = dtype in (torch.bfloat16, torch.float16)
        small = len(pieces) == 1 and torch.Size(pieces[0].shape).numel() <= MOST_WIDENED
        self._wide = hasher() if narrow and small else None

    def feed(self, held: Mapping[str, Tensor]) -> Iterator[str]:
        """Goes as far as the held tensors allow; gives the names of the pieces that were taken."""
        while self._next < len(self._pieces):
            piece = self._pieces[self._next]
            if not piece.hf:
                self._hasher.add(torch.zeros(piece.shape, dtype=self._dtype))
            elif piece.hf in held:
                block = tuple(slice(low, low + size) for low, size in zip(piece.start, piece.shape, strict=True))
                data = _padded(held[piece.hf][block], piece.padded)
                self._hasher.add(data)
                if self._wide is not None:
                    self._wide.add(data.float())
                yield piece.hf
            else:
                return
            self._next += 1

    def values(self) -> tuple[str, ...]:
        """Checksums of which the engine's must be one; none where a piece did not come."""
        if self._next < len(self._pieces):
            return ()
        return (self._hasher.value(), *((self._wide.value(),) if self._wide is not None else ()))


def _padded(block: Tensor, shape: Sequence[int]) -> Tensor:
    if not shape:
        return block
    found = block.new_zeros(shape)
    found[tuple(slice(size) for size in block.shape)] = block
    return found


class Expected:
    """Checksums that the engine ranks of one layout must have, computed while the tensors go by.

    A tensor is copied only while it waits for one that lies before it in a parameter: with experts and q, k, v in
    their order, none is.
    """

    def __init__(self, layout: Layout, sample: Iterable[str], dtypes: Mapping[str, torch.dtype], on_gpu: bool):
        sample = list(sample)
        layout = {name: layout[name] for name in sample}
        used = {piece.hf for ranks in layout.values() for pieces in ranks for piece in pieces if piece.hf}
        self.made_from = (layout, sample, {name: dtypes[name] for name in used}, on_gpu)
        """What another rank makes its own from, for the tensors that it sends."""
        self._elsewhere: list[dict[str, tuple[str, ...]]] = []
        hasher = OnGpu if on_gpu else Sha256
        self._streams: dict[str, list[_Stream]] = {}
        self._used_by: dict[str, list[_Stream]] = defaultdict(list)
        self._left: Counter[str] = Counter()
        self._held: dict[str, Tensor] = {}
        for name in sample:
            self._streams[name] = []
            for pieces in layout[name]:
                dtype = dtypes[next(piece.hf for pieces in layout[name] for piece in pieces if piece.hf)]
                stream = _Stream(pieces, dtype, hasher)
                self._streams[name].append(stream)
                names = [piece.hf for piece in pieces if piece.hf]
                self._left.update(names)
                for hf in dict.fromkeys(names):
                    self._used_by[hf].append(stream)

    @property
    def needed(self) -> list[str]:
        """Hugging Face names of the tensors that the checksums are made of and that have not come, in a good order."""
        return [name for name, number in self._left.items() if number]

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Views of a bucket that is about to be sent; not used after the call."""
        for name, tensor in tensors:
            if not self._left[name]:
                continue
            self._held[name] = tensor
            for stream in self._used_by[name]:
                for taken in stream.feed(self._held):
                    self._left[taken] -= 1
                    if not self._left[taken]:
                        self._held.pop(taken)
            if name in self._held:
                self._held[name] = tensor.clone()

    def merge(self, checksums: Sequence[Mapping[str, tuple[str, ...]]]) -> None:
        """Add what another rank, which sent all tensors of these parameters, has found."""
        self._elsewhere += [{} for _ in range(len(checksums) - len(self._elsewhere))]
        for known, found in zip(self._elsewhere, checksums, strict=False):
            known |= found

    def checksums(self) -> list[dict[str, tuple[str, ...]]]:
        """[engine rank] parameter -> checksums of which it must have one, of the sample as far as its tensors came."""
        ranks = max((len(streams) for streams in self._streams.values()), default=0)
        found: list[dict[str, tuple[str, ...]]] = [{} for _ in range(ranks)]
        for name, streams in self._streams.items():
            for rank, stream in enumerate(streams):
                values = stream.values()
                if values:
                    found[rank][name] = values
        for rank, checksums in enumerate(self._elsewhere):
            found[rank] |= checksums
        return found


class Rotation:
    """Which parameters a sync proves: all of them, or the next ones in turn."""

    def __init__(self, share: float):
        self._share, self._cursor = share, 0

    def take(self, sizes: Mapping[str, int]) -> list[str]:
        """Names of at least one parameter, and of at least `share` of all bytes; none where the share is 0."""
        names = sorted(sizes)
        if not self._share or not names:
            return []
        wanted, taken, found = self._share * sum(sizes.values()), 0, []
        while len(found) < len(names) and (not found or taken < wanted):
            name = names[self._cursor % len(names)]
            self._cursor += 1
            found.append(name)
            taken += sizes[name]
        return found


def layout_bytes(layout: Layout, dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
    """Engine parameter -> its bytes on rank 0."""
    sizes = {}
    for name, ranks in layout.items():
        named = [piece for piece in ranks[0] if piece.hf]
        item = dtypes[named[0].hf].itemsize if named else 1
        sizes[name] = sum(item * torch.Size(piece.padded or piece.shape).numel() for piece in ranks[0])
    return sizes


def skipped(parameters: Iterable[str], sample: Iterable[str]) -> list[str]:
    """What SGLang's `skip_tensor_list` has to hold, so that only the sample is hashed. It skips whatever has an entry
    as a part of its name: whole layers go by their prefix, and no entry may be a part of a sampled name."""
    sample = set(sample)
    kept_layers = {_layer(name) for name in sample}
    entries: dict[str, None] = {}
    for name in parameters:
        if name not in sample:
            layer = _layer(name)
            entries[layer if layer and layer not in kept_layers else name] = None
    return [entry for entry in entries if not any(entry in name for name in sample)]


def _layer(name: str) -> str:
    head, found, tail = name.partition(".layers.")
    return f"{head}{found}{tail.partition('.')[0]}." if found else ""
