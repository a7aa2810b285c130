"""Mini-batch and micro-batch plans: every index once, under the budget, in lock step, deterministic."""

import math
import random

import pytest

from gspo_megatron.algorithm.planning import default_cost, flops_cost, plan_micro_batches, split_mini_batches


def lognormal_lengths(seed, count=512, cap=16384):
    generator = random.Random(seed)
    return [min(cap, max(1, int(2000 * generator.lognormvariate(0.0, 1.0)))) for _ in range(count)]


def check_plan(lengths, plan, num_ranks, budget):
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    micro_batches = [micro_batch for rank in plan for micro_batch in rank]
    assert sorted(index for m in micro_batches for index in m) == list(range(len(lengths)))
    assert max((sum(lengths[i] for i in m) for m in micro_batches), default=0) <= budget
    assert len(plan[0]) >= -(-sum(lengths) // (num_ranks * budget))
    if len(lengths) >= len(micro_batches):
        assert all(micro_batches)


def balance(lengths, plan, cost):
    """(dearest rank / mean rank, time in lock step / mean rank)"""
    table = [[sum(cost(lengths[i]) for i in micro_batch) for micro_batch in rank] for rank in plan]
    totals = [sum(rank) for rank in table]
    mean = sum(totals) / len(totals)
    return max(totals) / mean, sum(max(column) for column in zip(*table, strict=True)) / mean


@pytest.mark.parametrize("seed", range(20))
def test_long_tailed_lengths_are_balanced(seed):
    lengths = lognormal_lengths(seed)
    plan = plan_micro_batches(lengths, num_ranks=8, token_budget=16384)
    check_plan(lengths, plan, 8, 16384)
    assert len(plan[0]) == math.ceil(sum(lengths) / (8 * 16384 * 0.9998)), "more micro-batches than the tokens need"
    ranks, lock_step = balance(lengths, plan, default_cost)
    assert ranks <= 1.01
    assert lock_step <= 1.03


def test_cost_decides():
    lengths = lognormal_lengths(3)
    cost = flops_cost(num_layers=48, num_active_parameters=3_000_000_000, attention_size=4096)
    ranks, lock_step = balance(lengths, plan_micro_batches(lengths, 8, 16384, cost), cost)
    assert ranks <= 1.01 and lock_step <= 1.03
    assert cost(2000) == 6.0 * 2000 * (3e9 + 48 * 4096 * 2000)


@pytest.mark.parametrize("seed", range(150))
def test_random_plans(seed):
    generator = random.Random(seed)
    budget = generator.choice([1, 7, 64, 1000])
    num_ranks = generator.choice([1, 2, 3, 8])
    lengths = [generator.randint(1, budget) for _ in range(generator.choice([0, 1, 2, 5, 17, 60]))]
    plan = plan_micro_batches(lengths, num_ranks, budget)
    check_plan(lengths, plan, num_ranks, budget)
    assert plan == plan_micro_batches(list(lengths), num_ranks, budget)


def test_equal_lengths_divide_evenly():
    plan = plan_micro_batches([10] * 24, num_ranks=4, token_budget=30)
    assert all(len(micro_batch) == 3 for rank in plan for micro_batch in rank) and len(plan[0]) == 2


def test_fewer_sequences_than_ranks_leaves_empty_micro_batches():
    plan = plan_micro_batches([5, 3], num_ranks=4, token_budget=8)
    assert sorted(map(len, (micro_batch for rank in plan for micro_batch in rank))) == [0, 0, 1, 1]


def test_a_sequence_over_the_budget_names_the_key():
    with pytest.raises(ValueError, match="train.tokens_per_micro_batch=100 .* 101 tokens of sequence 1.*raise it"):
        plan_micro_batches([100, 101], 1, 100)


def test_mini_batches_keep_groups_whole_and_in_order():
    groups = [7, 7, 3, 3, 3, 9, 9, 1, 1, 5]
    assert split_mini_batches(groups, 2) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert split_mini_batches(groups, 5) == [[0, 1], [2, 3, 4], [5, 6], [7, 8], [9]]
    sizes = [len({groups[i] for i in batch}) for batch in split_mini_batches(groups, 4)]
    assert sum(sizes) == 5 and max(sizes) - min(sizes) <= 1
    with pytest.raises(ValueError, match="train.updates_per_rollout=6.*the rollout has 5"):
        split_mini_batches(groups, 6)
