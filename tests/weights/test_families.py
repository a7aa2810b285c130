"""The families' tables: every name written out by hand, and every element there and back."""

from collections import Counter

import numpy as np
import pytest
from naive_layouts import TINY, numbered, places, qkv_of_megatron, shard_from_blocks

from gspo_megatron.weights.families import FAMILIES, canonical_name
from gspo_megatron.weights.plan import blocks_of, hf_shapes, owned_blocks
from gspo_megatron.weights.rules import whole_segments

L, M = "model.layers.1", "decoder.layers.1"
COMMON = {
    "embedding.word_embeddings.weight": ["model.embed_tokens.weight"],
    f"{M}.input_layernorm.weight": [f"{L}.input_layernorm.weight"],
    f"{M}.self_attention.linear_qkv.weight": [f"{L}.self_attn.{x}_proj.weight" for x in "qkv"],
    f"{M}.self_attention.q_layernorm.weight": [f"{L}.self_attn.q_norm.weight"],
    f"{M}.self_attention.k_layernorm.weight": [f"{L}.self_attn.k_norm.weight"],
    f"{M}.self_attention.linear_proj.weight": [f"{L}.self_attn.o_proj.weight"],
    f"{M}.pre_mlp_layernorm.weight": [f"{L}.post_attention_layernorm.weight"],
    "decoder.final_layernorm.weight": ["model.norm.weight"],
    "output_layer.weight": ["lm_head.weight"],
}
DENSE = {
    f"{M}.mlp.linear_fc1.weight": [f"{L}.mlp.gate_proj.weight", f"{L}.mlp.up_proj.weight"],
    f"{M}.mlp.linear_fc2.weight": [f"{L}.mlp.down_proj.weight"],
}
MOE = {
    f"{M}.mlp.router.weight": [f"{L}.mlp.gate.weight"],
    f"{M}.mlp.experts.local_experts.3.linear_fc1.weight": [
        f"{L}.mlp.experts.3.gate_proj.weight", f"{L}.mlp.experts.3.up_proj.weight",
    ],
    f"{M}.mlp.experts.local_experts.3.linear_fc2.weight": [f"{L}.mlp.experts.3.down_proj.weight"],
}  # fmt: skip
TABLES = {"Qwen3ForCausalLM": COMMON | DENSE, "Qwen3MoeForCausalLM": COMMON | MOE}
"""Architecture -> Megatron name -> HF names, for layer 1 and expert 3."""


def names_of(family) -> dict[str, list[str]]:
    table = {}
    for row in family.rows:
        if not row.exists(TINY, 1):
            continue
        composition = row.rule(tuple(name.format(L=1, E=3) for name in row.hf), TINY, 1)
        table[row.megatron.format(L=1, E=3)] = [segment.hf for segment in whole_segments(composition)]
    return {name: list(dict.fromkeys(hf)) for name, hf in table.items()}


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_every_row_has_these_names(architecture):
    assert names_of(FAMILIES[architecture]) == TABLES[architecture]


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"tensor": 4}, {"tensor": 2, "expert_tensor": 2}], ids=str)
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_every_row_there_and_back(architecture, layout):
    """HF -> shards equal to Megatron's layout, and the owned blocks of the shards -> the same HF tensors."""
    family, tensor, expert_tensor = FAMILIES[architecture], layout.get("tensor", 1), layout.get("expert_tensor", 1)
    hf = {name: numbered(size, 1 + 5_000 * i) for i, (name, size) in enumerate(hf_shapes(family, TINY).items())}
    ranks = places(TINY, tensor, **layout)
    shards = [
        {param: filled(blocks, hf) for param, blocks in blocks_of(family, TINY, place).items()} for place in ranks
    ]
    for param, sources in TABLES[architecture].items():
        for rank, shard in enumerate(shards):
            size = expert_tensor if "local_experts" in param else tensor
            np.testing.assert_array_equal(shard[param], expected_shard(param, [hf[s] for s in sources], rank, size))
    back = {name: np.full(tensor.shape, -1) for name, tensor in hf.items()}
    for place, shard in zip(ranks, shards, strict=True):
        for block in owned_blocks(family, TINY, place):
            block.of_hf(back[block.hf])[...] = shard[block.param][block.param_slices]
    for name, tensor in hf.items():
        np.testing.assert_array_equal(back[name], tensor)


def filled(blocks, hf) -> np.ndarray:
    ends = [[low + size for low, size in zip(b.param_start, b.shape, strict=True)] for b in blocks]
    return shard_from_blocks(blocks, hf, tuple(np.max(ends, axis=0)))


def expected_shard(param: str, sources: list[np.ndarray], rank: int, size: int) -> np.ndarray:
    """Megatron's shard, chosen by the kind of module that has the parameter."""
    rank %= size
    if "linear_qkv" in param:
        return np.split(qkv_of_megatron(*sources, TINY), size)[rank]
    if "linear_fc1" in param:
        return np.concatenate([np.split(source, size)[rank] for source in sources])
    if "linear_fc2" in param or "linear_proj" in param:
        return np.split(sources[0], size, axis=1)[rank]
    if param in ("embedding.word_embeddings.weight", "output_layer.weight"):
        padding = -len(sources[0]) % size
        return np.split(np.pad(sources[0], ((0, padding), (0, 0))), size)[rank]
    return sources[0]


def engine_parameter(hf: str) -> str:
    """SGLang's parameter for a tensor of Qwen3 or Qwen3-MoE, word by word."""
    words = hf.split(".")
    if "experts" in words:
        kind = "w2_weight" if words[-2] == "down_proj" else "w13_weight"
        return ".".join([*words[: words.index("experts") + 1], kind])
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    return ".".join(fused.get(word, word) for word in words)


@pytest.mark.parametrize(
    "architecture, num_parameters", [("Qwen3ForCausalLM", 3 + 8 * 3), ("Qwen3MoeForCausalLM", 3 + 9 * 3)]
)
def test_engine_names_of_all_tensors(architecture, num_parameters):
    family = FAMILIES[architecture]
    names = {hf: family.engine_name(hf) for hf in hf_shapes(family, TINY)}
    assert names == {hf: engine_parameter(hf) for hf in names}
    pieces = Counter(names.values())
    assert len(pieces) == num_parameters
    assert pieces[f"{L}.self_attn.qkv_proj.weight"] == 3
    if architecture == "Qwen3MoeForCausalLM":
        assert pieces[f"{L}.mlp.experts.w13_weight"] == 8 and pieces[f"{L}.mlp.experts.w2_weight"] == 4
        assert pieces[f"{L}.mlp.gate.weight"] == 1
    else:
        assert pieces[f"{L}.mlp.gate_up_proj.weight"] == 2


@pytest.mark.parametrize(
    "engine, local",
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.experts.linear_fc1.weight17", "mlp.experts.local_experts.17.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight0", "mlp.experts.local_experts.0.linear_fc2.weight"),
    ],
)
def test_transformer_engine_names_become_local_ones(engine, local):
    assert canonical_name(f"decoder.layers.12.{engine}") == f"decoder.layers.12.{local}"


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_local_names_stay_as_they_are(architecture):
    params = blocks_of(FAMILIES[architecture], TINY, places(TINY, 1)[0])
    assert [canonical_name(name) for name in params] == list(params)
