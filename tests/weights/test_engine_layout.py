"""Layouts on paper; that SGLang lays its parameters out like this is proven by checksums in test_transports.py."""

import pytest

from gspo_megatron.weights.engine_layout import EngineGeometry, Piece, engine_layout, one_message_groups
from gspo_megatron.weights.families import FAMILIES

MOE = FAMILIES["Qwen3MoeForCausalLM"]
L = "model.layers.0."


def layout_of(shapes, tensor, parameters, expert=1, multiple=1):
    geometry = EngineGeometry(tensor, expert, num_heads=8, num_kv_heads=2, num_experts=4, ffn_multiple=multiple)
    return engine_layout(shapes, MOE.engine_name, geometry, parameters)


def test_rows_of_the_vocabulary_are_cut_and_the_last_ranks_filled_up():
    shapes = {"lm_head.weight": (150, 8)}
    # 150 rows are padded to 192, 64 a rank
    ranks = layout_of(shapes, 3, ["lm_head.weight"])["lm_head.weight"]
    assert ranks[0] == [Piece("lm_head.weight", (0, 0), (64, 8))]
    assert ranks[2] == [Piece("lm_head.weight", (128, 0), (22, 8)), Piece("", (0, 0), (42, 8))]
    # 64 rows for 3 ranks: the multiple is 64 * 3
    alone = layout_of({"lm_head.weight": (64, 8)}, 3, ["lm_head.weight"])["lm_head.weight"]
    assert [rank[0].shape for rank in alone] == [(64, 8)] * 3 and alone[1][0].hf == alone[2][0].hf == ""


def test_ranks_beyond_the_kv_heads_hold_the_same_ones():
    a = f"{L}self_attn."
    shapes = {f"{a}q_proj.weight": (64, 16), f"{a}k_proj.weight": (16, 16), f"{a}v_proj.weight": (16, 16)}
    ranks = layout_of(shapes, 4, [f"{a}qkv_proj.weight"])[f"{a}qkv_proj.weight"]
    assert [[piece.hf.removeprefix(a)[0] for piece in rank] for rank in ranks] == [["q", "k", "v"]] * 4
    assert [rank[0].start[0] for rank in ranks] == [0, 16, 32, 48] and ranks[0][0].shape == (16, 16)
    assert [rank[1].start[0] for rank in ranks] == [0, 0, 8, 8] and ranks[0][1].shape == (8, 16)


def expert_shapes(inner):
    found = {}
    for expert in range(4):
        e = f"{L}mlp.experts.{expert}."
        found |= dict.fromkeys((f"{e}up_proj.weight", f"{e}gate_proj.weight"), (inner, 16))
        found[f"{e}down_proj.weight"] = (16, inner)
    return found


def test_experts_are_stacked_gate_before_up_and_spread_over_expert_ranks():
    w13, w2 = f"{L}mlp.experts.w13_weight", f"{L}mlp.experts.w2_weight"
    layout = layout_of(expert_shapes(12), 4, [w13, w2], expert=2)
    names = [piece.hf.removeprefix(f"{L}mlp.experts.").removesuffix("_proj.weight") for piece in layout[w13][3]]
    assert names == ["2.gate", "2.up", "3.gate", "3.up"]
    assert [rank[0].start[0] for rank in layout[w13]] == [0, 6, 0, 6]
    assert [(rank[0].hf[-18:], rank[0].start) for rank in layout[w2][1:3]] == [
        ("0.down_proj.weight", (0, 6)), ("2.down_proj.weight", (0, 0))
    ]  # fmt: skip


def test_a_cpu_engine_fills_feed_forward_parts_up():
    w2 = f"{L}mlp.experts.w2_weight"
    ranks = layout_of(expert_shapes(48), 2, [w2], multiple=32)[w2]
    assert (ranks[0][0].shape, ranks[0][0].padded) == ((16, 32), ())
    assert (ranks[1][0].start, ranks[1][0].shape, ranks[1][0].padded) == ((0, 32), (16, 16), (16, 32))


@pytest.mark.parametrize("missing", ["gate", "down"])
def test_a_missing_expert_leaves_the_parameter_without_a_layout(missing):
    shapes = expert_shapes(12)
    del shapes[f"{L}mlp.experts.2.{missing}_proj.weight"]
    w13, w2 = f"{L}mlp.experts.w13_weight", f"{L}mlp.experts.w2_weight"
    assert list(layout_of(shapes, 1, [w13, w2])) == [w2 if missing == "gate" else w13]


def test_what_no_rule_knows_is_whole_on_one_rank_and_unknown_on_two():
    shapes = {f"{L}self_attn.sinks": (8,)}
    assert layout_of(shapes, 1, [f"{L}self_attn.sinks"]) == {
        f"{L}self_attn.sinks": [[Piece(f"{L}self_attn.sinks", (0,), (8,))]]
    }
    assert layout_of(shapes, 2, [f"{L}self_attn.sinks"]) == {}


def test_latent_attention_is_joined_below_and_cut_by_heads_above():
    a, name = f"{L}self_attn.", FAMILIES["DeepseekV3ForCausalLM"].engine_name
    shapes = {f"{a}q_a_proj.weight": (6, 16), f"{a}kv_a_proj_with_mqa.weight": (10, 16), f"{a}q_b_proj.weight": (64, 6)}
    joined = f"{a}fused_qkv_a_proj_with_mqa.weight"
    geometry = EngineGeometry(2, 1, num_heads=8, num_kv_heads=8, num_experts=4)
    ranks = engine_layout(shapes, name, geometry, [joined, f"{a}q_b_proj.weight"])
    both = [Piece(f"{a}q_a_proj.weight", (0, 0), (6, 16)), Piece(f"{a}kv_a_proj_with_mqa.weight", (0, 0), (10, 16))]
    assert ranks[joined] == [both, both]
    assert ranks[f"{a}q_b_proj.weight"][1] == [Piece(f"{a}q_b_proj.weight", (32, 0), (32, 6))]
    pair = frozenset({f"{a}q_a_proj.weight", f"{a}kv_a_proj_with_mqa.weight"})
    assert one_message_groups(shapes, name) == dict.fromkeys(pair, pair)
