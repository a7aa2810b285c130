"""What trainer ranks run to see the routing metrics of a layout."""

import dataclasses
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gspo_megatron.algorithm.losses import gspo
from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.policy import Policy
from gspo_megatron.batches import MicroBatch, mini_batch_loss, plan_rank
from gspo_megatron.config import HealthConfig
from tests.distributed.cases import Case
from tests.distributed.rollout import LOSS, NUM_MINI_BATCHES, NUM_STEPS, load_arrays, make_config

LEARNING_RATE = 5e-3
"""High enough that some of the choices change within a step; Adam's eps of the layouts' tests keeps it smooth."""


def make_policy(model: Path, case: Case, mesh: Mesh, replay: bool = False, health: bool = True) -> Policy:
    config = make_config(model, case)
    return Policy(
        dataclasses.replace(
            config,
            optimizer=dataclasses.replace(config.optimizer, lr=LEARNING_RATE),
            train=dataclasses.replace(config.train, routing_replay=replay),
            health=HealthConfig(routing=health),
        ),
        mesh,
    )


def plan(mesh: Mesh, case: Case, rollouts: Path, step: int) -> list[list[MicroBatch]]:
    arrays, advantages = load_arrays(rollouts, step)
    return plan_rank(
        arrays, advantages, num_mini_batches=NUM_MINI_BATCHES, token_budget=100_000, data_rank=mesh.data_rank,
        data_size=mesh.data_size, parallel=mesh.parallel, least_micro_batches=case.micro_batches,
    )  # fmt: skip


def train_step(policy: Policy, mesh: Mesh, mini_batches: list[list[MicroBatch]], record: bool) -> dict[str, float]:
    """Routing metrics of a step; with them all ranks' counts of `choices` compared and of choices made (`load`), and of
    the first update `loss_count` and the extremes of the ratio."""
    flat = [micro_batch.packed for mini_batch in mini_batches for micro_batch in mini_batch]
    old = iter(policy.log_likelihoods(flat, record_routing=record))
    results = []
    for mini_batch in mini_batches:
        loss = mini_batch_loss(gspo, LOSS, mini_batch, [next(old) for _ in mini_batch], mesh.describe(), mesh.context)
        results.append(policy.update([micro_batch.packed for micro_batch in mini_batch], loss))
    counts = torch.tensor([sum(policy._routing._choices), int(policy._routing._load.sum())])
    dist.all_reduce(counts, group=mesh.world)
    first = {f"first_{name}": float(results[0].metrics[name]) for name in ("ratio_min", "ratio_max", "loss_count")}
    return {**policy.routing_metrics(), "choices": int(counts[0]), "load": int(counts[1]), **first}


def routing_of_cases(
    model: Path, rollouts: Path, cases: Sequence[Case], ports: Sequence[int], settings: dict[str, bool]
) -> list[list[dict[str, Any]]]:
    """[case][step] metrics on this rank, all cases one after the other on the same ranks.

    `settings`: `replay`, `record` (a pass before the updates), `health` (watch at all).
    """
    record = settings.pop("record", True)
    answers = []
    for case, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        mesh = Mesh.create(make_config(model, case).parallel, seed=1, timeout_s=30)
        try:
            policy = make_policy(model, case, mesh, **settings)
            steps = [plan(mesh, case, rollouts, step) for step in range(NUM_STEPS)]
            answers.append([train_step(policy, mesh, mini_batches, record) for mini_batches in steps])
        finally:
            mesh.close()
            gc.collect()
    return answers
