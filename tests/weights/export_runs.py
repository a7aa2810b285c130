"""Runs on trainer ranks: weights in from files, and out again as Hugging Face tensors."""

import torch

from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.policy import Policy
from gspo_megatron.config import Config, ModelConfig, ParallelConfig, TrainConfig, WeightsConfig


def load_and_export(layout: dict, directories: list[str]) -> list:
    """For every directory and dtype (fp32, bf16), after the sign of all parameters is turned: [(name, bits of the
    tensor)] in the order of arrival on rank 0, an empty list on others."""
    mesh = Mesh.create(ParallelConfig(**layout), seed=1, timeout_s=60)
    results = []
    for directory in directories:
        for dtype in ("fp32", "bf16"):
            config = Config(
                model=ModelConfig(hf=directory),
                parallel=mesh.parallel,
                train=TrainConfig(dtype=dtype),
                weights=WeightsConfig(bucket_mib=0.05),
            )
            policy = Policy(config, mesh, train=False)
            with torch.no_grad():
                for param in policy.params.values():  # what was loaded must not come from the file a second time
                    param.neg_()
            # twice, since a second sync must give what the first gave
            once = [(name, bits(tensor)) for name, tensor in policy.hf_tensors()]
            again = [(name, bits(tensor)) for name, tensor in policy.hf_tensors()]
            assert [name for name, _ in once] == [name for name, _ in again]
            assert all((a == b).all() for (_, a), (_, b) in zip(once, again, strict=True))
            results.append(once)
    mesh.close()
    return results


def bits(tensor: torch.Tensor):
    """A copy (a bucket's buffer does not live on), as numpy."""
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[tensor.dtype]
    return tensor.detach().clone().view(integers).numpy()
