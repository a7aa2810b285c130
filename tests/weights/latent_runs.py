"""What ranks run in test_latent_families.py: log-probs, gradients, updates and weights out of a real policy."""

import random
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "backend"))

from policy_runs import log_prob_sum, make_config, open_mesh, sequences  # noqa: E402

from gspo_megatron.algorithm.losses import gspo  # noqa: E402
from gspo_megatron.algorithm.packing import pack, sequence_multiple  # noqa: E402
from gspo_megatron.backend.policy import Policy  # noqa: E402
from gspo_megatron.batches import MicroBatch, mini_batch_loss  # noqa: E402
from gspo_megatron.config import GSPOConfig  # noqa: E402


def _exported(policy: Policy) -> dict[str, np.ndarray]:
    """HF name -> a copy; bf16 as its bits, int16."""
    return {
        name: (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).clone().numpy()
        for name, tensor in policy.hf_tensors()
    }


def proof(layout: dict, directories: list[str]) -> list[dict]:
    """For every checkpoint: what it exports before any update, log-probs by response, the gradient's norm, and (rank 0)
    the gradient by HF names, whole where nothing is data- or context-parallel."""
    mesh, results = open_mesh(layout), []
    alignment = mesh.parallel.tensor * mesh.parallel.context
    for directory in directories:
        policy = Policy(make_config(directory, mesh.parallel), mesh)
        before = _exported(policy)
        micro_batches = [
            pack(batch, alignment=alignment, sequence_multiple=sequence_multiple(mesh.parallel))
            for batch in sequences()
        ]
        log_probs = policy.log_likelihoods(micro_batches)
        whole = log_prob_sum(micro_batches)

        def loss(index, values, whole=whole):
            out = whole(index, values)
            return out._replace(count=out.count * mesh.context.counts_sequences)

        update = policy.update(micro_batches, loss)
        with torch.no_grad():
            for param in policy.params.values():
                if hasattr(param, "main_grad"):  # a router's bias has none
                    param.copy_(param.main_grad)
        responses = [
            response.numpy()
            for batch, values in zip(micro_batches, log_probs, strict=True)
            for response in batch.split(values)
        ]
        results.append(
            {"exported": before, "responses": responses, "norm": update.grad_norm, "gradients": _exported(policy)}
        )
    mesh.close()
    return results


def gspo_updates(layout: dict, directory: str, dtype: str) -> dict:
    """Two GSPO updates on one rollout of 4 groups of 4: what is exported before and after, both updates' metrics."""
    mesh, generator = open_mesh(layout), random.Random(1)
    policy = Policy(make_config(directory, mesh.parallel, dtype, lr=1e-3, clip_grad=1.0), mesh)

    def ids(length: int) -> list[int]:
        return [generator.randrange(3, 500) for _ in range(length)]

    batches = []
    for group in range(4):
        prompt = ids(5)
        pairs = [(prompt, ids(generator.randint(1, 9))) for _ in range(4)]
        sampled = [[-6.0] * len(response) for _, response in pairs]
        packed = pack(pairs, {"rollout_log_probs": sampled}, alignment=mesh.parallel.tensor)
        samples = tuple(range(4 * group, 4 * group + 4))
        advantages = torch.tensor([1.5, -0.5, -0.5, -0.5])
        batches.append(MicroBatch(packed, samples, advantages, torch.full((4,), group)))
    before = _exported(policy)
    old = policy.log_likelihoods([batch.packed for batch in batches])
    loss = mini_batch_loss(gspo, GSPOConfig(), batches, old, mesh.describe())
    updates = [policy.update([batch.packed for batch in batches], loss) for _ in range(2)]
    metrics = [{name: float(value) for name, value in update.metrics.items()} for update in updates]
    result = {"before": before, "after": _exported(policy), "metrics": metrics}
    result["norms"] = [update.grad_norm for update in updates]
    mesh.close()
    return result
