"""Hugging Face -> Megatron: Megatron's own loader reads what is written, on any layout, and so does the trainer."""

import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from gspo_megatron.checks import check_config
from gspo_megatron.config import Config, ModelConfig, RunConfig
from gspo_megatron.convert_to_megatron import Options
from make_tiny_model import make_tiny_model
from tests.convert.conversions import has_experts, to_megatron
from tests.convert.megatron_loads import differences, policy_tensors
from tests.ranks import run_ranks

LAYOUTS = {
    "one": (1, {}, {}),
    "tp2": (2, {"tensor": 2}, {}),
    "pp2ep2": (4, {"pipeline": 2, "expert": 2}, {"num_layers_in_first_pipeline_stage": 1}),
}
"""Ranks, layout and Megatron's settings to load with."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_and_the_trainer_load_what_is_written(conversions, layout):
    world, sizes, transformer = LAYOUTS[layout]
    cases = [case for case in conversions if has_experts(case[0]) or "expert" not in sizes]
    assert cases
    for found in run_ranks(differences, world, cases, sizes, transformer):
        assert [case[1:] for case in found] == [[]] * len(cases), found


def test_a_policy_starts_from_megatron_files(tmp_path):
    """On two pipeline stages, with a Hugging Face directory that has no weights."""
    hf = make_tiny_model("qwen3_moe", tmp_path / "hf")
    to_megatron([Options(hf, tmp_path / "megatron", tensor=2)])
    tensors = load_file(hf / "model.safetensors")
    (hf / "model.safetensors").unlink()
    found, _ = run_ranks(policy_tensors, 2, str(hf), str(tmp_path / "megatron"), {"pipeline": 2})
    assert found.keys() == tensors.keys()
    assert all((tensors[name].numpy() == value).all() for name, value in found.items())
    config = Config(model=ModelConfig(hf=str(hf), megatron=str(tmp_path / "megatron")))
    assert not [fault for fault in check_config(config) if fault.startswith("model.")]


def test_the_preflight_refuses_megatron_files_of_another_model(tmp_path):
    hf = make_tiny_model("qwen3_moe", tmp_path / "hf")
    to_megatron([Options(hf, tmp_path / "megatron")])
    other = make_tiny_model("qwen3_moe", tmp_path / "other", overrides={"num_hidden_layers": 3, "num_experts": 4})
    config = Config(model=ModelConfig(hf=str(other), megatron=str(tmp_path / "megatron")))
    faults = [fault for fault in check_config(config) if fault.startswith("model.")]
    assert len(faults) == 2 and all("checkpoint of another model" in fault for fault in faults)
    assert "15 parameters are missing, first decoder.layers.2." in faults[0] and "[8, 64]" in faults[1]
    config = Config(model=ModelConfig(hf=str(hf), megatron=str(tmp_path)))
    (fault,) = [fault for fault in check_config(config) if fault.startswith("model.")]
    assert "has no .metadata" in fault


def test_the_preflight_refuses_another_config_of_the_same_sizes(tmp_path):
    """Names and shapes fit, and the model computes something else: the rotary base, experts a token."""
    hf = make_tiny_model("qwen3_moe", tmp_path / "hf")
    to_megatron([Options(hf, tmp_path / "megatron")])
    values = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(values | {"rope_theta": 5.0, "num_experts_per_tok": 1}))
    config = Config(model=ModelConfig(hf=str(hf), megatron=str(tmp_path / "megatron")))
    first, second = [fault for fault in check_config(config) if fault.startswith("model.")]
    assert first.startswith(f"model.hf: {hf}/config.json has num_experts_per_tok = 1, but model.megatron: ")
    assert "rope_theta = 5.0, but" in second and "run.allow_changed" in second
    allowed = replace(config, run=RunConfig(allow_changed=("model.hf",)))
    assert not [fault for fault in check_config(allowed) if fault.startswith("model.")]
