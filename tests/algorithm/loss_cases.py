"""What the tests of losses share: the vectors, random batches, and ranks that each see a part of every sequence."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gspo_megatron.algorithm.loss_metrics import add_metrics
from gspo_megatron.algorithm.losses import LOSSES, from_lists, reduce_metrics
from gspo_megatron.types import SequenceBatch

VECTORS = json.loads((Path(__file__).parents[1] / "data_files" / "gspo_vectors.json").read_text())
RENAMED = {"eps_low": "clip_low", "eps_high": "clip_high", "agg": "aggregation"}


def make_config(loss_name, vector_config):
    return LOSSES[loss_name][0](**{RENAMED.get(key, key): value for key, value in vector_config.items()})


def make_batch(sequences):
    fields = ([sequence[key] for sequence in sequences] for key in ("new", "old", "mask", "adv", "group", "rollout"))
    return from_lists(*fields)


def evaluate(loss_name, config, batch):
    """(loss, [T] gradient) of a whole batch in one micro-batch."""
    out = LOSSES[loss_name][1](config, batch)
    (gradient,) = torch.autograd.grad(out.loss_sum / out.count, batch.log_probs)
    return float(out.loss_sum.detach() / out.count), gradient


def flat(lists):
    return torch.tensor([value for sequence in lists for value in sequence], dtype=torch.float64)


def random_sequences(seed, num_sequences=6, width=0.05, longest=9, gap=0.0):
    """Uneven sequences; some tokens masked out, advantages of both signs, groups of two. `width` and `gap` bound the
    difference of pi_theta and of the rollout policy from pi_old, in nats."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(length, low, high):
        return (torch.rand(length, generator=generator, dtype=torch.float64) * (high - low) + low).tolist()

    sequences = []
    for index in range(num_sequences):
        length = int(torch.randint(1, longest, (1,), generator=generator))
        old = uniform(length, -3.0, -0.1)
        mask = [int(value > 0.3) for value in uniform(length, 0, 1)]
        new = [value + shift for value, shift in zip(old, uniform(length, -width, width), strict=True)]
        (adv,) = uniform(1, -2, 2)
        rollout = [value + shift for value, shift in zip(old, uniform(length, -gap, gap), strict=True)] if gap else old
        sequences.append({"new": new, "old": old, "mask": mask, "adv": adv, "group": index // 2, "rollout": rollout})
    return sequences


def context_parallel_batches(sequences, num_ranks, chunk_of_token):
    """One batch a fake rank; token t of a sequence lives on rank `chunk_of_token(t, length)`.

    `sequence_sum` adds the ranks' parts: each rank runs in a thread and waits for the others, as in an all-reduce.
    """
    barrier, contributions = threading.Barrier(num_ranks, timeout=30), [None] * num_ranks
    batches = []
    for rank in range(num_ranks):
        picks = [[t for t in range(len(s["new"])) if chunk_of_token(t, len(s["new"])) == rank] for s in sequences]
        local = [
            {key: [s[key][t] for t in pick] if isinstance(s[key], list) else s[key] for key in s}
            for s, pick in zip(sequences, picks, strict=True)
        ]
        batch = make_batch(local)

        def all_sum(values, batch=batch, rank=rank):
            contributions[rank] = SequenceBatch._local_sum(batch, values)
            barrier.wait()
            total = sum(contributions)
            barrier.wait()
            return total

        batch.sequence_sum, batch.counts_sequences = all_sum, rank == 0
        # every token is a piece of its own
        positions = [t for pick in picks for t in pick]
        batch.token_chunk = torch.tensor(positions, dtype=torch.long)
        batch.num_chunks = max(len(s["new"]) for s in sequences)
        batch.picks = picks
        batches.append(batch)
    return batches


def run_ranks(loss_name, config, batches):
    return run_functions(lambda batch: LOSSES[loss_name][1](config, batch), batches)


def run_functions(function, batches):
    """(loss, [T] gradient of each rank, metrics) of `function(batch)` on all ranks at once."""
    with ThreadPoolExecutor(len(batches)) as pool:
        outs = list(pool.map(function, batches))
    count = sum(out.count for out in outs)
    gradients = [torch.autograd.grad(o.loss_sum / count, b.log_probs)[0] for o, b in zip(outs, batches, strict=True)]
    metrics = {}
    for out in outs:
        metrics = add_metrics(metrics, out.metrics)
    return float(sum(out.loss_sum.detach() for out in outs) / count), gradients, reduce_metrics(metrics)


def assert_parts_of(gradient, sequences, batches, parts):
    """The gradients [T / R] that emulated context-parallel ranks got are those of their tokens in the whole [T]."""
    starts = [sum(len(s["new"]) for s in sequences[:k]) for k in range(len(sequences))]
    for batch, part in zip(batches, parts, strict=True):
        tokens = [start + t for start, pick in zip(starts, batch.picks, strict=True) for t in pick]
        torch.testing.assert_close(part, gradient[tokens], rtol=1e-12, atol=1e-15)
