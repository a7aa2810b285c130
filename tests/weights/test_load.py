"""Loading: the right bytes in the right place, and whatever doesn't fit refused by its name."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from naive_layouts import places
from safetensors.torch import load_file, save_file

from gspo_megatron.config import ConfigError
from gspo_megatron.weights.families import FAMILIES
from gspo_megatron.weights.hf_files import HFReader, read_hf_config
from gspo_megatron.weights.load import check_files, load_parameters
from gspo_megatron.weights.plan import blocks_of
from gspo_megatron.weights.rules import ModelShape

FAMILY = FAMILIES["Qwen3MoeForCausalLM"]


@pytest.fixture
def checkpoint(tmp_path, tiny_qwen3_moe):
    """A copy of the tiny model that a test may spoil: (directory, its tensors)."""
    directory = shutil.copytree(tiny_qwen3_moe, tmp_path / "model")
    return directory, load_file(directory / "model.safetensors")


def check(directory, **changes):
    shape = replace(ModelShape.from_hf(read_hf_config(directory)), **changes)
    check_files(HFReader(directory), FAMILY, shape)


def empty_parameters(blocks, dtype) -> dict[str, torch.Tensor]:
    """NaN everywhere, in the shape that the blocks make up."""
    params = {}
    for name, parts in blocks.items():
        ends = torch.tensor([[low + size for low, size in zip(b.param_start, b.shape, strict=True)] for b in parts])
        params[name] = torch.full(ends.amax(0).tolist(), float("nan"), dtype=dtype)
    return params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 3])
def test_values_arrive_in_the_dtype_of_the_parameter(tiny_qwen3_moe, dtype, rank):
    reader, tensors = HFReader(tiny_qwen3_moe), load_file(tiny_qwen3_moe / "model.safetensors")
    shape = ModelShape.from_hf(read_hf_config(tiny_qwen3_moe))
    place = places(shape, 8, tensor=2, pipeline=2, expert=2)[rank]
    blocks = blocks_of(FAMILY, shape, place)
    params = empty_parameters(blocks, dtype)
    load_parameters(params, blocks, reader)
    for name, parts in blocks.items():
        assert not params[name].isnan().any()
        for block in parts:
            expected = block.of_hf(tensors[block.hf]).to(dtype)
            assert torch.equal(params[name][block.param_slices], expected)


def test_a_bf16_file_fills_fp32_parameters_exactly(checkpoint):
    directory, tensors = checkpoint
    save_file({name: t.bfloat16() for name, t in tensors.items()}, directory / "model.safetensors")
    shape = ModelShape.from_hf(read_hf_config(directory))
    blocks = blocks_of(FAMILY, shape, places(shape, 1)[0])
    params = empty_parameters(blocks, torch.float32)
    load_parameters(params, blocks, HFReader(directory))
    for name, hf in [("output_layer", "lm_head"), ("embedding.word_embeddings", "model.embed_tokens")]:
        assert torch.equal(params[f"{name}.weight"], tensors[f"{hf}.weight"].bfloat16().float())


def test_padding_of_the_vocabulary_is_zero(checkpoint):
    directory, tensors = checkpoint
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = tensors[name][:509].contiguous()
    save_file(tensors, directory / "model.safetensors")
    shape = replace(ModelShape.from_hf(read_hf_config(directory)), vocab=509)
    blocks = blocks_of(FAMILY, shape, places(shape, 2, tensor=2)[1])
    params = empty_parameters(blocks, torch.float32)
    load_parameters(params, blocks, HFReader(directory))
    assert params["output_layer.weight"].shape == (255, 64)
    assert torch.equal(params["output_layer.weight"][:254], tensors["lm_head.weight"][255:])
    assert (params["output_layer.weight"][254] == 0).all()


def test_a_sound_checkpoint_passes(tiny_qwen3_moe):
    check(tiny_qwen3_moe)


def test_missing_tensors_are_named(checkpoint):
    directory, tensors = checkpoint
    gone = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(7)]
    save_file({name: t for name, t in tensors.items() if name not in gone}, directory / "model.safetensors")
    with pytest.raises(ConfigError, match="7 tensors are missing: .*experts.0.up_proj.weight.* and 2 more") as error:
        check(directory)
    assert str(directory) in str(error.value) and len(error.value.faults) == 1


def test_unknown_tensors_are_named_and_empty_ones_ignored(checkpoint):
    directory, tensors = checkpoint
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, directory / "model.safetensors")
    check(directory)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match="1 tensors belong to no Qwen3MoeForCausalLM: .*0.self_attn.q_proj.bias"):
        check(directory)


def test_wrong_shapes_are_named_with_both_sizes(checkpoint):
    directory, tensors = checkpoint
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(64, 8)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers.0.mlp.gate.weight is \[64, 8\], not \[8, 64\]"):
        check(directory)


def test_all_kinds_of_faults_come_together(checkpoint):
    directory, tensors = checkpoint
    del tensors["model.norm.weight"]
    tensors |= {"extra": torch.ones(1), "lm_head.weight": torch.zeros(512, 63)}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        check(directory)
    assert len(error.value.faults) == 3
    for fault, name in zip(error.value.faults, ["model.norm.weight", "extra", "lm_head.weight"], strict=True):
        assert name in fault


def test_tied_embeddings_need_no_lm_head_and_take_one(checkpoint):
    directory, tensors = checkpoint
    check(directory, tied_embeddings=True)
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors")
    check(directory, tied_embeddings=True)
    with pytest.raises(ConfigError, match="lm_head.weight"):
        check(directory, tied_embeddings=False)


def test_a_config_with_more_experts_than_the_files(checkpoint):
    directory, _ = checkpoint
    config = json.loads((directory / "config.json").read_text()) | {"num_experts": 9}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="6 tensors are missing: model.layers.0.mlp.experts.8.down_proj.weight"):
        check(directory)


def test_table_and_model_must_agree(tiny_qwen3_moe):
    reader, shape = HFReader(tiny_qwen3_moe), ModelShape.from_hf(read_hf_config(tiny_qwen3_moe))
    blocks = blocks_of(FAMILY, shape, places(shape, 1)[0])
    params = empty_parameters(blocks, torch.float32)
    with pytest.raises(AssertionError, match=r"no table row fills \['adapter'\]"):
        load_parameters(params | {"adapter": torch.ones(1)}, blocks, reader)
    with pytest.raises(AssertionError, match=r"the model has no \['output_layer.weight'\]"):
        load_parameters({n: p for n, p in params.items() if n != "output_layer.weight"}, blocks, reader)
    with pytest.raises(AssertionError, match="output_layer.weight: 32768 of 32832 elements are filled"):
        load_parameters(params | {"output_layer.weight": torch.zeros(513, 64)}, blocks, reader)
