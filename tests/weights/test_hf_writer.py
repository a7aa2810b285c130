"""Checkpoint directories: what is written is whole, and says what it is."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gspo_megatron.weights import hf_writer
from gspo_megatron.weights.hf_files import INDEX, SINGLE, HFReader, read_hf_config
from gspo_megatron.weights.hf_writer import remove_half_written, remove_hf_checkpoint, write_hf_checkpoint
from gspo_megatron.weights.shard_file import ShardWriter
from tests.kills import killed_while_removing
from tests.ranks import run_ranks
from tests.weights.hf_directories import all_tensors, make_reference, random_tensors, same
from tests.weights.writer_runs import half_written, write_together


@pytest.fixture
def reference(tmp_path):
    return make_reference(tmp_path / "reference")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_shard(tmp_path, reference, dtype):
    tensors = random_tensors(dtype=dtype)
    out = write_hf_checkpoint(iter(tensors.items()), tmp_path / "out", reference)
    assert sorted(file.name for file in out.iterdir()) == [
        "additional_chat_templates", "chat_template.jinja", "config.json", "generation_config.json", "merges.txt", SINGLE,
        "tokenization_x.py", "tokenizer.json", "x.tiktoken",
    ]  # fmt: skip
    assert same(load_file(out / SINGLE), tensors)
    with safe_open(out / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses a file without it
    more = ("tokenization_x.py", "x.tiktoken", "additional_chat_templates/tool_use.jinja")
    for name in ("generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", *more):
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
    modes = {file.name: file.stat().st_mode & 0o777 for file in out.rglob("*") if file.is_file()}
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

    monkeypatch.setattr(hf_writer.shutil, "copyfile", full)
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


def test_a_header_that_is_full_ends_a_shard(tmp_path, reference):
    """Names of 9,000 letters fill the room that is set aside where the names are not known."""
    tensors = {f"{'n' * 9000}{i}": tensor for i, tensor in enumerate(random_tensors(20).values())}
    out = write_hf_checkpoint(tensors.items(), tmp_path / "out", reference)
    assert same(all_tensors(out), tensors)
    assert 2 < len(list(out.glob("*.safetensors"))) < 5
    known = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert (write_hf_checkpoint(tensors.items(), tmp_path / "known", reference, shapes=known) / SINGLE).exists()


def test_every_tensor_starts_where_its_dtype_can_be_read(tmp_path, reference):
    tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(2), "c": torch.tensor(1.0)}
    tensors |= {"d": torch.ones(0, 4), "e": torch.tensor([True]), "f": torch.ones(2, dtype=torch.float8_e4m3fn)}
    tensors["g"] = torch.ones(1)
    out = write_hf_checkpoint(tensors.items(), tmp_path / "out", reference, verified=True)
    assert same(all_tensors(out), tensors)


def test_a_dtype_that_the_format_has_not(tmp_path, reference):
    with pytest.raises(ValueError, match="t: safetensors has no torch.complex64"):
        write_hf_checkpoint([("t", torch.ones(2, dtype=torch.complex64))], tmp_path / "out", reference)
    assert not list(tmp_path.glob(".*"))


DAMAGE = {
    "its header": lambda data: data.replace(b'"t1"', b'"t9"'),
    "another checksum": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "bytes": lambda data: data[:-1],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_reads_back_otherwise_than_it_was_written_is_refused(tmp_path, reference, monkeypatch, damage):
    close = ShardWriter.close

    def damaged(writer, durable):
        shard = close(writer, durable)
        path = tmp_path / ".out.partial" / shard.name
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
        return shard

    write_hf_checkpoint(random_tensors(2).items(), tmp_path / "out", reference)
    monkeypatch.setattr(ShardWriter, "close", damaged)
    with pytest.raises(OSError, match=damage):
        write_hf_checkpoint(random_tensors().items(), tmp_path / "out", reference, verified=True)
    assert same(all_tensors(tmp_path / "out"), random_tensors(2)) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("again", [True, False])
def test_killed_between_the_two_renames(tmp_path, reference, again):
    out = write_hf_checkpoint(random_tensors(2).items(), tmp_path / "out", reference)
    out.rename(tmp_path / ".out.old")
    (tmp_path / ".out.partial").mkdir()
    if again:
        with pytest.raises(RuntimeError):
            write_hf_checkpoint(failing(random_tensors(), 5), out, reference)
    else:
        remove_half_written(tmp_path)
    assert same(all_tensors(out), random_tensors(2)) and not list(tmp_path.glob(".*"))


def test_four_ranks_write_one_checkpoint_or_none(tmp_path, reference):
    """Each rank writes what it has; where one can't, all say so and which, and what was there stays."""
    cases = {
        "good": {},
        "full": {"full_disk": 3},
        "twice": {"twice": ("t1", 0)},
        "missing": {"shapes": {"t99": (1,)}},
        "shape": {"shapes": {"t2": (8, 4)}},
    }
    first = random_tensors(2)
    for name in cases:
        write_hf_checkpoint(first.items(), tmp_path / name, reference)
    arguments = [
        {"directory": str(tmp_path / name), "reference": str(reference), "count": 60 if name == "full" else 11, **case}
        for name, case in cases.items()
    ]
    says = {
        "good": "wrote good",
        "full": r"HFWriteError: .*\(its shards\): rank 3: .*File too large",
        "twice": "t1 comes twice",
        "missing": r"ValueError: .* missing \['t99'\]",
        "shape": r"ValueError: t2 is \[4, 8\], not \[8, 4\]",
    }
    for results in run_ranks(write_together, 4, arguments):
        for (name, expected), result in zip(says.items(), results, strict=True):
            assert re.search(expected, result), (name, result)
    assert half_written(tmp_path) == []
    assert same(all_tensors(tmp_path / "good"), random_tensors(11, torch.bfloat16))
    index = json.loads((tmp_path / "good" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert read_hf_config(tmp_path / "good")["torch_dtype"] == "bfloat16"
    for name in ("full", "twice", "missing", "shape"):
        assert same(all_tensors(tmp_path / name), first), name


def test_killed_while_a_checkpoint_is_removed(tmp_path, reference):
    """Nothing half-removed has its name, and the next start removes the rest."""
    out = write_hf_checkpoint(random_tensors().items(), tmp_path / "hf_step_2", reference)
    with killed_while_removing("config.json"):
        remove_hf_checkpoint(out)
    assert not out.exists()
    remove_half_written(tmp_path, "hf_step_*")
    assert [path.name for path in tmp_path.iterdir()] == ["reference"]
