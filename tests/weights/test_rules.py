"""Blocks of every rule against Megatron's layouts built with numpy."""

from dataclasses import replace

import numpy as np
import pytest
from naive_layouts import TINY, numbered, qkv_of_megatron, shard_from_blocks

from gspo_megatron.weights.rules import (
    ModelShape, gated, qkv, replicated, row_parallel, shard_blocks, vector, vocabulary,
)  # fmt: skip


def shards(rule, names, shape, tensor, hf, shard_shape):
    composition = rule(names, shape, tensor)
    return [shard_from_blocks(shard_blocks("p", composition, r, tensor), hf, shard_shape) for r in range(tensor)]


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (8, 8), (12, 1), (16, 4)])
def test_qkv_is_interleaved_by_query_group(heads, kv_heads, tensor):
    shape = replace(TINY, num_heads=heads, num_kv_heads=kv_heads)
    rows = [heads * 4, kv_heads * 4, kv_heads * 4]
    query, key, value = (numbered((n, 8), first=10_000 * i) for i, n in enumerate(rows))
    whole = qkv_of_megatron(query, key, value, shape)
    found = shards(qkv, ("q", "k", "v"), shape, tensor, {"q": query, "k": key, "v": value}, (sum(rows) // tensor, 8))
    for shard, expected in zip(found, np.split(whole, tensor), strict=True):
        np.testing.assert_array_equal(shard, expected)


def test_qkv_with_more_tensor_ranks_than_groups_cuts_through_a_group():
    """1 KV head, 2 query heads of 4 rows: 16 rows on 4 ranks, one head each."""
    shape = replace(TINY, num_heads=2, num_kv_heads=1)
    blocks = [shard_blocks("p", qkv(("q", "k", "v"), shape, 4), rank, 4) for rank in range(4)]
    assert [[(b.hf, b.hf_start[0], b.shape[0]) for b in part] for part in blocks] == [
        [("q", 0, 4)], [("q", 4, 4)], [("k", 0, 4)], [("v", 0, 4)],
    ]  # fmt: skip


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_gated_has_a_range_of_gate_then_of_up_on_every_rank(tensor):
    gate, up = numbered((16, 8)), numbered((16, 8), first=10_000)
    found = shards(gated(lambda s: s.ffn), ("g", "u"), TINY, tensor, {"g": gate, "u": up}, (32 // tensor, 8))
    for rank, shard in enumerate(found):
        expected = np.concatenate([np.split(gate, tensor)[rank], np.split(up, tensor)[rank]])
        np.testing.assert_array_equal(shard, expected)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 5, 13])
def test_vocabulary_is_padded_with_zeros_to_equal_ranges(tensor):
    table = numbered((13, 8), first=1)
    padded = np.zeros((-(-13 // tensor) * tensor, 8), dtype=np.int64)
    padded[:13] = table
    found = shards(vocabulary, ("e",), TINY, tensor, {"e": table}, (len(padded) // tensor, 8))
    np.testing.assert_array_equal(np.concatenate(found), padded)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_row_parallel_is_cut_along_the_input(tensor):
    weight = numbered((8, 16))
    found = shards(row_parallel(lambda s: 8, lambda s: 16), ("w",), TINY, tensor, {"w": weight}, (8, 16 // tensor))
    for shard, expected in zip(found, np.split(weight, tensor, axis=1), strict=True):
        np.testing.assert_array_equal(shard, expected)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_replicated_and_vectors_are_whole_on_every_rank(tensor):
    matrix, line = numbered((4, 8)), numbered((8,))
    for shard in shards(replicated(lambda s: 4, lambda s: 8), ("w",), TINY, tensor, {"w": matrix}, (4, 8)):
        np.testing.assert_array_equal(shard, matrix)
    for shard in shards(vector(lambda s: 8), ("w",), TINY, tensor, {"w": line}, (8,)):
        np.testing.assert_array_equal(shard, line)


@pytest.mark.parametrize("rule, names", [(qkv, ("q", "k", "v")), (gated(lambda s: s.ffn), ("g", "u"))])
def test_a_size_that_cannot_be_cut_names_the_parameter(rule, names):
    with pytest.raises(ValueError, match="decoder.p: .* can't be cut into 7 equal ranges"):
        shard_blocks("decoder.p", rule(names, TINY, 7), 0, 7)


def test_sizes_of_published_and_of_new_config_files():
    published = {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "vocab_size": 151936, "tie_word_embeddings": False,
    }  # fmt: skip
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in published.items()}
    expected = ModelShape(2048, 48, 32, 4, 128, 6144, 768, 128, 151936, False)
    assert ModelShape.from_hf(published) == ModelShape.from_hf(renamed) == expected


def test_sizes_that_config_files_may_leave_out():
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    assert ModelShape.from_hf(config) == ModelShape(64, 2, 4, 4, 16, 0, 0, 0, 512, False)
