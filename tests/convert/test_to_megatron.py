"""Hugging Face -> Megatron: Megatron's own loader reads what is written, on any layout, and so does the trainer."""

import pytest
from safetensors.torch import load_file

from gspo_megatron.checks import check_config
from gspo_megatron.config import Config, ModelConfig
from gspo_megatron.convert_to_megatron import Options
from gspo_megatron.weights.hf_files import read_hf_config
from gspo_megatron.weights.rules import ModelShape
from make_tiny_model import FAMILIES as TINY
from make_tiny_model import make_tiny_model
from tests.convert.conversions import to_megatron
from tests.convert.megatron_loads import differences, policy_tensors
from tests.ranks import run_ranks

LAYOUTS = {
    "one": (1, {}, {}),
    "tp2": (2, {"tensor": 2}, {}),
    "pp2ep2": (4, {"pipeline": 2, "expert": 2}, {"num_layers_in_first_pipeline_stage": 1}),
}
"""Ranks, layout and Megatron's settings to load with."""
CUTS = {"one": {}, "tp2pp2ep2": dict(tensor=2, pipeline=2, expert=2), "etp2": dict(expert_tensor=2, tensor=2)}
"""Layouts to write for."""


def has_experts(directory) -> bool:
    return ModelShape.from_hf(read_hf_config(directory)).num_experts > 0


@pytest.fixture(scope="module")
def conversions(tmp_path_factory) -> list[tuple[str, str]]:
    """(Hugging Face, Megatron) directories of all families, tied and not, in all cuts: three layers and 513 tokens, so
    that neither can be cut into equal parts."""
    root = tmp_path_factory.mktemp("conversions")
    settings = {"num_hidden_layers": 3, "vocab_size": 513}
    models = {family: make_tiny_model(family, root / family, overrides=settings) for family in TINY}
    tied = settings | {"tie_word_embeddings": True}
    models["qwen3_tied"] = make_tiny_model("qwen3", root / "qwen3_tied", overrides=tied)
    options = [
        Options(hf, root / f"{name}-{cut}", **sizes)
        for name, hf in models.items()
        for cut, sizes in CUTS.items()
        if has_experts(hf) or "expert" not in sizes
    ]
    to_megatron(options)
    return [(str(each.hf), str(each.megatron)) for each in options]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_and_the_trainer_load_what_is_written(conversions, layout):
    world, sizes, transformer = LAYOUTS[layout]
    cases = [case for case in conversions if has_experts(case[0]) or "expert" not in sizes]
    assert len(cases) >= len(CUTS)
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
