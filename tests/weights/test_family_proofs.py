"""Every family: transformers' model -> ours on TP2 x PP2 x EP2 -> the same logits and gradients -> the same tensors."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from family_runs import VOCABULARY, prove, response_log_probs
from safetensors.torch import load_file

from make_tiny_model import make_tiny_model
from tests.backend.policy_runs import sequences
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

LAYOUT = {"tensor": 2, "pipeline": 2}
COMMON = {"num_hidden_layers": 4, "vocab_size": VOCABULARY}
"""Stages of two layers; an odd vocabulary, so that tensor ranks need padding."""
CASES = {
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2_moe": {"mlp_only_layers": [2], "num_experts": 4},
    "qwen3": {},
    "qwen3_moe": {"decoder_sparse_step": 2, "num_experts": 4},
    "llama": {},
    "mixtral": {"num_key_value_heads": 1, "num_local_experts": 4},
    "glm4_moe": {},
    "gpt_oss": {"num_local_experts": 4},
    "deepseek_v2": {},
    "deepseek_v3": {},
}
"""Family -> what its tiny checkpoint has otherwise; fewer key-value heads than tensor ranks among them. Few experts, so
that each gets tokens."""

MIXTURES = ("mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3")
"""Those with experts, besides the ones that say so."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: make_tiny_model(family, root / family, 3, COMMON | changes) for family, changes in CASES.items()}


@pytest.fixture(scope="module")
def proofs(checkpoints, tmp_path_factory) -> dict[str, tuple[dict, dict]]:
    """Family -> what rank 0 and the last rank found; mixtures of experts with two expert-parallel ranks."""
    found = {}
    for layout, is_moe in ((LAYOUT, False), (LAYOUT | {"expert": 2}, True)):
        families = [family for family in checkpoints if ("moe" in family or family in MIXTURES) == is_moe]
        directories = [str(checkpoints[family]) for family in families]
        ranks = run_ranks(prove, 4, layout, directories, str(tmp_path_factory.mktemp("saved")), timeout_s=400)
        found |= {family: (ranks[0][i], ranks[-1][i]) for i, family in enumerate(families)}
    return found


@pytest.fixture(scope="module", params=CASES)
def case(request, checkpoints, proofs):
    """(directory, rank 0's findings, the last rank's) of a family."""
    return checkpoints[request.param], *proofs[request.param]


def test_logits_are_those_of_transformers(case):
    directory, _, last = case
    model = load(directory)
    for batch, found in zip(sequences(VOCABULARY), last["logits"], strict=True):
        start = 0
        for prompt, response in batch:
            tokens = torch.tensor([[*prompt, *response]])
            expected = model(tokens).logits[0].detach().numpy()
            np.testing.assert_allclose(found[start : start + len(expected)], expected, atol=1e-4, rtol=0)
            start += len(expected)


def test_what_is_exported_is_what_was_loaded(case):
    directory, first, _ = case
    expected = load_file(directory / "model.safetensors")
    assert first["exported"].keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(first["exported"][name], tensor.numpy(), err_msg=name)
    assert first["dtypes"] == first["specs"] == {name: "torch.float32" for name in expected}


def test_gradients_are_those_of_transformers(case, tmp_path):
    directory, first, _ = case
    expected = reference_gradients(directory, tmp_path)
    assert first["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(1.0, float(gradient.abs().max()))
        np.testing.assert_allclose(first["gradients"][name] / scale, gradient.numpy() / scale, atol=1e-4, err_msg=name)
    trained = [gradient for name, gradient in expected.items() if not name.endswith("e_score_correction_bias")]
    norm = torch.stack([gradient.double().norm() for gradient in trained]).norm()
    assert first["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_updates_change_all_that_is_trained(case):
    _, first, last = case
    for before, after in (("exported", "updated"), ("updated", "after_gspo")):
        same = [name for name, tensor in first[before].items() if np.array_equal(tensor, first[after][name])]
        untrained = [name for name in same if not name.endswith("e_score_correction_bias")]
        assert untrained == [], f"{after} as {before}"
        assert all(np.isfinite(tensor).all() for tensor in first[after].values())
    assert 0 < first["gspo_grad_norm"] == last["gspo_grad_norm"] < 1e4


def test_a_checkpoint_brings_all_of_it_back(case):
    _, first, _ = case
    assert first["loaded"].keys() == first["after_gspo"].keys()
    for name, tensor in first["after_gspo"].items():
        np.testing.assert_array_equal(first["loaded"][name], tensor, err_msg=name)


@pytest.mark.parametrize(
    "world, layout",
    [
        (4, {"context": 2, "expert": 2, "tensor": 2}),
        (2, {"pipeline": 2, "virtual_pipeline": 2}),
        (4, {"tensor": 4, "expert": 4}),
    ],
    ids=str,
)
def test_other_layouts_give_the_same_log_probs(checkpoints, world, layout):
    """Families with most of their own: sliding windows and sinks cut over context ranks, dense first layers on virtual
    stages, more tensor ranks than key-value heads."""
    families = ("gpt_oss", "glm4_moe")
    ranks = run_ranks(response_log_probs, world, layout, [str(checkpoints[family]) for family in families])
    for index, family in enumerate(families):
        model = load(checkpoints[family])
        pairs = [pair for batch in sequences(VOCABULARY) for pair in batch]
        for results in ranks:
            for (prompt, response), found in zip(pairs, results[index], strict=True):
                expected = log_probs(model, prompt, response).detach().numpy()
                np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_bf16_keeps_a_routers_bias_in_fp32(checkpoints, tmp_path):
    first = run_ranks(prove, 2, {"expert": 2}, [str(checkpoints["glm4_moe"])], str(tmp_path), "bf16")[0][0]
    tensors = load_file(checkpoints["glm4_moe"] / "model.safetensors")
    kept = {name for name in tensors if name.endswith("e_score_correction_bias")}
    assert len(kept) == 3
    for name, tensor in tensors.items():
        assert first["dtypes"][name] == first["specs"][name] == ("torch.float32" if name in kept else "torch.bfloat16")
        expected = tensor if name in kept else tensor.bfloat16().float()
        np.testing.assert_array_equal(first["exported"][name], expected.numpy(), err_msg=name)
        if name in kept:  # after forward passes, two updates and a checkpoint
            np.testing.assert_array_equal(first["loaded"][name], tensor.numpy(), err_msg=name)
            assert (tensor.bfloat16().float() != tensor).any()


def load(directory: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def reference_gradients(directory: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Of the mean over sequences of summed log-probs, by file names: transformers itself saves them as it saves
    weights."""
    model, total, count = load(directory), 0.0, 0
    for batch in sequences(VOCABULARY):
        for prompt, response in batch:
            total = total + log_probs(model, prompt, response).sum()
            count += 1
    (total / count).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    model.save_pretrained(scratch)
    return load_file(scratch / "model.safetensors")


def log_probs(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    """[R] nats, with gradient."""
    tokens = torch.tensor([[*prompt, *response]])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
