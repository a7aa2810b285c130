"""Rotary frequencies against those of transformers."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gspo_megatron.backend.rope import rotary
from gspo_megatron.config import ConfigError

LLAMA_31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GPT_OSS = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DEEPSEEK = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
CASES = [
    (128, 500000.0, LLAMA_31),
    (64, 500000.0, LLAMA_31 | {"factor": 32.0}),
    (64, 150000.0, GPT_OSS),
    (128, 1000000.0, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    (64, 10000.0, DEEPSEEK),
    (64, 10000.0, GPT_OSS | {"attention_factor": 1.25}),
    (128, 10000.0, {"type": "linear", "factor": 2.5}),
]


@pytest.mark.parametrize("head_dim, theta, scaling", CASES)
def test_frequencies_are_those_of_transformers(head_dim, theta, scaling):
    published = {"rope_theta": theta, "rope_scaling": scaling, "max_position_embeddings": 131072}
    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=2, head_dim=head_dim, **published)
    expected, factor = ROPE_INIT_FUNCTIONS[scaling.get("rope_type") or scaling["type"]](config, torch.device("cpu"))
    for hf in (published, {"rope_parameters": scaling | {"rope_theta": theta}, "max_position_embeddings": 131072}):
        found = rotary(hf, head_dim)
        torch.testing.assert_close(found.inv_freq, expected, rtol=2e-6, atol=0)
        assert found.attention_factor == pytest.approx(factor, rel=1e-9) and found.fraction == 1.0


@pytest.mark.parametrize("theta, fraction", [(10000.0, 1.0), (1e6, 0.5)])
def test_the_default_kind_and_a_part_of_the_head(theta, fraction):
    hf = {"rope_theta": theta, "partial_rotary_factor": fraction, "max_position_embeddings": 4096}
    found = rotary(hf, 64)
    dim = int(64 * fraction)
    expected = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    assert found.inv_freq.tolist() == pytest.approx(expected, rel=1e-6) and found.attention_factor == 1.0
    assert rotary({"max_position_embeddings": 1}, 64, theta, fraction).inv_freq.tolist() == found.inv_freq.tolist()


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "longrope"}, "rope type 'longrope' is not supported"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' without a valid 'low_freq_factor'"),
        ({"rope_type": "yarn"}, "'yarn' without a valid 'factor'"),
    ],
)
def test_what_cannot_be_computed_is_refused(scaling, message):
    with pytest.raises(ConfigError, match=message):
        rotary({"rope_scaling": scaling, "max_position_embeddings": 4096}, 64)


def test_sharpened_scores_need_whole_heads():
    with pytest.raises(ConfigError, match="attention factor with a partial rotary"):
        rotary({"rope_scaling": GPT_OSS, "partial_rotary_factor": 0.5, "max_position_embeddings": 4096}, 64)
