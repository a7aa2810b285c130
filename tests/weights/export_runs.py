"""Runs on trainer ranks: weights in from files, and out again as Hugging Face tensors."""

import time

import torch

from gspo_megatron.backend.mesh import CollectiveError, Mesh
from gspo_megatron.backend.policy import Policy
from gspo_megatron.config import Config, ModelConfig, ParallelConfig, TrainConfig, WeightsConfig


def load_and_export(layout: dict, directories: list[str]) -> list:
    """For every directory and dtype (fp32, bf16), after the sign of all parameters is turned, and every choice of
    senders: [(name, bits of the tensor)] that this rank got."""
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
            found = {}
            for senders in ("first", "stages", "all"):
                found[senders] = [(name, bits(tensor)) for name, tensor in policy.hf_tensors(senders)]
            # a second sync must give what the first gave
            again = [(name, bits(tensor)) for name, tensor in policy.hf_tensors()]
            assert [name for name, _ in found["first"]] == [name for name, _ in again]
            assert all((a == b).all() for (_, a), (_, b) in zip(found["first"], again, strict=True))
            results.append(found)
    mesh.close()
    return results


def export_without(absent: int, directory: str) -> str:
    """The error of an export in which rank `absent` takes no part."""
    mesh = Mesh.create(ParallelConfig(expert=2), seed=1, timeout_s=5)
    policy = Policy(
        Config(model=ModelConfig(hf=directory), train=TrainConfig(dtype="fp32"), parallel=mesh.parallel), mesh
    )
    if mesh.rank == absent:
        time.sleep(8)
        return ""
    try:
        for _ in policy.hf_tensors():
            pass
    except CollectiveError as error:
        return str(error)
    return "no error"


def bits(tensor: torch.Tensor):
    """A copy (a bucket's buffer does not live on), as numpy."""
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[tensor.dtype]
    return tensor.detach().clone().view(integers).numpy()
