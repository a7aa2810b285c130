"""Chunks of `torch_dist` files: written in torch.save's own bytes, found again, and refused where one is not what it
says."""

import io

import pytest
import torch

from gspo_megatron.weights.raw_files import OpenFiles, Scratch, as_bytes, read_bytes
from gspo_megatron.weights.torch_dist_files import Frames
from gspo_megatron.weights.torch_dist_writer import ChunkWriter

KINDS = [((), torch.float32), ((1, 1, 7), torch.bfloat16), ((3, 5), torch.float32), ((1, 300, 129), torch.float16)]


def tensors():
    """Three of each kind, in turns."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3) for shape, dtype in KINDS]


def saved(tensor, checksums=False) -> bytes:
    buffer, before = io.BytesIO(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(tensor, buffer)
    finally:
        torch.serialization.set_crc32_options(before)
    return buffer.getvalue()


def find(frames, path, offset, length, tensor) -> torch.Tensor:
    start = frames.data_start(path, offset, length, tuple(tensor.shape), tensor.dtype)
    out, files = torch.empty_like(tensor), OpenFiles()
    read_bytes(files.descriptor(path), path, offset + start, out)
    return out


def test_chunks_are_in_the_bytes_of_torch_save_and_nothing_else_of_the_memory_they_come_from(tmp_path):
    writer, scratch, path = ChunkWriter(), Scratch(), tmp_path / "__0_0.distcp"
    scratch.bytes(1 << 20).fill_(170)
    places = []
    with path.open("wb") as file:
        for tensor in tensors():
            data = scratch.bytes(tensor.nbytes)
            data.copy_(torch.from_numpy(as_bytes(tensor)))
            places.append(writer.write(file, data, tuple(tensor.shape), tensor.dtype))
    written = path.read_bytes()
    assert sum(length for _, length in places) == len(written)
    for tensor, (offset, length) in zip(tensors(), places, strict=True):
        assert written[offset : offset + length] == saved(tensor)
        assert torch.load(io.BytesIO(written[offset : offset + length]), weights_only=True).equal(tensor)


@pytest.mark.parametrize("checksums", [False, True])
def test_elements_are_found_whether_or_not_frames_are_alike(tmp_path, checksums):
    path, chunks = tmp_path / "file", [saved(tensor, checksums) for tensor in tensors()]
    path.write_bytes(b"".join(chunks))
    frames, offset = Frames(OpenFiles()), 0
    for tensor, chunk in zip(tensors(), chunks, strict=True):
        assert find(frames, path, offset, len(chunk), tensor).equal(tensor)
        offset += len(chunk)


ALTERED = {
    "code in its pickle": (
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"cbuiltins\nprint\n0(lp0\n0cbuiltins\nid",
        "names builtins",
    ),
    "another type": (b"ctorch\nFloatStorage\n", b"ctorch\nHalfStorage \n", "can't be read|names torch.HalfStorage"),
    "the end of the archive": (b"PK\x05\x06", b"PK\x05\x07", "not a zip file"),
}


@pytest.mark.parametrize("case", ALTERED)
def test_a_chunk_that_differs_from_those_before_it_outside_its_elements_is_looked_at(tmp_path, case):
    good, bad, message = ALTERED[case]
    first, second = torch.zeros(3, 5), torch.ones(3, 5)
    chunk = saved(second)
    assert chunk.count(good) == 1
    chunk = chunk.replace(good, bad.ljust(len(good))[: len(good)])
    path, whole = tmp_path / "file", saved(first)
    path.write_bytes(whole + chunk)
    frames = Frames(OpenFiles())
    assert find(frames, path, 0, len(whole), first).equal(first)
    with pytest.raises(ValueError, match=message):
        find(frames, path, len(whole), len(chunk), second)


def test_a_chunk_that_ends_early_is_refused(tmp_path):
    tensor = torch.ones(3, 5)
    path, whole = tmp_path / "file", saved(tensor)
    path.write_bytes(whole + whole[:-1])
    frames = Frames(OpenFiles())
    find(frames, path, 0, len(whole), tensor)
    with pytest.raises(ValueError):
        find(frames, path, len(whole), len(whole), tensor)
