"""How well micro-batches are packed and balanced, and how long the plan takes.

    python benchmarks/packing.py [--seeds 40]

512 lengths from a lognormal distribution (median 2,000, sigma 1.0, cut at 16,384 tokens), 8 data-parallel ranks,
micro-batches of at most 16,384 tokens, cost in FLOPs of Qwen3-30B-A3B. Printed are the medians over the seeds and the
worst: micro-batches over the cap, padding, maximum over mean of the ranks' cost, and the lock-step ratio: the sum over
micro-batch index of the slowest rank, over the mean of the ranks' sums.
"""

import argparse
import random
import statistics
import time

from gspo_megatron.algorithm.packing import pack
from gspo_megatron.algorithm.planning import flops_cost, plan_micro_batches

NUM_SEQUENCES, NUM_RANKS, BUDGET = 512, 8, 16384
COST = flops_cost(num_layers=48, num_active_parameters=3_300_000_000, attention_size=32 * 128)


def lengths(seed: int) -> list[int]:
    generator = random.Random(seed)
    return [min(BUDGET, max(1, round(generator.lognormvariate(7.600902, 1.0)))) for _ in range(NUM_SEQUENCES)]


def measure(seed: int) -> dict[str, float]:
    sizes = lengths(seed)
    started = time.perf_counter()
    plan = plan_micro_batches(sizes, NUM_RANKS, BUDGET, COST)
    seconds = time.perf_counter() - started
    costs = [[sum(COST(sizes[i]) for i in micro_batch) for micro_batch in rank] for rank in plan]
    totals = [sum(rank) for rank in costs]
    mean = sum(totals) / NUM_RANKS
    packed = [pack([([1] * (sizes[i] - 1), [1]) for i in micro_batch]) for micro_batch in plan[0]]
    return {
        "over the cap": sum(sum(sizes[i] for i in micro_batch) > BUDGET for rank in plan for micro_batch in rank),
        "padding": sum(p.input_ids.numel() for p in packed) / sum(p.num_tokens for p in packed) - 1,
        "ranks": max(totals) / mean,
        "lock-step": sum(max(column) for column in zip(*costs, strict=True)) / mean,
        "micro-batches a rank": len(plan[0]),
        "milliseconds": seconds * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    rows = [measure(seed) for seed in range(parser.parse_args().seeds)]
    for name in rows[0]:
        values = [row[name] for row in rows]
        print(f"{name:21} median {statistics.median(values):8.4f}   worst {max(values):8.4f}")


if __name__ == "__main__":
    main()
