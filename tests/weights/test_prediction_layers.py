"""Multi-token-prediction layers go from the checkpoint that was trained to the one that is written, or are left out."""

import json

import pytest
import torch
from safetensors.torch import load_file

from gspo_megatron.model_files import read_model, weight_faults
from gspo_megatron.weights.families import FAMILIES
from gspo_megatron.weights.hf_writer import write_hf_checkpoint
from gspo_megatron.weights.plan import hf_shapes
from gspo_megatron.weights.prediction_layers import PredictionLayers
from make_tiny_model import make_tiny_model

FAMILY = {"deepseek_v3": "DeepseekV3ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}


@pytest.fixture(scope="module", params=FAMILY)
def checkpoint(request, tmp_path_factory):
    """(directory with 2 layers and 1 that predicts, architecture)"""
    directory = tmp_path_factory.mktemp(request.param) / "model"
    return make_tiny_model(request.param, directory, 1, {"num_nextn_predict_layers": 1}), FAMILY[request.param]


def trained(directory, architecture) -> dict[str, torch.Tensor]:
    """What a policy exports after some training: the model's tensors in bf16, none as it was."""
    info, faults = read_model(directory)
    assert faults == [] and weight_faults(directory, info) == []
    tensors = load_file(directory / "model.safetensors")
    return {name: (tensors[name] + 1).bfloat16() for name in hf_shapes(FAMILIES[architecture], info.shape)}


def test_kept_layers_are_those_of_the_start_with_the_trained_embedding_and_output_layer(checkpoint, tmp_path):
    directory, architecture = checkpoint
    policy, source = trained(directory, architecture), load_file(directory / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in policy.items()}
    out = write_hf_checkpoint(policy.items(), tmp_path / "out", directory, shapes=shapes, prediction_layers="keep")
    written = load_file(out / "model.safetensors")
    assert written.keys() == source.keys()
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    for name, tensor in written.items():
        if name in policy:
            assert torch.equal(tensor, policy[name])
        elif (copy := name.removeprefix("model.layers.2.")) in copies:
            assert torch.equal(tensor, policy[copies[copy]])
        else:
            assert tensor.dtype == source[name].dtype and torch.equal(tensor, source[name])
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert weight_faults(out, read_model(out)[0]) == []


def test_dropped_layers_are_not_in_config_json_either(checkpoint, tmp_path):
    directory, architecture = checkpoint
    policy = trained(directory, architecture)
    out = write_hf_checkpoint(policy.items(), tmp_path / "out", directory, prediction_layers="drop")
    assert load_file(out / "model.safetensors").keys() == policy.keys()
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert weight_faults(out, read_model(out)[0]) == []


def test_ranks_share_the_work_and_each_copy_goes_with_what_it_is_a_copy_of(checkpoint):
    layers = PredictionLayers(checkpoint[0])
    first = [("model.norm.weight", torch.ones(1)), ("lm_head.weight", torch.ones(2))]
    shares = [list(layers.added_to(first if rank == 0 else [], rank, 3)) for rank in range(3)]
    names = [name for share in shares for name, _ in share]
    assert len(names) == len(set(names))
    assert set(names) - {name for name, _ in first} == layers.shapes.keys() - {"model.layers.2.embed_tokens.weight"}
    assert "model.layers.2.shared_head.head.weight" in [name for name, _ in shares[0]]
    assert max(len(share) for share in shares[1:]) - min(len(share) for share in shares[1:]) <= 1


@pytest.mark.parametrize("lacking", ["layers", "weights"])
def test_what_the_start_does_not_have_is_not_promised(tmp_path, lacking):
    directory = make_tiny_model("deepseek_v3", tmp_path / "model")
    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    if lacking == "weights":
        (directory / "model.safetensors").unlink()
    out = write_hf_checkpoint(tensors.items(), tmp_path / "out", directory, prediction_layers="keep")
    assert load_file(out / "model.safetensors").keys() == tensors.keys()
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
