"""Which rank sends what: every element once, on any layout, and buckets no larger than asked for."""

import time
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from naive_layouts import QWEN3_30B_A3B, QWEN3_235B_A22B, TINY, places, random_case
from safetensors.torch import load_file

from gspo_megatron.weights.families import FAMILIES
from gspo_megatron.weights.hf_files import read_hf_config
from gspo_megatron.weights.plan import blocks_of, hf_shapes, owned_blocks, plan_buckets
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
        as_embedding = [replace(block, param=EMBEDDING) for block in last[OUTPUT]]
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


PAPER_LAYOUTS = [
    (QWEN3_30B_A3B, 30_532_122_624, 64, dict(tensor=4, pipeline=2, expert=8)),
    (QWEN3_30B_A3B, 30_532_122_624, 128, dict(tensor=8, context=2, expert=16)),
    (QWEN3_30B_A3B, 30_532_122_624, 256, dict(tensor=4, pipeline=4, expert=8, expert_tensor=2)),
    (QWEN3_235B_A22B, 235_093_634_560, 256, dict(tensor=4, pipeline=8, expert=32, stages=[12] * 7 + [10])),
    (QWEN3_235B_A22B, 235_093_634_560, 1024, dict(tensor=8, pipeline=8, expert=64, stages=[12] * 7 + [10])),
]
"""Sizes, parameters as published, ranks, layout."""


@pytest.mark.parametrize("shape, num_parameters, world, layout", PAPER_LAYOUTS)
def test_plans_of_large_models_are_complete_and_quick(shape, num_parameters, world, layout):
    ranks = places(shape, world, **layout)
    started = time.process_time()
    buckets = plan_buckets(MOE, shape, ranks, 2, 512 * 2**20)
    assert time.process_time() - started < 60
    assert sum(bucket.num_bytes for bucket in buckets) == 2 * num_parameters
    blocks = [(rank, block) for bucket in buckets for rank, part in bucket.sources.items() for block in part]
    assert sum(block.numel for _, block in blocks) == num_parameters
    assert max(bucket.num_bytes for bucket in buckets if len(bucket.names) > 1) <= 512 * 2**20
    per_expert = 3 * shape.hidden * shape.moe_ffn
    experts = sum(block.numel for _, block in blocks if ".mlp.experts." in block.hf)
    assert experts == shape.num_layers * shape.num_experts * per_expert
    # the first copy of everything sends: one dense replica, one expert replica, on every stage
    stages = layout.get("pipeline", 1)
    senders = max(layout["tensor"], layout["expert"] * layout.get("expert_tensor", 1)) * stages
    assert len({rank for rank, _ in blocks}) == senders


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1_000, 5_000, 10**9])
def test_buckets_hold_all_names_in_order_and_are_bounded(bucket_bytes):
    shapes = hf_shapes(MOE, TINY)
    buckets = plan_buckets(MOE, TINY, places(TINY, 4, tensor=2, expert=2), 4, bucket_bytes)
    assert [name for bucket in buckets for name in bucket.names] == list(shapes)
    for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
        sizes = [4 * prod(shapes[name]) for name in bucket.names]
        assert bucket.num_bytes == sum(sizes)
        assert len(sizes) == 1 or bucket.num_bytes <= bucket_bytes
        if following:  # no bucket ends before it is full
            assert bucket.num_bytes + 4 * prod(shapes[following.names[0]]) > bucket_bytes
        sent = sum(block.numel for blocks in bucket.sources.values() for block in blocks)
        assert 4 * sent == bucket.num_bytes
    assert len(buckets) == {1: len(shapes), 10**9: 1}.get(bucket_bytes, len(buckets))


def test_places_that_leave_something_out_name_the_tensor():
    with pytest.raises(AssertionError, match="model.embed_tokens.weight: ranks hold 56 of 104 elements"):
        plan_buckets(MOE, TINY, places(TINY, 2, tensor=2)[:1], 4, 1_000)
    doubled = places(TINY, 1) * 2
    with pytest.raises(AssertionError, match="ranks hold 208 of 104"):
        plan_buckets(MOE, TINY, doubled, 4, 1_000)
