"""What is broken, missing, foreign or in the way is refused by its name; nothing is lost, and nothing half-written
left."""

import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_megatron import convert_to_hf, convert_to_megatron
from gspo_megatron.config import ConfigError
from gspo_megatron.convert import verify
from gspo_megatron.weights.hf_files import HFReader
from make_tiny_model import make_tiny_model
from tests.convert.conversions import hashes, leftovers, to_hf, to_megatron, to_megatron_here, tool


def sharded(directory: Path) -> None:
    """Cut the model into two shards with an index."""
    tensors = sorted(load_file(directory / "model.safetensors").items())
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate((tensors[:30], tensors[30:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file(dict(part), directory / file, metadata={"format": "pt"})
        weight_map |= {name: file for name, _ in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def edit_config(directory: Path, **values) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


class Touch:
    """A pickle that makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


HF_FAULTS = {
    "missing shard": (lambda d: (d / "model-00002-of-00002.safetensors").unlink(), "index names model-00002.*missing"),
    "truncated shard": (lambda d: truncate(d / "model-00002-of-00002.safetensors"), "00002.* can't be read: truncated"),
    "index of another": (
        lambda d: save_file({"x": torch.ones(1)}, d / "model-00001-of-00002.safetensors"),
        "is not in",
    ),
    "shard elsewhere": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}'),
        "lies outside the directory",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "wrong sizes": (lambda d: edit_config(d, hidden_size=32), "another shape than config.json says"),
    "wrong depth": (lambda d: edit_config(d, num_hidden_layers=3), "tensors are missing: model.layers.2"),
    "wrong kind": (lambda d: edit_config(d, architectures=["BertModel"]), "BertModel is not supported"),
    "pickle": (
        lambda d: (d / "model-00001-of-00002.safetensors").write_bytes(pickle.dumps(Touch(d / "touched"))),
        "can't be read: no safetensors file",
    ),
}


@pytest.mark.parametrize("fault", HF_FAULTS)
def test_a_broken_hugging_face_checkpoint(hf, tmp_path, fault):
    sharded(hf)
    spoil, message = HF_FAULTS[fault]
    spoil(hf)
    with pytest.raises(ConfigError, match=message) as error:
        to_megatron_here(hf, tmp_path / "out")
    assert all(line.startswith("--hf: ") for line in error.value.faults)
    assert leftovers(tmp_path, "hf") == [] and not (hf / "touched").exists()


def test_pickles_in_place_of_safetensors(hf, tmp_path):
    (hf / "model.safetensors").rename(hf / "pytorch_model.bin")
    (hf / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    with pytest.raises(ConfigError, match="give a safetensors checkpoint"):
        to_megatron_here(hf, tmp_path / "out")
    assert leftovers(tmp_path, "hf") == []


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"tensor": 3}, "--tp 3 .*cut into 3 equal"),
        ({"expert": 3}, "--ep 3: the model has 8"),
        ({"pipeline": 3}, "--pp 3"),
    ],
)
def test_a_layout_that_does_not_fit(hf, tmp_path, sizes, message):
    with pytest.raises(ConfigError, match=message):
        to_megatron_here(hf, tmp_path / "out", **sizes)
    assert leftovers(tmp_path, "hf") == []


def spoil_metadata(directory: Path) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(Touch(directory / "touched")))


def spoil_chunk(directory: Path) -> None:
    """A chunk's own pickle that opens a file."""
    file = max(directory.glob("__0_1.distcp"))
    data, good = file.read_bytes(), b"ctorch._utils\n_rebuild_tensor_v2\n"
    assert good in data
    file.write_bytes(
        data.replace(good, b"cbuiltins\nopen\n" + b"0cbuiltins\nopen\n"[: len(good) - 15].ljust(len(good) - 15))
    )


MEGATRON_FAULTS = {
    "no metadata": (lambda d: (d / ".metadata").unlink(), "has no .metadata"),
    "cut metadata": (lambda d: truncate(d / ".metadata"), ".metadata can't be read"),
    "code in the metadata": (spoil_metadata, "names (_io|io|builtins).open, which no checkpoint needs; not loaded"),
    "missing file": (lambda d: (d / "__1_0.distcp").unlink(), "names __1_0.distcp, which is missing"),
    "truncated file": (lambda d: truncate(d / "__1_0.distcp"), "__1_0.distcp is truncated"),
    "code in a chunk": (spoil_chunk, "names builtins.open, which no tensor needs; not loaded"),
    "zeros": (lambda d: (d / "__1_0.distcp").write_bytes(bytes((d / "__1_0.distcp").stat().st_size)), "can't be read"),
    "of another size": (lambda d: edit_config(d / "hf", moe_intermediate_size=16), "another model.*config.json"),
    "of other layers": (
        lambda d: edit_config(d / "hf", num_hidden_layers=2),
        "of 3 layers|belong to no Qwen3Moe.*first decoder.layers.2",
    ),
    "of another family": (
        lambda d: edit_config(d / "hf", architectures=["Qwen3ForCausalLM"]),
        "are missing.*another model",
    ),
    "no reference": (lambda d: shutil.rmtree(d / "hf"), "--hf-reference: .* came without config.json"),
}


@pytest.mark.parametrize("fault", MEGATRON_FAULTS)
def test_a_broken_or_foreign_megatron_checkpoint(megatron, tmp_path, fault):
    spoil, message = MEGATRON_FAULTS[fault]
    spoil(megatron)
    with pytest.raises(ConfigError, match=message):
        to_hf(megatron, tmp_path / "out")
    assert leftovers(tmp_path, "megatron", ".out.partial") == [] and not (megatron / "touched").exists()
    kept = list((tmp_path / ".out.partial").glob("*.safetensors*")) if (tmp_path / ".out.partial").exists() else []
    assert kept == []


LARGEST_FILE = 150_000
"""Bytes: more than some files of the conversion, less than others."""


def with_a_full_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))


@pytest.mark.slow
def test_a_disk_that_is_full_half_way_and_going_on_after(hf, tmp_path):
    arguments = ("--hf", hf, "--megatron", tmp_path / "mg", "--ep", 2, "--pp", 2, "--verify")
    failed = tool("convert_hf_to_megatron", *arguments, preexec_fn=with_a_full_disk)
    assert failed.returncode == 2, failed.stderr
    assert "--megatron: " in failed.stderr and "File too large; make room and start again to go on" in failed.stderr
    finished = list((tmp_path / ".mg.partial").glob("*.distcp"))
    assert finished and leftovers(tmp_path, "hf") == [".mg.partial"]
    assert not list((tmp_path / ".mg.partial").glob("*.writing"))
    times = {file.name: file.stat().st_mtime_ns for file in finished}
    went_on = tool("convert_hf_to_megatron", *arguments)
    assert went_on.returncode == 0, went_on.stderr
    assert f"({len(finished)} were there from an earlier start)" in went_on.stdout
    assert {name: (tmp_path / "mg" / name).stat().st_mtime_ns for name in times} == times
    to_hf(tmp_path / "mg", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(hf)
    assert leftovers(tmp_path, "hf", "mg", "back") == []


@pytest.fixture
def interrupted(megatron, tmp_path, monkeypatch):
    """A conversion to tmp_path/back in shards that was interrupted in the third one; what writes shards since."""
    write, written = convert_to_hf._Plan.write_shard, []

    def stop_in_the_third(plan, file, name, advance):
        if len(written) == 2:
            file.write(b"half of")
            raise KeyboardInterrupt
        written.append(name)
        return write(plan, file, name, advance)

    monkeypatch.setattr(convert_to_hf._Plan, "write_shard", stop_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        to_hf(megatron, tmp_path / "back", shard_bytes=100_000)
    again = []
    monkeypatch.setattr(
        convert_to_hf._Plan, "write_shard", lambda plan, *args: (again.append(args[1]), write(plan, *args))[1]
    )  # fmt: skip
    return written, again


def test_going_on_writes_only_what_is_not_finished(interrupted, megatron, tmp_path):
    written, again = interrupted
    partial = tmp_path / ".back.partial"
    (partial / "model-00003-of-00011.safetensors").write_bytes(b"no note says that this is finished")
    (partial / "x.safetensors.writing").write_bytes(b"killed")
    truncate(partial / written[1])
    to_hf(megatron, tmp_path / "back", shard_bytes=100_000, verify=True)
    assert written[0] not in again and written[1] in again
    to_hf(megatron, tmp_path / "anew", verify=True)
    assert hashes(tmp_path / "back") == hashes(tmp_path / "anew")
    assert leftovers(tmp_path, "megatron", "back", "anew") == []
    assert not [file for file in (tmp_path / "back").iterdir() if "done" in file.name or "writing" in file.name]


def test_a_start_with_other_settings_begins_anew(interrupted, megatron, tmp_path):
    written, again = interrupted
    to_hf(megatron, tmp_path / "back", shard_bytes=100_000, dtype="bf16", verify=True)
    assert len(again) == len(list((tmp_path / "back").glob("*.safetensors"))) != len(written)
    assert not [file for file in (tmp_path / "back").iterdir() if file.name in written]
    assert {kind for kind, _, _ in hashes(tmp_path / "back").values()} == {"torch.bfloat16"}


@pytest.mark.parametrize("value", [1e6, float("inf"), float("nan")])
def test_what_fp16_cannot_hold_is_refused(hf, tmp_path, value):
    """A cast would make it infinite without a word, and --verify would find the same in what was written."""
    tensors = load_file(hf / "model.safetensors")
    to_megatron([convert_to_megatron.Options(hf, tmp_path / "good", dtype="fp16", verify=True)])
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors[name][5, 7] = value
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    message = f"--dtype fp16: {name} has values beyond 65504"
    with pytest.raises(RuntimeError, match=message):
        to_megatron([convert_to_megatron.Options(hf, tmp_path / "half", dtype="fp16")])
    to_megatron([convert_to_megatron.Options(hf, tmp_path / "whole", verify=True)])
    with pytest.raises(ConfigError, match=message):
        to_hf(tmp_path / "whole", tmp_path / "back", dtype="fp16")
    assert not (tmp_path / "half").exists() and not (tmp_path / "back").exists()


def test_the_directory_of_checkpoints_in_place_of_one(megatron, tmp_path):
    """What to give instead is said, not that config.json is missing."""
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="--megatron: .*checkpoints has no .metadata.*; give a whole torch_dist"):
        to_hf(tmp_path / "checkpoints", tmp_path / "out")
    step = megatron.rename(tmp_path / "checkpoints" / "step_3")
    with pytest.raises(ConfigError, match=f"--megatron: .*checkpoints has no .metadata.*; give one, say {step}"):
        to_hf(tmp_path / "checkpoints", tmp_path / "out")


def test_a_config_that_changed_between_starts_begins_anew(interrupted, megatron, tmp_path):
    """What was written by the old one is not what the new one asks for, though no tensor's file has changed."""
    written, again = interrupted
    edit_config(megatron / "hf", rms_norm_eps=0.5)
    to_hf(megatron, tmp_path / "back", shard_bytes=100_000)
    assert set(written) < set(again)


def test_a_setting_that_the_model_is_not_built_with_is_named_by_its_option(hf, tmp_path):
    edit_config(hf, rope_parameters={"rope_type": "martian", "rope_theta": 1e6})
    with pytest.raises(RuntimeError, match="ConfigError: --hf: rope type 'martian' is not supported"):
        to_megatron([convert_to_megatron.Options(hf, tmp_path / "out")])
    assert leftovers(tmp_path, "hf") == []


def test_verification_sees_one_wrong_bit(hf, tmp_path):
    other = Path(shutil.copytree(hf, tmp_path / "other"))
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    source, written = HFReader(hf), HFReader(other)
    dtypes = dict.fromkeys(sorted(source.names), torch.float32)
    with pytest.raises(ConfigError, match="--verify: .* is not in what was written as it was in the source"):
        verify(source, written, dtypes, list(dtypes), lambda number: None)


def test_the_tools_say_what_is_wrong_and_exit_with_2(tmp_path):
    hf = make_tiny_model("qwen3", tmp_path / "hf")
    (hf / "config.json").write_text("{")
    (tmp_path / ".metadata").write_bytes(b"")
    for name, arguments in (
        ("convert_hf_to_megatron", ("--hf", hf, "--megatron", tmp_path / "out")),
        ("convert_megatron_to_hf", ("--megatron", tmp_path, "--hf", tmp_path / "out", "--hf-reference", hf)),
    ):
        done = tool(name, *arguments)
        assert done.returncode == 2 and done.stderr.startswith("error: --hf") and "is not JSON" in done.stderr
        assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()
