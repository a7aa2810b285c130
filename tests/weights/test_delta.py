"""Deltas turn one checkpoint into another bit for bit, are small where little changed, and know a wrong base."""

import resource
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_megatron.weights import delta as delta_module
from gspo_megatron.weights.delta import DeltaError, apply_delta, delta_versions, write_delta

SHAPES = {"a": (300, 200), "b": (1000,), "empty": (0, 4), "scalar": ()}


def checkpoint(directory, tensors):
    directory.mkdir()
    (directory / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def weights(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: (0.02 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in SHAPES.items()}


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.fixture
def old(tmp_path):
    return checkpoint(tmp_path / "old", weights(torch.bfloat16))


@pytest.mark.parametrize("chunk", [64, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_a_checkpoint_comes_out_bit_for_bit(tmp_path, monkeypatch, dtype, chunk):
    monkeypatch.setattr(delta_module, "CHUNK_ELEMENTS", chunk)
    before, after = weights(dtype), weights(dtype)
    after["a"][5, 7:9], after["b"][::3] = -1, 3
    if dtype.is_floating_point:
        after["a"][6, 0], after["a"][7, 0] = torch.nan, -0.0
    old, new = checkpoint(tmp_path / "old", before), checkpoint(tmp_path / "new", after)
    write_delta(old, new, tmp_path / "d", (4, 5))
    assert delta_versions(tmp_path / "d") == (4, 5)
    found = load_file(apply_delta(old, tmp_path / "d", tmp_path / "out") / "model.safetensors")
    assert found.keys() == after.keys()
    for name, tensor in after.items():
        assert found[name].shape == tensor.shape and torch.equal(bits(found[name]), bits(tensor)), name


def test_after_a_step_of_adam_in_bf16_little_of_a_checkpoint_is_sent(tmp_path):
    """Every fp32 master weight moves by the learning rate of 1e-6; few of their bf16 roundings do."""
    generator = torch.Generator().manual_seed(1)
    master = 0.02 * torch.randn(512, 512, generator=generator)
    moved = master - 1e-6 * torch.randn(512, 512, generator=generator).sign()
    old = checkpoint(tmp_path / "old", {"w": master.bfloat16()})
    new = checkpoint(tmp_path / "new", {"w": moved.bfloat16()})
    found = write_delta(old, new, tmp_path / "d", (0, 1))
    # a weight near 0.02 lies on a grid of 1.2e-4: about 1 in 60 crosses a border between two of its points, more near 0
    assert 0 < found.num_changed < 0.1 * found.num_elements
    assert found.file_bytes < 0.1 * found.tensor_bytes


def test_another_base_is_named(tmp_path, old):
    new = checkpoint(tmp_path / "new", {**weights(torch.bfloat16), "a": weights(torch.bfloat16, 1)["a"]})
    write_delta(old, new, tmp_path / "d", (0, 1))
    other = weights(torch.bfloat16)
    other["b"][3] += 1
    wrong = checkpoint(tmp_path / "wrong", other)
    with pytest.raises(DeltaError, match="b in .*wrong is not what .*d starts from"):
        apply_delta(wrong, tmp_path / "d", tmp_path / "out")
    less = checkpoint(tmp_path / "less", {"a": other["a"]})
    with pytest.raises(DeltaError, match="other tensors"):
        apply_delta(less, tmp_path / "d", tmp_path / "out")
    with pytest.raises(DeltaError, match=r"other tensors: \['b', 'empty', 'scalar'\]"):
        write_delta(old, less, tmp_path / "d2", (0, 1))
    assert not (tmp_path / "out").exists() and not (tmp_path / "d2").exists()


@pytest.mark.parametrize("place", [3, -3, -60, "cut", "empty"])
def test_a_damaged_file_leaves_nothing_behind(tmp_path, old, place):
    new = checkpoint(tmp_path / "new", {**weights(torch.bfloat16), "a": weights(torch.bfloat16, 1)["a"]})
    path = tmp_path / "d"
    write_delta(old, new, path, (0, 1))
    data = bytearray(path.read_bytes())
    if place == "cut":
        data = data[: len(data) // 2]
    elif place == "empty":
        data = b""
    else:
        data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(DeltaError):
        apply_delta(old, path, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_a_full_disk_leaves_nothing_half_written(tmp_path, old):
    """A bound on the size of files stands for the disk."""
    new = checkpoint(tmp_path / "new", weights(torch.bfloat16, 1))
    program = (
        "import signal, sys; from pathlib import Path;"
        "from gspo_megatron.weights.delta import write_delta, apply_delta;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "old, new, path, target = map(Path, sys.argv[2:]);"
        "write_delta(old, new, path, (0, 1)) if sys.argv[1] == 'write' else apply_delta(old, path, target)"
    )

    def run(what, limit):
        return subprocess.run(
            [sys.executable, "-c", program, what, *map(str, (old, new, tmp_path / "d", tmp_path / "out"))],
            stderr=subprocess.PIPE, text=True, timeout=60,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )  # fmt: skip

    failed = run("write", 20_000)
    assert failed.returncode == 1 and "OSError" in failed.stderr and "File too large" in failed.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new"}
    shutil.rmtree(new)
    checkpoint(new, weights(torch.bfloat16, 1))
    write_delta(old, new, tmp_path / "d", (0, 1))
    failed = run("apply", 20_000)
    assert failed.returncode == 1 and "File too large" in failed.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new", "d"}
