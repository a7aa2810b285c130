"""Trains one case on this rank and collects what is compared: log-probs, losses, gradients and parameters."""

import gc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.algorithm.losses import gspo
from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.policy import Policy
from gspo_megatron.batches import mini_batch_loss, plan_rank
from gspo_megatron.weights.export import export_hf_tensors
from tests.distributed.cases import Case
from tests.distributed.compare import Differences, compare
from tests.distributed.rollout import LOSS, NUM_MINI_BATCHES, NUM_STEPS, load_arrays, make_config


@dataclass(frozen=True)
class Trace:
    """Of both steps, on rank 0."""

    log_probs: list[dict[int, Tensor]]
    """[step][sample] log-probs of the response [R], before the step's updates, 0 where not trained on."""
    losses: list[float]
    """[update] mean over the mini-batch's sequences."""
    grad_norms: list[float]
    metrics: list[dict[str, float]]
    """[update] sums and extremes."""
    gradients: list[dict[str, Tensor]]
    """[update][HF name]."""
    initial: dict[str, Tensor]
    """Parameters by HF name, before and after the two steps."""
    final: dict[str, Tensor]
    replicas: dict[str, float]
    """Parameter -> spread of the sums of its copies; copies that agree have 0."""
    seconds: float


def train_case(model: Path, rollouts: Path, case: Case, dtype: str) -> Trace:
    config = make_config(model, case, dtype)
    mesh = Mesh.create(config.parallel, seed=1, timeout_s=30)
    try:
        policy = Policy(config, mesh)
        initial, gradients = _cloned(policy), _record_gradients(policy)
        started = time.monotonic()
        log_probs, results = [], []
        for step in range(NUM_STEPS):
            step_log_probs, step_results = _train_step(policy, mesh, case, rollouts, step)
            log_probs.append(step_log_probs)
            results += step_results
        seconds = time.monotonic() - started
        return Trace(
            log_probs=log_probs,
            losses=[float(result.metrics["loss_sum"] / result.metrics["loss_count"]) for result in results],
            grad_norms=[result.grad_norm for result in results],
            metrics=[{name: float(value) for name, value in result.metrics.items()} for result in results],
            gradients=gradients,
            initial=initial,
            final=_cloned(policy),
            replicas=_replica_spread(policy, mesh),
            seconds=seconds,
        )
    finally:
        mesh.close()
        gc.collect()


def _train_step(policy: Policy, mesh: Mesh, case: Case, rollouts: Path, step: int):
    arrays, advantages = load_arrays(rollouts, step)
    mini_batches = plan_rank(
        arrays, advantages, num_mini_batches=NUM_MINI_BATCHES, token_budget=100_000, data_rank=mesh.data_rank,
        data_size=mesh.data_size, parallel=mesh.parallel, least_micro_batches=case.micro_batches,
    )  # fmt: skip
    flat = [micro_batch for mini_batch in mini_batches for micro_batch in mini_batch]
    old = policy.log_likelihoods([micro_batch.packed for micro_batch in flat])
    mine = {
        sample: values.clone()
        for micro_batch, log_probs in zip(flat, old, strict=True)
        for sample, values in zip(micro_batch.samples, micro_batch.packed.split(log_probs), strict=True)
    }
    everyone: list[dict[int, Tensor]] = [{}] * mesh.world_size
    dist.all_gather_object(everyone, mine, group=mesh.world)
    remaining, results = iter(old), []
    for mini_batch in mini_batches:
        loss = mini_batch_loss(
            gspo, LOSS, mini_batch, [next(remaining) for _ in mini_batch], mesh.describe(), mesh.context
        )
        results.append(policy.update([micro_batch.packed for micro_batch in mini_batch], loss))
    return {sample: values for part in everyone for sample, values in part.items()}, results


def _cloned(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.hf_tensors()}


def _record_gradients(policy: Policy) -> list[dict[str, Tensor]]:
    """Gradients by HF name of each coming update, as they are before clipping.

    The distributed optimizer leaves each rank its own piece of the summed gradient (`param_and_grad_buffer.py`): the
    pieces are gathered here, then every rank has whole gradients like those of the parameters.
    """
    recorded: list[dict[str, Tensor]] = []
    optimizer_step = policy._optimizer.step

    def step():
        for chunk in policy.chunks:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                ranks = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    own = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, own, group=ranks)
        gradients = {
            name: getattr(param, "main_grad", torch.zeros_like(param))  # a router's selection bias has none
            for name, param in policy.params.items()
        }
        plan = policy.reshard_plan(dtype=torch.float32)
        tensors = export_hf_tensors(gradients, plan, None, policy.mesh.device)
        recorded.append({name: tensor.clone() for name, tensor in tensors})
        return optimizer_step()

    policy._optimizer.step = step
    return recorded


def _replica_spread(policy: Policy, mesh: Mesh) -> dict[str, float]:
    """Where copies of a parameter (data, context; tensor for what is not cut) have drifted apart."""
    place = policy._place
    mine = {}
    for name, param in policy.params.items():
        expert = ".experts." in name
        cut = getattr(param, "tensor_model_parallel", False) or expert
        rank = (place.expert_tensor_rank if expert else place.tensor_rank) if cut else 0
        mine[f"{name} shard {rank}"] = float(param.detach().double().abs().sum())
    everyone: list[dict[str, float]] = [{}] * mesh.world_size
    dist.all_gather_object(everyone, mine, group=mesh.world)
    sums: dict[str, list[float]] = {}
    for part in everyone:
        for name, value in part.items():
            sums.setdefault(name, []).append(value)
    return {name: max(values) - min(values) for name, values in sums.items()}


def train_cases(
    models: Mapping[str, Path], rollouts: Path, cases: Sequence[Case], ports: Sequence[int],
    references: Mapping[str, Path], dtype: str,
) -> list[Differences] | list[Trace]:  # fmt: skip
    """All cases one after the other on the same ranks; rank 0 answers the differences to the traces in `references`
    (family -> file), or without them the traces themselves. Other ranks answer an empty list."""
    is_zero, answers = os.environ["RANK"] == "0", []
    for case, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        trace = train_case(models[case.family], rollouts, case, dtype)
        if is_zero:
            reference = references.get(case.family)
            answers.append(compare(case, trace, torch.load(reference, weights_only=False)) if reference else trace)
            print(f"{case.name}: {trace.seconds:.1f} s", flush=True)
    return answers
