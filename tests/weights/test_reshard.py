"""The reshard plan: every element once to one sender, in bounded rounds, with no more bytes moved than must be."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from naive_layouts import TINY, places, random_case

from gspo_megatron.weights.engine_layout import one_message_groups
from gspo_megatron.weights.families import FAMILIES
from gspo_megatron.weights.plan import blocks_of, hf_shapes
from gspo_megatron.weights.reshard import SENDERS, all_writers, first_rank, nbytes, one_per_stage, plan_reshard
from gspo_megatron.weights.rules import ModelShape
from gspo_megatron.weights.traffic import EngineRanks, EngineTraffic, engine_traffic

CONFIGS = Path(__file__).parents[1] / "data_files" / "configs"
MOE, DENSE = FAMILIES["Qwen3MoeForCausalLM"], FAMILIES["Qwen3ForCausalLM"]
LATENT = {"q_lora": 6, "kv_lora": 10, "qk_nope": 4, "qk_rope": 2, "v_head": 6}
NORM = "model.layers.1.input_layernorm.weight"


def plan_of(shape, ranks, senders, bucket_bytes=512 * 2**20, fp32=(), family=None):
    family = family or (MOE if shape.num_experts else DENSE)
    dtypes = {name: torch.float32 if name in fp32 else torch.bfloat16 for name in hf_shapes(family, shape)}
    return plan_reshard(family, shape, ranks, dtypes, senders(ranks), bucket_bytes)


@pytest.mark.parametrize("senders", SENDERS.values(), ids=SENDERS)
@pytest.mark.parametrize("seed", range(40))
def test_every_element_comes_once_from_a_rank_that_holds_it(seed, senders):
    shape, ranks = random_case(seed)
    family = MOE if shape.num_experts else DENSE
    plan = plan_of(shape, ranks, senders, bucket_bytes=[60, 400, 3000][seed % 3], fp32={NORM})
    assert list(plan.specs) == list(hf_shapes(family, shape))
    assert_covered_once(plan, family, shape, ranks)


def assert_covered_once(plan, family, shape, ranks):
    held = [{block for blocks in blocks_of(family, shape, place).values() for block in blocks} for place in ranks]
    assert sorted(name for bucket in plan.buckets for name in bucket.names) == sorted(plan.specs)
    counts = {name: np.zeros(size, dtype=int) for name, (_, size) in plan.specs.items()}
    for bucket in plan.buckets:
        sources = [(bucket.sender, bucket.local), *((part.source, part.blocks) for part in bucket.transfers)]
        assert len({rank for rank, _ in sources}) == len(sources)
        for rank, blocks in sources:
            assert held[rank].issuperset(blocks)
            for block in blocks:
                assert block.hf in bucket.names
                counts[block.hf][block.hf_slices] += 1
    assert {name: (count.min(), count.max()) for name, count in counts.items()} == dict.fromkeys(counts, (1, 1))


@pytest.mark.parametrize("senders", SENDERS.values(), ids=SENDERS)
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_every_family_comes_whole(architecture, senders):
    """Biases, shared experts, dense layers among others, latent attention, experts stacked in one tensor."""
    shape = replace(TINY, shared_ffn=8, attention_bias=True, qk_norm=True, dense_layers=(0,), **LATENT)
    for layout in ({"tensor": 2, "pipeline": 3, "expert": 4}, {"tensor": 2, "expert": 2, "expert_tensor": 2}):
        ranks = places(shape, 12, **layout)
        plan = plan_of(shape, ranks, senders, bucket_bytes=1_000, family=FAMILIES[architecture])
        assert_covered_once(plan, FAMILIES[architecture], shape, ranks)
        assert_messages_fit(plan)


def held_bytes(family, shape, place, specs):
    """HF name -> bytes of it that this rank holds, the slow way."""
    held = defaultdict(int)
    for param, blocks in blocks_of(family, shape, place).items():
        tied_copy = shape.tied_embeddings and param == "output_layer.weight"
        for block in blocks:
            if block.hf is not None and not tied_copy:
                held[block.hf] += block.numel * specs[block.hf][0].itemsize
    return held


@pytest.mark.parametrize("senders", SENDERS.values(), ids=SENDERS)
@pytest.mark.parametrize("seed", range(40, 60))
def test_no_assignment_to_these_senders_moves_less(seed, senders):
    shape, ranks = random_case(seed)
    family = MOE if shape.num_experts else DENSE
    plan = plan_of(shape, ranks, senders, bucket_bytes=500)
    held = {rank: held_bytes(family, shape, ranks[rank], plan.specs) for rank in plan.senders}
    least = sum(nbytes(spec) - max(held[rank][name] for rank in plan.senders) for name, spec in plan.specs.items())
    assert plan.lower_bound_bytes == least
    # replicated within an expert's tensor ranks are no Qwen tensors: the plan gets by with the bound itself
    assert plan.moved_bytes == least


@pytest.mark.parametrize("senders", SENDERS.values(), ids=SENDERS)
@pytest.mark.parametrize("seed", range(20))
def test_rounds_are_bounded_on_every_rank(seed, senders):
    shape, ranks = random_case(seed)
    plan = plan_of(shape, ranks, senders, bucket_bytes=900)
    held: dict[tuple[int, int], int] = defaultdict(int)
    for bucket in plan.buckets:
        assert bucket.num_bytes == sum(nbytes(plan.specs[name]) for name in bucket.names)
        held[bucket.sender, bucket.round] += bucket.num_bytes
        for part in bucket.transfers:
            held[part.source, bucket.round] += part.num_bytes
            held[bucket.sender, bucket.round] += part.num_bytes if part.offset is None else 0
    largest = max(nbytes(spec) for spec in plan.specs.values())
    # a tensor larger than a bucket has a round of its own, where its parts may lie beside it once more
    bound = max(900, 2 * largest)
    assert all(size <= bound for size in held.values())
    assert plan.peak_bytes <= 2 * bound
    by_sender = [[bucket.round for bucket in plan.buckets_of(rank)] for rank in plan.senders]
    assert all(rounds == sorted(set(rounds)) for rounds in by_sender)
    assert {number for rounds in by_sender for number in rounds} == set(range(plan.num_rounds))


@pytest.mark.parametrize("seed", range(20))
def test_offsets_are_aligned_and_a_message_that_fits_as_it_is_goes_to_its_place(seed):
    shape, ranks = random_case(seed)
    plan = plan_of(shape, ranks, one_per_stage, bucket_bytes=2_000, fp32={NORM})
    assert_messages_fit(plan)


def assert_messages_fit(plan):
    for bucket in plan.buckets:
        start = dict(zip(bucket.names, bucket.offsets, strict=True))
        (item,) = {plan.specs[name][0].itemsize for name in bucket.names}
        assert not any(offset % item for offset in bucket.offsets)
        flat = np.full(bucket.num_bytes // item, -1)  # position of every element in the message that it comes with
        for part in bucket.transfers:
            position = 0
            for block in part.blocks:
                size = plan.specs[block.hf][1]
                tensor = flat[start[block.hf] // item :][: prod(size)].reshape(size)
                block.of_hf(tensor)[...] = np.arange(position, position + block.numel).reshape(block.shape)
                position += block.numel
            assert position * item == part.num_bytes
            where = np.flatnonzero(flat >= 0)
            in_one_piece = np.array_equal(flat[where[0] : where[0] + position], np.arange(position))
            assert part.offset == (where[0] * item if in_one_piece else None)
            flat[where] = -1


def test_senders_are_where_they_should_be():
    ranks = places(TINY, 12, tensor=2, pipeline=3)
    assert first_rank(ranks) == [0]
    assert all_writers(ranks) == list(range(12))
    assert one_per_stage(ranks) == [0, 4, 8]
    # stages that share a node of 8 ranks use other nodes for their senders where they can
    assert one_per_stage(ranks, ranks_per_node=6) == [0, 6, 8]
    assert one_per_stage(ranks, ranks_per_node=2) == [0, 4, 8]


def test_a_message_a_source_and_bucket_however_many_experts():
    counts = {}
    for num_experts in (8, 32):
        shape = replace(TINY, num_experts=num_experts)
        ranks = places(shape, 4, tensor=2, expert=4)
        plan = plan_of(shape, ranks, one_per_stage)
        counts[num_experts] = [plan.messages(rank) for rank in range(4)]
        assert all(len({part.source for part in bucket.transfers}) == len(bucket.transfers) for bucket in plan.buckets)
    assert counts[8] == counts[32] == [4, 2, 1, 1]


PAPER_LAYOUTS = [
    ("qwen3_30b_a3b", 30_532_122_624, 64, {"tensor": 4, "pipeline": 2, "expert": 8}, EngineRanks(8, 4)),
    (
        "qwen3_30b_a3b",
        30_532_122_624,
        256,
        {"tensor": 4, "pipeline": 4, "expert": 8, "expert_tensor": 2},
        EngineRanks(2),
    ),
    ("qwen3_235b_a22b", 235_093_634_560, 1024, {"tensor": 8, "pipeline": 8, "expert": 64}, EngineRanks(32, 16, 16)),
    ("deepseek_v3", 671_026_419_200, 1024, {"tensor": 8, "pipeline": 16, "expert": 64}, EngineRanks(16, 32, 32)),
    ("kimi_k2", 1_026_408_232_448, 1024, {"tensor": 8, "pipeline": 8, "expert": 128}, EngineRanks(16, 32, 32)),
]
"""Model, parameters, trainer ranks and their layout, engine ranks."""


@pytest.mark.parametrize("senders", ["stages", "all"])
@pytest.mark.parametrize("model, num_parameters, world, layout, engines", PAPER_LAYOUTS)
def test_plans_of_large_models(model, num_parameters, world, layout, engines, senders):
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    family, shape = FAMILIES[config["architectures"][0]], ModelShape.from_hf(config)
    stages = [-(-shape.num_layers // layout["pipeline"])] * (layout["pipeline"] - 1)
    stages.append(shape.num_layers - sum(stages))
    ranks, bucket_bytes = places(shape, world, **layout, stages=stages), 512 * 2**20
    plan = plan_of(shape, ranks, SENDERS[senders], bucket_bytes, family=family)
    assert plan.total_bytes == 2 * num_parameters == sum(bucket.num_bytes for bucket in plan.buckets)
    assert sorted(name for bucket in plan.buckets for name in bucket.names) == sorted(plan.specs)
    blocks = Counter(block for bucket in plan.buckets for block in bucket.local)
    blocks.update(block for bucket in plan.buckets for part in bucket.transfers for block in part.blocks)
    assert set(blocks.values()) == {1} and sum(block.numel for block in blocks) == num_parameters
    assert plan.moved_bytes <= 1.1 * plan.lower_bound_bytes
    largest = max(nbytes(spec) for spec in plan.specs.values())
    # only a tensor that is larger than a bucket takes more, its parts beside it; on one side of the two at a time
    assert plan.peak_bytes <= 2 * bucket_bytes + (2 * largest if largest > bucket_bytes else 0)
    assert all(bucket.num_bytes <= bucket_bytes for bucket in plan.buckets if len(bucket.names) > 1)
    # even within a stage but for what can't be cut, the largest tensor
    stage_of = {rank: rank * layout["pipeline"] // world for rank in plan.senders}
    num_senders, num_bytes = Counter(stage_of.values()), Counter()
    for rank, size in plan.sender_bytes.items():
        num_bytes[stage_of[rank]] += size
    for rank, size in plan.sender_bytes.items():
        assert size <= 1.2 * num_bytes[stage_of[rank]] / num_senders[stage_of[rank]] + largest
    traffic = engine_traffic(family, shape, plan.specs, engines)
    assert traffic.broadcast == engines.engines * engines.tensor * plan.total_bytes
    # norms, routers, latent projections and few heads are on all ranks of an engine, the rest on one
    assert engines.engines * plan.total_bytes <= traffic.shards <= 1.05 * engines.engines * plan.total_bytes


def test_bytes_that_engines_get_and_could_get_by_with():
    specs = plan_of(TINY, places(TINY, 1), first_rank).specs
    total = sum(nbytes(spec) for spec in specs.values())
    assert engine_traffic(MOE, TINY, specs, EngineRanks()) == EngineTraffic(total, total)
    found = engine_traffic(MOE, TINY, specs, EngineRanks(engines=3, tensor=4, expert=2))
    assert found.broadcast == 12 * total
    # on all 4 ranks: norms and routers; on 2 each: key and value heads, of which there are 2; the rest on one
    whole = sum(nbytes(specs[name]) for name in specs if "norm" in name or "mlp.gate." in name)
    heads = sum(nbytes(specs[name]) for name in specs if "k_proj" in name or "v_proj" in name)
    assert found.shards == 3 * (total + 3 * whole + heads)


@pytest.mark.parametrize("senders", SENDERS.values(), ids=SENDERS)
@pytest.mark.parametrize("bucket_bytes", [1, 500, 10**6])
def test_tensors_that_the_engine_takes_only_together_are(senders, bucket_bytes):
    family, shape = FAMILIES["DeepseekV3ForCausalLM"], replace(TINY, dense_layers=(0,), shared_ffn=8, **LATENT)
    ranks, specs = places(shape, 12, tensor=2, pipeline=3), hf_shapes(family, shape)
    together = one_message_groups(specs, family.engine_name)
    assert sorted(together) == sorted(
        f"model.layers.{layer}.self_attn.{kind}.weight"
        for layer in range(3)
        for kind in ("q_a_proj", "kv_a_proj_with_mqa")
    )
    dtypes = dict.fromkeys(specs, torch.bfloat16)
    plan = plan_reshard(family, shape, ranks, dtypes, senders(ranks), bucket_bytes, together)
    assert_covered_once(plan, family, shape, ranks)
    assert_messages_fit(plan)
    for bucket in plan.buckets:
        assert all(together[name] <= set(bucket.names) for name in bucket.names if name in together)


def test_places_that_leave_something_out_name_the_tensor():
    with pytest.raises(AssertionError, match="model.embed_tokens.weight: ranks hold 56 of 104 elements"):
        plan_of(TINY, places(TINY, 2, tensor=2)[:1], first_rank)
    with pytest.raises(AssertionError, match="one place a rank"):
        plan_of(TINY, places(TINY, 1) * 2, first_rank)


@pytest.mark.parametrize("bucket_bytes", [1, 300, 5_000, 10**9])
def test_buckets_are_as_full_as_they_can_be(bucket_bytes):
    plan = plan_of(TINY, places(TINY, 1), first_rank, bucket_bytes)
    sizes = [[nbytes(plan.specs[name]) for name in bucket.names] for bucket in plan.buckets]
    assert all(len(size) == 1 or sum(size) <= bucket_bytes for size in sizes)
    for size, following in pairwise(sizes):
        assert sum(size) + following[0] > bucket_bytes * 63 // 64
    assert len(sizes) == {1: len(plan.specs), 10**9: 1}.get(bucket_bytes, len(sizes))
    assert sum(map(sum, sizes)) == 2 * sum(prod(size) for _, size in plan.specs.values())
