"""The families' tables: every name written out by hand, and every element there and back."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from naive_layouts import TINY, numbered, places, qkv_of_megatron, shard_from_blocks

from gspo_megatron.weights.families import FAMILIES, canonical_name
from gspo_megatron.weights.plan import blocks_of, hf_dtypes, hf_shapes, owned_blocks, tensor_faults
from gspo_megatron.weights.rules import whole_segments

L, M = "model.layers.1", "decoder.layers.1"
A, MA, E = f"{L}.self_attn", f"{M}.self_attention", f"{M}.mlp.experts.local_experts.3"
COMMON = {
    "embedding.word_embeddings.weight": ["model.embed_tokens.weight"],
    f"{M}.input_layernorm.weight": [f"{L}.input_layernorm.weight"],
    f"{MA}.linear_qkv.weight": [f"{A}.{x}_proj.weight" for x in "qkv"],
    f"{MA}.linear_proj.weight": [f"{A}.o_proj.weight"],
    f"{M}.pre_mlp_layernorm.weight": [f"{L}.post_attention_layernorm.weight"],
    "decoder.final_layernorm.weight": ["model.norm.weight"],
    "output_layer.weight": ["lm_head.weight"],
}
QKV_BIAS = {f"{MA}.linear_qkv.bias": [f"{A}.{x}_proj.bias" for x in "qkv"]}
QK_NORMS = {f"{MA}.{x}_layernorm.weight": [f"{A}.{x}_norm.weight"] for x in "qk"}
DENSE = {
    f"{M}.mlp.linear_fc1.weight": [f"{L}.mlp.gate_proj.weight", f"{L}.mlp.up_proj.weight"],
    f"{M}.mlp.linear_fc2.weight": [f"{L}.mlp.down_proj.weight"],
}
MOE = {
    f"{M}.mlp.router.weight": [f"{L}.mlp.gate.weight"],
    f"{E}.linear_fc1.weight": [f"{L}.mlp.experts.3.gate_proj.weight", f"{L}.mlp.experts.3.up_proj.weight"],
    f"{E}.linear_fc2.weight": [f"{L}.mlp.experts.3.down_proj.weight"],
}
GATED_SHARED = {
    f"{M}.mlp.shared_experts.linear_fc1.weight": [f"{L}.mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up")],
    f"{M}.mlp.shared_experts.linear_fc2.weight": [f"{L}.mlp.shared_expert.down_proj.weight"],
    f"{M}.mlp.shared_experts.gate_weight": [f"{L}.mlp.shared_expert_gate.weight"],
}
SHARED = {
    f"{M}.mlp.shared_experts.linear_fc1.weight": [f"{L}.mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up")],
    f"{M}.mlp.shared_experts.linear_fc2.weight": [f"{L}.mlp.shared_experts.down_proj.weight"],
}
MIXTRAL = {
    f"{M}.mlp.router.weight": [f"{L}.block_sparse_moe.gate.weight"],
    f"{E}.linear_fc1.weight": [
        f"{L}.block_sparse_moe.experts.3.w1.weight",
        f"{L}.block_sparse_moe.experts.3.w3.weight",
    ],
    f"{E}.linear_fc2.weight": [f"{L}.block_sparse_moe.experts.3.w2.weight"],
}
GPT_OSS = {
    f"{MA}.linear_proj.bias": [f"{A}.o_proj.bias"],
    f"{MA}.core_attention.softmax_offset": [f"{A}.sinks"],
    f"{M}.mlp.router.weight": [f"{L}.mlp.router.weight"],
    f"{M}.mlp.router.bias": [f"{L}.mlp.router.bias"],
    f"{E}.linear_fc1.weight": [f"{L}.mlp.experts.gate_up_proj"],
    f"{E}.linear_fc1.bias": [f"{L}.mlp.experts.gate_up_proj_bias"],
    f"{E}.linear_fc2.weight": [f"{L}.mlp.experts.down_proj"],
    f"{E}.linear_fc2.bias": [f"{L}.mlp.experts.down_proj_bias"],
}
BIAS = {f"{M}.mlp.router.expert_bias": [f"{L}.mlp.gate.e_score_correction_bias"]}
LATENT = {name: hf for name, hf in COMMON.items() if "linear_qkv" not in name} | {
    f"{MA}.linear_q_down_proj.weight": [f"{A}.q_a_proj.weight"],
    f"{MA}.q_layernorm.weight": [f"{A}.q_a_layernorm.weight"],
    f"{MA}.linear_q_up_proj.weight": [f"{A}.q_b_proj.weight"],
    f"{MA}.linear_kv_down_proj.weight": [f"{A}.kv_a_proj_with_mqa.weight"],
    f"{MA}.kv_layernorm.weight": [f"{A}.kv_a_layernorm.weight"],
    f"{MA}.linear_kv_up_proj.weight": [f"{A}.kv_b_proj.weight"],
}
TABLES = {
    "Qwen2ForCausalLM": COMMON | QKV_BIAS | DENSE,
    "Qwen2MoeForCausalLM": COMMON | QKV_BIAS | MOE | GATED_SHARED,
    "Qwen3ForCausalLM": COMMON | QK_NORMS | DENSE,
    "Qwen3MoeForCausalLM": COMMON | QK_NORMS | MOE,
    "LlamaForCausalLM": COMMON | DENSE,
    "MixtralForCausalLM": COMMON | MIXTRAL,
    "Glm4MoeForCausalLM": COMMON | QKV_BIAS | QK_NORMS | MOE | BIAS | SHARED,
    "GptOssForCausalLM": COMMON | QKV_BIAS | GPT_OSS,
    "DeepseekV2ForCausalLM": LATENT | MOE | SHARED,
    "DeepseekV3ForCausalLM": LATENT | MOE | SHARED | BIAS,
}
"""Architecture -> Megatron name -> HF names, for layer 1 and expert 3."""
ON_DENSE_LAYERS = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", "DeepseekV3ForCausalLM")
LATENT_SIZES = dict(q_lora=6, kv_lora=10, qk_nope=4, qk_rope=2, v_head=6)
SHAPE = replace(TINY, shared_ffn=8, attention_bias=True, qk_norm=True, **LATENT_SIZES)


def names_of(family, shape=SHAPE) -> dict[str, list[str]]:
    table = {}
    for row in family.rows:
        if not row.exists(shape, 1):
            continue
        composition = row.rule(tuple(name.format(L=1, E=3) for name in row.hf), shape, 1)
        table[row.megatron.format(L=1, E=3)] = [segment.tensor for segment in whole_segments(composition)]
    return {name: list(dict.fromkeys(hf)) for name, hf in table.items()}


@pytest.mark.parametrize("architecture", sorted(TABLES))
def test_every_row_has_these_names(architecture):
    assert names_of(FAMILIES[architecture]) == TABLES[architecture]


@pytest.mark.parametrize("architecture", ON_DENSE_LAYERS)
def test_a_layer_without_experts_has_a_dense_mlp(architecture):
    routed = MOE | SHARED | GATED_SHARED | BIAS
    expected = {name: hf for name, hf in TABLES[architecture].items() if name not in routed} | DENSE
    assert names_of(FAMILIES[architecture], replace(SHAPE, dense_layers=(1,))) == expected


def test_what_config_json_may_leave_out():
    names = names_of(FAMILIES["Glm4MoeForCausalLM"], replace(SHAPE, attention_bias=False, qk_norm=False))
    assert names == {name: hf for name, hf in TABLES["Glm4MoeForCausalLM"].items() if name not in QKV_BIAS | QK_NORMS}


def test_queries_without_a_latent_are_projected_at_once():
    names = names_of(FAMILIES["DeepseekV2ForCausalLM"], replace(SHAPE, q_lora=0))
    latent = {name for name in LATENT if "linear_q_" in name or "q_layernorm" in name}
    expected = {name: hf for name, hf in TABLES["DeepseekV2ForCausalLM"].items() if name not in latent}
    assert names == expected | {f"{MA}.linear_q_proj.weight": [f"{A}.q_proj.weight"]}


def test_a_routers_selection_bias_stays_fp32():
    dtypes = hf_dtypes(FAMILIES["Glm4MoeForCausalLM"], SHAPE, "bf16", "fp32")
    assert {name for name, dtype in dtypes.items() if dtype == "fp32"} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(SHAPE.num_layers)
    }
    assert dtypes.keys() == hf_shapes(FAMILIES["Glm4MoeForCausalLM"], SHAPE).keys()


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"tensor": 4}, {"tensor": 2, "expert_tensor": 2}], ids=str)
@pytest.mark.parametrize("architecture", sorted(TABLES))
def test_every_row_there_and_back(architecture, layout):
    """HF -> shards equal to Megatron's layout, and the owned blocks of the shards -> the same HF tensors."""
    family, tensor, expert_tensor = FAMILIES[architecture], layout.get("tensor", 1), layout.get("expert_tensor", 1)
    hf = {name: numbered(size, 1 + 5_000 * i) for i, (name, size) in enumerate(hf_shapes(family, SHAPE).items())}
    ranks = places(SHAPE, tensor, **layout)
    shards = [
        {param: filled(blocks, hf) for param, blocks in blocks_of(family, SHAPE, place).items()} for place in ranks
    ]
    for param, sources in TABLES[architecture].items():
        for rank, shard in enumerate(shards):
            size = expert_tensor if "local_experts" in param else tensor
            expected = expected_shard(param, published(param, [hf[s] for s in sources]), rank, size)
            np.testing.assert_array_equal(shard[param], expected)
    back = {name: np.full(tensor.shape, -1) for name, tensor in hf.items()}
    for place, shard in zip(ranks, shards, strict=True):
        for block in owned_blocks(family, SHAPE, place):
            block.of_hf(back[block.hf])[...] = shard[block.param][block.param_slices]
    for name, tensor in hf.items():
        np.testing.assert_array_equal(back[name], tensor)


def published(param: str, sources: list[np.ndarray]) -> list[np.ndarray]:
    """gpt-oss stacks all experts, [in, out], and interleaves gate and up; others are as they are."""
    if "local_experts" not in param or len(sources) > 1 or sources[0].shape[0] != SHAPE.num_experts:
        return sources
    stacked = sources[0]
    if "linear_fc2" in param:
        return [stacked[3].T]
    return [stacked[3][..., 0::2].T, stacked[3][..., 1::2].T]


@pytest.mark.parametrize("architecture", sorted(TABLES))
def test_missing_unknown_and_misshapen_tensors_are_named(architecture):
    family = FAMILIES[architecture]
    files = dict(hf_shapes(family, SHAPE))
    assert tensor_faults(files | {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}, family, SHAPE) == []
    last = list(files)[-1]
    faults = tensor_faults(
        {name: size for name, size in files.items() if name != last}
        | {"model.layers.0.mlp.nobody.weight": (1,), "model.norm.weight": (3,)},
        family,
        SHAPE,
    )
    for name, fault in zip((last, "model.layers.0.mlp.nobody.weight", "model.norm.weight is [3]"), faults, strict=True):
        assert name in fault


def test_layers_behind_the_last_are_dropped():
    """GLM-4.5's multi-token-prediction layer."""
    family, shape = FAMILIES["Glm4MoeForCausalLM"], replace(SHAPE, mtp_layers_in_files=1)
    files = dict(hf_shapes(family, shape)) | {"model.layers.3.eh_proj.weight": (8, 16)}
    assert tensor_faults(files, family, shape) == []
    (fault,) = tensor_faults(files | {"model.layers.4.eh_proj.weight": (8, 16)}, family, shape)
    assert "model.layers.4.eh_proj.weight" in fault


def filled(blocks, hf) -> np.ndarray:
    ends = [[low + size for low, size in zip(b.param_start, b.shape, strict=True)] for b in blocks]
    return shard_from_blocks(blocks, hf, tuple(np.max(ends, axis=0)))


def expected_shard(param: str, sources: list[np.ndarray], rank: int, size: int) -> np.ndarray:
    """Megatron's shard, chosen by the kind of module that has the parameter."""
    rank %= size
    if "linear_qkv" in param:
        whole = qkv_of_megatron(*(source.reshape(len(source), -1) for source in sources), SHAPE)
        return np.split(whole, size)[rank].reshape(-1, *sources[0].shape[1:])
    if "_up_proj" in param:
        return np.split(sources[0], size)[rank]
    if "linear_fc1" in param:
        return np.concatenate([np.split(source, size)[rank] for source in sources])
    if "linear_fc2.weight" in param or "linear_proj.weight" in param:
        return np.split(sources[0], size, axis=1)[rank]
    if "softmax_offset" in param:
        return np.split(sources[0], size)[rank]
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
    "architecture, names",
    [
        (
            "Qwen2MoeForCausalLM",
            {
                f"{A}.k_proj.bias": f"{A}.qkv_proj.bias",
                f"{L}.mlp.shared_expert.up_proj.weight": f"{L}.mlp.shared_expert.gate_up_proj.weight",
                f"{L}.mlp.shared_expert_gate.weight": f"{L}.mlp.shared_expert_gate.weight",
                f"{L}.mlp.experts.3.up_proj.weight": f"{L}.mlp.experts.w13_weight",
            },
        ),
        (
            "MixtralForCausalLM",
            {
                f"{L}.block_sparse_moe.gate.weight": f"{L}.block_sparse_moe.gate.weight",
                f"{L}.block_sparse_moe.experts.3.w3.weight": f"{L}.block_sparse_moe.experts.w13_weight",
                f"{L}.block_sparse_moe.experts.3.w2.weight": f"{L}.block_sparse_moe.experts.w2_weight",
            },
        ),
        (
            "Glm4MoeForCausalLM",
            {
                f"{L}.mlp.gate.e_score_correction_bias": f"{L}.mlp.gate.e_score_correction_bias",
                f"{L}.mlp.shared_experts.gate_proj.weight": f"{L}.mlp.shared_experts.gate_up_proj.weight",
                f"{A}.q_norm.weight": f"{A}.q_norm.weight",
            },
        ),
        (
            "DeepseekV3ForCausalLM",
            {
                f"{A}.q_a_proj.weight": f"{A}.fused_qkv_a_proj_with_mqa.weight",
                f"{A}.kv_a_proj_with_mqa.weight": f"{A}.fused_qkv_a_proj_with_mqa.weight",
                f"{A}.kv_b_proj.weight": f"{A}.kv_b_proj.weight",
                f"{L}.mlp.shared_experts.gate_proj.weight": f"{L}.mlp.shared_experts.gate_up_proj.weight",
                f"{L}.mlp.experts.3.gate_proj.weight": f"{L}.mlp.experts.w13_weight",
                f"{L}.mlp.gate.e_score_correction_bias": f"{L}.mlp.gate.e_score_correction_bias",
            },
        ),
        (
            "GptOssForCausalLM",
            {
                f"{A}.sinks": f"{A}.sinks",
                f"{A}.v_proj.bias": f"{A}.qkv_proj.bias",
                f"{L}.mlp.experts.gate_up_proj": f"{L}.mlp.experts.w13_weight",
                f"{L}.mlp.experts.gate_up_proj_bias": f"{L}.mlp.experts.w13_weight_bias",
                f"{L}.mlp.experts.down_proj_bias": f"{L}.mlp.experts.w2_weight_bias",
            },
        ),
    ],
)
def test_engine_names_of_other_families(architecture, names):
    assert {hf: FAMILIES[architecture].engine_name(hf) for hf in names} == names
    assert names.keys() <= hf_shapes(FAMILIES[architecture], SHAPE).keys()


def transformer_engine_names(local: str, is_latent: bool) -> str:
    """As get_gpt_layer_with_transformer_engine_spec makes them (megatron-core `models/gpt/gpt_layer_specs.py`): the
    norm before attention is a part of linear_qkv, that before a dense MLP of linear_fc1, and experts are one grouped
    module. Multi-latent attention has its norms of the latents in the up projections, and none before it in a linear
    layer."""
    is_moe = "experts" in local or "router" in local
    words = local.split(".")
    if is_latent and "self_attention" in words and words[-2] in ("q_layernorm", "kv_layernorm"):
        return ".".join([*words[:4], f"linear_{words[-2].split('_')[0]}_up_proj.layer_norm_weight"])
    if is_latent and "input_layernorm" in words:
        return local
    if "input_layernorm" in words:
        return ".".join([*words[:3], "self_attention.linear_qkv.layer_norm_weight"])
    if "pre_mlp_layernorm" in words and not is_moe:
        return ".".join([*words[:3], "mlp.linear_fc1.layer_norm_weight"])
    if "local_experts" in words:
        at = words.index("local_experts")
        return ".".join([*words[:at], words[-2], f"{words[-1]}{words[at + 1]}"])
    return local


@pytest.mark.parametrize("architecture", sorted(TABLES))
def test_transformer_engine_names_become_local_ones(architecture):
    params = blocks_of(FAMILIES[architecture], SHAPE, places(SHAPE, 1)[0])
    engine = {name: transformer_engine_names(name, "Deepseek" in architecture) for name in params}
    assert len(set(engine.values())) == len(params)
    assert {name: canonical_name(other) for name, other in engine.items()} == {name: name for name in params}


@pytest.mark.parametrize(
    "engine, local",
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.experts.linear_fc1.weight17", "mlp.experts.local_experts.17.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight0", "mlp.experts.local_experts.0.linear_fc2.weight"),
        ("mlp.experts.linear_fc1.bias3", "mlp.experts.local_experts.3.linear_fc1.bias"),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"),
    ],
)
def test_names_of_transformer_engines_modules(engine, local):
    assert canonical_name(f"decoder.layers.12.{engine}") == f"decoder.layers.12.{local}"


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_local_names_stay_as_they_are(architecture):
    params = blocks_of(FAMILIES[architecture], SHAPE, places(SHAPE, 1)[0])
    assert [canonical_name(name) for name in params] == list(params)
