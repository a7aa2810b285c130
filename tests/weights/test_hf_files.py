"""Checkpoint directories: what is broken is refused by name."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from gspo_megatron.config import ConfigError
from gspo_megatron.weights.hf_files import INDEX, SINGLE, HFReader, read_hf_config, torch_dtype
from gspo_megatron.weights.hf_writer import write_hf_checkpoint
from tests.weights.hf_directories import make_reference, random_tensors


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "neither model.safetensors.index.json nor model.safetensors; give a safetensors checkpoint"),
        (
            {"pytorch_model.bin": b"\x80\x02"},
            "give a safetensors checkpoint; pytorch_model.bin is a pickle, which is never",
        ),
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


def test_a_file_in_place_of_a_directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model.hf: .*config.json can't be read .Not a directory"):
        read_hf_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    "header, message",
    [
        ('"a": [0, 4], "b": [0, 4]', "b begins at byte .*, where the tensor before it ends"),
        ('"a": [0, 4], "b": [8, 12]', "b begins at byte .*, where the tensor before it ends"),
        ('"a": [0, 4], "b": [0, 4], "c": [8, 12]', "b begins at byte .*, where the tensor before it ends"),
        ('"a": [4, 8]', "a begins at byte .*, where the tensor before it ends"),
        ('"a": [0, 4], "a": [4, 8]', "a comes twice"),
    ],
)
def test_tensors_that_share_bytes_or_a_name(tmp_path, header, message):
    """Each by itself is whole, and the file ends where its header says."""
    entry = re.sub(r": (\[.*?\])", r': {"dtype": "F32", "shape": [1], "data_offsets": \1}', header)
    size = max(int(number) for number in re.findall(r"\d+", header))
    text = f"{{{entry}}}".encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(ConfigError, match=message):
        HFReader(tmp_path)


@pytest.mark.parametrize("kept", [4, 30, -1])
def test_a_truncated_file_is_refused(tmp_path, kept):
    save_file(random_tensors(), tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:kept])
    with pytest.raises(ConfigError, match=f"model.hf: {tmp_path / SINGLE} can't be read"):
        HFReader(tmp_path)


def test_a_truncated_shard_is_refused_when_it_is_opened(tmp_path):
    reference = make_reference(tmp_path / "reference")
    out = write_hf_checkpoint(random_tensors().items(), tmp_path / "out", reference, 300)
    shard = out / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    reader = HFReader(out)
    assert reader.shape("t0") == (4, 8)
    with pytest.raises(ConfigError, match="model-00002-of-00004.safetensors can't be read"):
        reader.shape("t2")


def test_an_index_that_names_a_tensor_no_shard_holds(tmp_path):
    reference = make_reference(tmp_path / "reference")
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
