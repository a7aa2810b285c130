"""DeepSeek-V2, DeepSeek-V3 and Kimi-K2 on real Megatron-Core: transformers' numbers, and weights that come out as they
went in."""

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from latent_runs import gspo_updates, proof
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "backend"))

import transformers_reference  # noqa: E402
from policy_runs import VOCABULARY, sequences  # noqa: E402

from gspo_megatron.model_files import read_model  # noqa: E402
from gspo_megatron.weights.families import FAMILIES  # noqa: E402
from gspo_megatron.weights.plan import hf_shapes  # noqa: E402
from gspo_megatron.weights.rules import ModelShape  # noqa: E402
from make_tiny_model import make_tiny_model  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

MODELS = {
    "deepseek_v3": {},
    "kimi_k2": {},
    "deepseek_v2": {},
    # V2-Lite: queries without a latent, no groups
    "deepseek_v2_lite": {
        "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "rope_parameters": {},
    },
}  # fmt: skip
SEQUENCES = [sequence for batch in sequences() for sequence in batch]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A dense layer and three with experts, so that each of two pipeline stages has other layers."""
    root, sizes = tmp_path_factory.mktemp("models"), {"vocab_size": VOCABULARY, "num_hidden_layers": 4}
    return {
        name: make_tiny_model(name.removesuffix("_lite"), root / name, 5, settings | sizes)
        for name, settings in MODELS.items()
    }


@pytest.fixture(scope="module")
def references(models, tmp_path_factory) -> dict[str, tuple[list[torch.Tensor], dict[str, torch.Tensor]]]:
    """Log-probs by response and gradients by HF name, of transformers in fp32."""
    found = {}
    for name, directory in models.items():
        # transformers has no class for kimi_k2, which is a deepseek_v3
        copy = tmp_path_factory.mktemp("reference") / name
        shutil.copytree(directory, copy)
        config = json.loads((copy / "config.json").read_text())
        config["model_type"] = {"DeepseekV2ForCausalLM": "deepseek_v2"}.get(config["architectures"][0], "deepseek_v3")
        (copy / "config.json").write_text(json.dumps(config))
        model = transformers_reference.load(copy)
        values = [transformers_reference.response_log_probs(model, *sequence, 1.0) for sequence in SEQUENCES]
        (sum(response.sum() for response in values) / len(values)).backward()
        gradients = {
            piece_name: piece
            for param_name, param in model.named_parameters()
            for piece_name, piece in transformers_reference._pieces(
                param_name, torch.zeros_like(param) if param.grad is None else param.grad
            )
        }
        found[name] = ([response.detach() for response in values], gradients)
    return found


LAYOUTS = [
    (1, {}),
    (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
    (4, {"tensor": 2, "context": 2, "expert": 2}),
    (2, {"pipeline": 2, "virtual_pipeline": 2}),
]


@pytest.mark.parametrize("world, layout", LAYOUTS, ids=str)
def test_log_probs_and_gradients_are_those_of_transformers_and_weights_come_out_bit_for_bit(
    models, references, world, layout
):
    ranks = run_ranks(proof, world, layout, [str(directory) for directory in models.values()])
    for index, (name, directory) in enumerate(models.items()):
        expected, gradients = references[name]
        found, file = ranks[0][index], load_file(directory / "model.safetensors")
        assert found["exported"].keys() == file.keys()
        for tensor, value in file.items():
            assert np.array_equal(found["exported"][tensor].view(np.int32), value.numpy().view(np.int32)), tensor
        for rank in ranks:
            for response, values in zip(rank[index]["responses"], expected, strict=True):
                np.testing.assert_allclose(response, values.numpy(), rtol=0, atol=1e-5, err_msg=name)
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        assert [rank[index]["norm"] for rank in ranks] == pytest.approx([norm] * world, rel=1e-5), name
        if "context" not in layout:  # otherwise each rank has the gradient of its part of the optimizer only
            _assert_gradients(found["gradients"], gradients, name)


def _assert_gradients(found: dict[str, np.ndarray], expected: dict[str, torch.Tensor], model: str) -> None:
    """Every tensor within 1e-4 of its norm. The rotary rows of kv_a_proj_with_mqa are what all heads share: with
    column-parallel down projections, as in Megatron's local spec, theirs would miss the other tensor ranks' heads."""
    largest = max(float(gradient.norm()) for gradient in expected.values())
    assert any("kv_a_proj_with_mqa" in name for name in expected)
    assert found.keys() - expected.keys() == {name for name in found if name.endswith("e_score_correction_bias")}
    for name, gradient in expected.items():
        distance = float((torch.from_numpy(found[name]) - gradient).norm())
        assert distance <= 1e-4 * float(gradient.norm()) + 1e-7 * largest, f"{model}: {name}"


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_gspo_trains_in_bf16_and_leaves_the_expert_bias_as_it_was_in_fp32(models, name):
    """Its bits come out as in the file, though bf16 would round them; all else is trained and comes out in bf16."""
    ranks = run_ranks(gspo_updates, 4, {"tensor": 2, "pipeline": 2, "expert": 2}, str(models[name]), "bf16")
    file, result = load_file(models[name] / "model.safetensors"), ranks[0]
    biases = [tensor for tensor in file if tensor.endswith("e_score_correction_bias")]
    assert len(biases) == (3 if name == "deepseek_v3" else 0)
    for bias in biases:
        assert not torch.equal(file[bias].bfloat16().float(), file[bias])
        for exported in (result["before"], result["after"]):
            assert exported[bias].dtype == np.float32 and np.array_equal(exported[bias], file[bias].numpy())
    for tensor in file.keys() - set(biases):
        assert np.array_equal(result["before"][tensor], file[tensor].bfloat16().view(torch.int16).numpy()), tensor
        assert result["after"][tensor].dtype == np.int16
    moved = [tensor for tensor in file if not np.array_equal(result["before"][tensor], result["after"][tensor])]
    for part in ("embed_tokens", "layers.0.mlp.up_proj", "layers.3.mlp.shared_experts.up_proj", "layers.3.mlp.gate"):
        assert f"model.{part}.weight" in moved
    first, second = result["metrics"]
    assert first["loss_count"] == 16 and first["ratio_min"] == first["ratio_max"] == 1.0
    assert second["ratio_min"] < 1.0 < second["ratio_max"]
    assert all(rank["norms"] == result["norms"] for rank in ranks) and result["norms"][0] > 0


FAULTS = [
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method: 'greedy'"),
    ("deepseek_v3", {"norm_topk_prob": False}, "not normalised"),
    ("deepseek_v3", {"num_experts_per_tok": 6}, "topk_group 2"),
    ("deepseek_v3", {"n_group": 3}, "n_group: 3"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: 2"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: True"),
    ("kimi_k2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
    ("kimi_k2", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling"),
]


@pytest.mark.parametrize("name, settings, message", FAULTS, ids=lambda value: str(value)[:40])
def test_what_a_config_asks_for_and_megatron_lacks_is_refused(models, tmp_path, name, settings, message):
    config = json.loads((models[name] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    assert read_model(models[name])[1] == []
    _, faults = read_model(tmp_path)
    assert len(faults) == 1 and message in faults[0]


@pytest.mark.parametrize("name, parameters", [("deepseek_v3", 671_026_419_200), ("kimi_k2", 1_026_408_232_448)])
def test_the_published_configs_fit_their_family(name, parameters):
    """All but the fp8 weights, for which there are bf16 copies; and the tables have as many elements as the models."""
    path = Path(__file__).parents[1] / "data_files" / "configs" / f"{name}.json"
    config = json.loads(path.read_text())
    family = FAMILIES[config["architectures"][0]]
    assert family.faults(config) == []
    assert sum(math.prod(size) for size in hf_shapes(family, ModelShape.from_hf(config)).values()) == parameters


def test_qwen3_next_is_refused_with_the_reason(tmp_path):
    config = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, faults = read_model(tmp_path)
    assert len(faults) == 1 and "flash-linear-attention" in faults[0] and "0.16.1" in faults[0]
