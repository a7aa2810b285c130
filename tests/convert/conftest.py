"""All families, converted once for all tests."""

import shutil
from pathlib import Path

import pytest

from gspo_megatron.convert_to_megatron import Options
from make_tiny_model import FAMILIES as TINY
from make_tiny_model import make_tiny_model
from tests.convert.conversions import has_experts, to_megatron

CUTS = {"one": {}, "tp2pp2ep2": dict(tensor=2, pipeline=2, expert=2), "etp2": dict(expert_tensor=2, tensor=2)}
"""Layouts to write for."""


@pytest.fixture(scope="session")
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


@pytest.fixture
def hf(tmp_path, tiny_qwen3_moe) -> Path:
    """A Qwen3-MoE checkpoint that a test may spoil."""
    return Path(shutil.copytree(tiny_qwen3_moe, tmp_path / "hf"))


@pytest.fixture
def megatron(tmp_path, conversions) -> Path:
    """A converted Qwen3-MoE that a test may spoil."""
    source = next(megatron for _, megatron in conversions if megatron.endswith("qwen3_moe-tp2pp2ep2"))
    return Path(shutil.copytree(source, tmp_path / "megatron"))
