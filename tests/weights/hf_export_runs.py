"""What ranks run in test_hf_export.py: a policy of some layout, written as a Hugging Face checkpoint by all ranks."""

from pathlib import Path

import torch

from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.policy import Policy
from gspo_megatron.config import Config, ModelConfig, ParallelConfig, TrainConfig, WeightsConfig
from gspo_megatron.weights.hf_writer import write_hf_checkpoint


def load_and_write(layout: dict, model: str, directory: str, dtype: str) -> list[str]:
    """Names of the files that this rank wrote tensors into, before they got those of the checkpoint."""
    mesh = Mesh.create(ParallelConfig(**layout), seed=1, timeout_s=60)
    config = Config(
        model=ModelConfig(hf=model),
        parallel=mesh.parallel,
        train=TrainConfig(dtype=dtype),
        weights=WeightsConfig(bucket_mib=0.05),
    )
    policy = Policy(config, mesh, train=False)
    with torch.no_grad():
        for param in policy.params.values():
            param.neg_()
    written = set()

    def tensors():
        for name, tensor in policy.hf_tensors("all"):
            written.add(name)
            yield name, tensor

    write_hf_checkpoint(
        tensors(), Path(directory), model, 1 << 18, writers=mesh, shapes=policy.hf_shapes, verified=True
    )  # fmt: skip
    mesh.close()
    return sorted(written)
