"""Checkpoint directories: what is written is whole, says what it is, and what is broken is refused by name."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gspo_megatron.config import ConfigError
from gspo_megatron.weights import hf_files
from gspo_megatron.weights.hf_files import INDEX, SINGLE, HFReader, read_hf_config, torch_dtype, write_hf_checkpoint


@pytest.fixture
def reference(tmp_path):
    directory = tmp_path / "reference"
    directory.mkdir()
    config = {"architectures": ["X"], "torch_dtype": "float32", "eos": "\N{LATIN SMALL LETTER E WITH ACUTE}"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    (directory / "tokenizer.json").write_text('{"model": 1}')
    (directory / "chat_template.jinja").write_text("{{ x }}")
    (directory / "merges.txt").write_text("a b")
    (directory / INDEX).write_text('{"weight_map": {"stale": "model-00001-of-00009.safetensors"}}')
    (directory / "model-00001-of-00009.safetensors").write_bytes(b"stale")
    (directory / "pytorch_model.bin.index.json").write_text('{"weight_map": {"stale": "pytorch_model.bin"}}')
    (directory / "pytorch_model.bin").write_bytes(b"stale")
    return directory


def random_tensors(count=7, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return {f"t{i}": torch.randn(4, 8, generator=generator).to(dtype) for i in range(count)}


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(
        a.dtype == second[name].dtype and a.shape == second[name].shape and torch.equal(a, second[name])
        for name, a in first.items()
    )


def all_tensors(directory) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        found = load_file(file)
        assert not tensors.keys() & found.keys()
        tensors |= found
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_shard(tmp_path, reference, dtype):
    tensors = random_tensors(dtype=dtype)
    out = write_hf_checkpoint(iter(tensors.items()), tmp_path / "out", reference)
    assert sorted(file.name for file in out.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "merges.txt", SINGLE, "tokenizer.json",
    ]  # fmt: skip
    assert same(load_file(out / SINGLE), tensors)
    with safe_open(out / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses a file without it
    for name in ("generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"):
        assert (out / name).read_bytes() == (reference / name).read_bytes()


@pytest.mark.parametrize("shard_bytes, num_shards", [(1, 7), (128, 7), (256, 4), (300, 4), (640, 2)])
def test_shards_are_bounded_and_the_index_names_what_was_written(tmp_path, reference, shard_bytes, num_shards):
    tensors = random_tensors()  # 128 bytes each
    out = write_hf_checkpoint(tensors.items(), tmp_path / "out", reference, shard_bytes)
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == 7 * 128
    held = {}
    for file in out.glob("*.safetensors"):
        found = load_file(file)
        held |= dict.fromkeys(found, file.name)
        assert len(found) == 1 or sum(tensor.nbytes for tensor in found.values()) <= shard_bytes
    assert index["weight_map"] == held
    expected = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    assert sorted(set(held.values())) == expected
    assert same(all_tensors(out), tensors)
    reader = HFReader(out)
    assert reader.names == set(tensors) and reader.shape("t3") == (4, 8)
    assert torch.equal(reader.read("t3", (1, 2), (2, 5)), tensors["t3"][1:3, 2:7])


@pytest.mark.parametrize("transposed", [False, True])
def test_views_of_one_buffer_that_is_reused_are_kept_apart(tmp_path, reference, transposed):
    def tensors():
        buffer = torch.empty(3, 3)
        for i in range(3):
            buffer.copy_(torch.arange(9.0).view(3, 3) + i)
            yield f"t{i}", buffer.t() if transposed else buffer

    out = write_hf_checkpoint(tensors(), tmp_path / "out", reference)
    grids = {f"t{i}": torch.arange(9.0).view(3, 3) + i for i in range(3)}
    assert same(load_file(out / SINGLE), {name: grid.t() if transposed else grid for name, grid in grids.items()})


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    "before, written",
    [("float32", torch.bfloat16), ("bfloat16", torch.float32), ("bfloat16", torch.bfloat16), (None, torch.bfloat16)],
)
def test_config_says_the_dtype_that_was_written(tmp_path, reference, key, before, written):
    config = {"architectures": ["X"], key: before, "name": "é", "vocab_size": 3}
    (reference / "config.json").write_text(json.dumps(config))
    out = write_hf_checkpoint(random_tensors(dtype=written).items(), tmp_path / "out", reference)
    found = json.loads((out / "config.json").read_text())
    assert found == config | {key: str(written).removeprefix("torch.")} and list(found) == list(config)
    assert json.loads((reference / "config.json").read_text()) == config


def test_config_without_a_dtype_gets_one(tmp_path, reference):
    (reference / "config.json").write_text('{"architectures": ["X"]}')
    out = write_hf_checkpoint(random_tensors(dtype=torch.bfloat16).items(), tmp_path / "out", reference)
    assert read_hf_config(out) == {"architectures": ["X"], "torch_dtype": "bfloat16"}


def test_config_that_is_right_stays_byte_for_byte(tmp_path, reference):
    text = '{"torch_dtype":  "float32",\n\n "architectures": ["X"]}'
    (reference / "config.json").write_text(text)
    out = write_hf_checkpoint(random_tensors().items(), tmp_path / "out", reference)
    assert (out / "config.json").read_text() == text


def test_one_tensor_of_another_dtype_keeps_it(tmp_path, reference):
    tensors = random_tensors(dtype=torch.bfloat16) | {"bias": torch.randn(3)}
    out = write_hf_checkpoint(tensors.items(), tmp_path / "out", reference)
    assert same(load_file(out / SINGLE), tensors) and read_hf_config(out)["torch_dtype"] == "bfloat16"


def test_files_can_be_read_by_others_as_the_directory_can(tmp_path, reference):
    out = write_hf_checkpoint(random_tensors().items(), tmp_path / "out", reference, 200)
    modes = {file.name: file.stat().st_mode & 0o777 for file in out.iterdir()}
    assert modes == dict.fromkeys(modes, out.stat().st_mode & 0o666)


def failing(tensors, after):
    for number, item in enumerate(tensors.items()):
        if number == after:
            raise RuntimeError("rank 3 is gone")
        yield item


@pytest.mark.parametrize("exists", [False, True])
def test_a_writer_that_fails_leaves_the_target_as_it_was(tmp_path, reference, exists):
    target, first = tmp_path / "out", random_tensors(2)
    if exists:
        write_hf_checkpoint(first.items(), target, reference)
    with pytest.raises(RuntimeError, match="rank 3 is gone"):
        write_hf_checkpoint(failing(random_tensors(), 5), target, reference, 200)
    assert target.exists() == exists
    if exists:
        assert same(all_tensors(target), first)
    write_hf_checkpoint(random_tensors().items(), target, reference)
    assert same(all_tensors(target), random_tensors())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "reference"]


def test_a_disk_that_fills_while_files_are_copied_leaves_no_target(tmp_path, reference, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_files.shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        write_hf_checkpoint(random_tensors().items(), tmp_path / "out", reference)
    assert not (tmp_path / "out").exists()


def test_an_earlier_checkpoint_is_replaced_as_a_whole(tmp_path, reference):
    target = tmp_path / "out"
    write_hf_checkpoint(random_tensors(7).items(), target, reference, 100)
    (target / "extra.json").write_text("{}")
    write_hf_checkpoint(random_tensors(3).items(), target, reference)
    assert same(all_tensors(target), random_tensors(3))
    assert not (target / INDEX).exists() and not (target / "extra.json").exists()


def test_a_checkpoint_can_replace_its_own_reference(tmp_path, reference):
    write_hf_checkpoint(random_tensors(3, torch.bfloat16).items(), reference, reference)
    assert same(all_tensors(reference), random_tensors(3, torch.bfloat16))
    assert read_hf_config(reference)["torch_dtype"] == "bfloat16" and (reference / "tokenizer.json").exists()


def test_a_name_that_comes_twice_is_refused(tmp_path, reference):
    with pytest.raises(ValueError, match="t1 comes twice"):
        write_hf_checkpoint([("t1", torch.ones(2)), ("t1", torch.zeros(2))], tmp_path / "out", reference, 1)
    with pytest.raises(ValueError, match="no tensors to write"):
        write_hf_checkpoint([], tmp_path / "out", reference)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "neither model.safetensors.index.json nor model.safetensors; give a safetensors checkpoint"),
        ({"pytorch_model.bin": b"\x80\x02"}, "give a safetensors checkpoint"),
        ({INDEX: b'{"weight_map": {"a": "gone.safetensors"}}'}, "the index names gone.safetensors, which is missing"),
        ({INDEX: b'{"weight_map"'}, "is not JSON"),
        ({INDEX: b'{"metadata": {}}'}, "has no weight_map"),
        ({INDEX: b'{"weight_map": {"a": 3}}'}, "has no weight_map of names to files"),
        ({INDEX: b"[]"}, "is not a JSON object"),
        ({SINGLE: b"\x80\x02}q\x00."}, "model.safetensors can't be read"),
        ({SINGLE: b""}, "model.safetensors can't be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_directories_are_refused(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        HFReader(tmp_path)
    assert str(tmp_path) in str(error.value) and str(error.value).startswith("model.hf: ")


@pytest.mark.parametrize("kept", [4, 30, -1])
def test_a_truncated_file_is_refused(tmp_path, kept):
    save_file(random_tensors(), tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:kept])
    with pytest.raises(ConfigError, match=f"model.hf: {tmp_path / SINGLE} can't be read"):
        HFReader(tmp_path)


def test_a_truncated_shard_is_refused_when_it_is_opened(tmp_path, reference):
    out = write_hf_checkpoint(random_tensors().items(), tmp_path / "out", reference, 300)
    shard = out / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    reader = HFReader(out)
    assert reader.shape("t0") == (4, 8)
    with pytest.raises(ConfigError, match="model-00002-of-00004.safetensors can't be read"):
        reader.shape("t2")


def test_an_index_that_names_a_tensor_no_shard_holds(tmp_path, reference):
    out = write_hf_checkpoint(random_tensors().items(), tmp_path / "out", reference, 300)
    index = json.loads((out / INDEX).read_text())
    index["weight_map"]["ghost"] = index["weight_map"]["t0"]
    (out / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="ghost is not in model-00001-of-00004.safetensors"):
        HFReader(out).shape("ghost")


@pytest.mark.parametrize(
    "content, message",
    [(None, "has no config.json"), (b"{", "is not JSON"), (b"[1]", "is not a JSON object"), (b"\xff", "is not JSON")],
)
def test_a_broken_config_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_hf_config(tmp_path)


def test_dtypes_by_their_names_in_the_configuration():
    assert torch_dtype("fp32") == torch.float32 and torch_dtype("bf16") == torch.bfloat16
