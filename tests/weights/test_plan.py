"""Which rank owns what: every element once, on any layout."""

from dataclasses import replace

import numpy as np
import pytest
from naive_layouts import TINY, places, random_case
from safetensors.torch import load_file

from gspo_megatron.weights.families import FAMILIES
from gspo_megatron.weights.hf_files import read_hf_config
from gspo_megatron.weights.plan import blocks_of, hf_shapes, owned_blocks
from gspo_megatron.weights.rules import ModelShape
from make_tiny_model import make_tiny_model

MOE, DENSE = FAMILIES["Qwen3MoeForCausalLM"], FAMILIES["Qwen3ForCausalLM"]
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family, architecture", [("qwen3_moe", MOE), ("qwen3", DENSE)])
def test_shapes_are_those_of_a_real_checkpoint(tmp_path, family, architecture, tied):
    settings = {"tie_word_embeddings": tied, "num_key_value_heads": 1, "head_dim": 24, "num_hidden_layers": 3}
    directory = make_tiny_model(family, tmp_path, overrides=settings)
    files = {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}
    assert hf_shapes(architecture, ModelShape.from_hf(read_hf_config(directory))) == files


@pytest.mark.parametrize("seed", range(60))
def test_owned_blocks_cover_every_element_once(seed):
    shape, ranks = random_case(seed)
    family = MOE if shape.num_experts else DENSE
    counts = {name: np.zeros(size, dtype=int) for name, size in hf_shapes(family, shape).items()}
    for place in ranks:
        for block in owned_blocks(family, shape, place):
            counts[block.hf][block.hf_slices] += 1
    assert {name: (count.min(), count.max()) for name, count in counts.items()} == dict.fromkeys(counts, (1, 1))


@pytest.mark.parametrize("seed", range(60))
def test_blocks_fill_every_parameter_without_overlap(seed):
    shape, ranks = random_case(seed)
    family = MOE if shape.num_experts else DENSE
    for place in ranks[:: max(1, len(ranks) // 6)]:
        for param, blocks in blocks_of(family, shape, place).items():
            ends = [[low + size for low, size in zip(b.param_start, b.shape, strict=True)] for b in blocks]
            counts = np.zeros(np.max(ends, axis=0), dtype=int)
            for block in blocks:
                assert block.param == param
                counts[block.param_slices] += 1
            assert (counts == 1).all(), param


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_holds_what_the_owner_holds(seed):
    """Ranks that differ only in the replica they are give the same blocks to load; only replica 0 sends them."""
    shape, ranks = random_case(seed)
    family = MOE if shape.num_experts else DENSE
    for place in ranks[:: max(1, len(ranks) // 6)]:
        owner = replace(place, dense_replica=0, expert_replica=0)
        assert blocks_of(family, shape, place) == blocks_of(family, shape, owner)
        silent = replace(place, dense_replica=1, expert_replica=1)
        assert owned_blocks(family, shape, silent) == [] != owned_blocks(family, shape, owner)


@pytest.mark.parametrize("pipeline", [1, 3])
def test_tied_embeddings_are_kept_twice_and_sent_once(pipeline):
    shape = replace(TINY, tied_embeddings=True)
    ranks = places(shape, 2 * pipeline, tensor=2, pipeline=pipeline)
    assert "lm_head.weight" not in hf_shapes(MOE, shape)
    first, last = blocks_of(MOE, shape, ranks[1]), blocks_of(MOE, shape, ranks[-1])
    assert OUTPUT not in first and EMBEDDING in first
    if pipeline == 1:
        assert OUTPUT not in last
    else:
        as_embedding = [block._replace(param=EMBEDDING) for block in last[OUTPUT]]
        assert EMBEDDING not in last and as_embedding == first[EMBEDDING]
    sent = [b for place in ranks for b in owned_blocks(MOE, shape, place) if b.hf == "model.embed_tokens.weight"]
    assert {block.param for block in sent} == {EMBEDDING}
    assert sorted((block.hf_start, block.shape) for block in sent) == [((0, 0), (7, 8)), ((7, 0), (6, 8))]


def test_untied_last_stage_has_its_own_output_layer():
    last = places(TINY, 3, pipeline=3)[-1]
    blocks = blocks_of(MOE, TINY, last)
    assert [block.hf for block in blocks[OUTPUT]] == ["lm_head.weight"]
    assert [name for name in blocks if name.startswith("decoder.layers.")] and "decoder.layers.2" in str(list(blocks))
    assert not [name for name in blocks if name.startswith(("decoder.layers.0", "decoder.layers.1", "embedding"))]
