"""What trainer ranks run in test_family_proofs.py: a checkpoint in, logits, gradients, weights and updates out."""

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from gspo_megatron.algorithm.losses import gspo
from gspo_megatron.algorithm.packing import PackedTokens, pack, sequence_multiple
from gspo_megatron.backend.log_likelihood import LogProbHead
from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.policy import Policy
from gspo_megatron.batches import MicroBatch, mini_batch_loss
from gspo_megatron.config import GSPOConfig
from tests.backend.policy_runs import log_prob_sum, make_config, open_mesh, sequences

VOCABULARY = 513


def whole_logits(self, hidden, labels, mask, weight, group) -> torch.Tensor:
    """In place of LogProbHead.forward: fp32 logits [T, V], padding and all, gathered over the tensor group."""
    weight = self.weight if weight is None else weight
    if self.config.sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
    own = hidden[:, 0].float() @ weight.float().t()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def logits_of(policy: Policy, batches: list[PackedTokens]) -> list:
    """[T, V] of every micro-batch on the last stage, numpy; nothing on others."""
    forward = LogProbHead.forward
    LogProbHead.forward = whole_logits
    try:
        with torch.no_grad():
            outputs = policy._run(batches, forward_only=True)
    finally:
        LogProbHead.forward = forward
    return [values[:, :VOCABULARY].numpy() for values in outputs] if policy.mesh.is_last_stage else []


def exported(policy: Policy) -> dict:
    """Copies as numpy; Policy.hf_tensors gives them on rank 0 alone."""
    return {name: tensor.clone().float().numpy() for name, tensor in policy.hf_tensors()}


def prove(layout: dict, directories: list[str], scratch: str, dtype: str = "fp32") -> list[dict]:
    """For every checkpoint what rank 0 and the last rank know of it."""
    mesh = open_mesh(layout)
    results = [prove_one(mesh, directory, Path(scratch) / str(i), dtype) for i, directory in enumerate(directories)]
    mesh.close()
    return results


def prove_one(mesh: Mesh, directory: str, scratch: Path, dtype: str) -> dict:
    policy = Policy(make_config(directory, mesh.parallel, dtype, lr=1e-3), mesh)
    batches = [
        pack(batch, {"rollout_log_probs": [[0.0] * len(r) for _, r in batch]}, alignment=mesh.parallel.tensor)
        for batch in sequences(VOCABULARY)
    ]
    found = {
        "logits": logits_of(policy, batches),
        "log_probs": [values.numpy() for values in policy.log_likelihoods(batches)],
        "exported": exported(policy),
        "dtypes": {name: str(tensor.dtype) for name, tensor in policy.hf_tensors()},
        "specs": {name: str(spec[0]) for name, spec in policy.hf_tensor_specs.items()},
        "grad_norm": policy.update(batches, log_prob_sum(batches)).grad_norm,
        "updated": exported(policy),
    }
    gradients = {name: param.main_grad.clone() for name, param in policy.params.items() if hasattr(param, "main_grad")}
    found["gspo_grad_norm"] = gspo_update(policy, batches)
    found["after_gspo"] = exported(policy)
    if mesh.rank == 0:
        scratch.mkdir()
    mesh.barrier("the directory")
    policy.save(scratch)
    with torch.no_grad():
        for name, param in policy.params.items():
            param.copy_(gradients.get(name, param))
    found["gradients"] = exported(policy)
    policy.load(scratch, same_layout=True)
    found["loaded"] = exported(policy)
    return found


def gspo_update(policy: Policy, batches: list[PackedTokens]) -> float:
    """Of alternating advantages; the norm of its gradient."""
    old, micro_batches, first = policy.log_likelihoods(batches), [], 0
    for batch in batches:
        signs = torch.tensor([(-1.0) ** (first + i) for i in range(batch.num_sequences)])
        groups = torch.zeros(batch.num_sequences, dtype=torch.int64)
        micro_batches.append(MicroBatch(batch, tuple(range(first, first + batch.num_sequences)), signs, groups))
        first += batch.num_sequences
    loss = mini_batch_loss(gspo, GSPOConfig(), micro_batches, old, policy.mesh.describe())
    return policy.update(batches, loss).grad_norm


def response_log_probs(layout: dict, directories: list[str]) -> list[list]:
    """For every checkpoint the log-probs of each response, numpy, on every rank."""
    mesh, results = open_mesh(layout), []
    multiple = sequence_multiple(mesh.parallel)
    alignment = mesh.parallel.tensor * mesh.parallel.context
    for directory in directories:
        policy = Policy(make_config(directory, mesh.parallel), mesh, train=False)
        batches = [pack(batch, alignment=alignment, sequence_multiple=multiple) for batch in sequences(VOCABULARY)]
        found = zip(batches, policy.log_likelihoods(batches), strict=True)
        results.append([response.numpy() for batch, values in found for response in batch.split(values)])
    mesh.close()
    return results
