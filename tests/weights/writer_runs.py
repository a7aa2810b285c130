"""What ranks run in test_hf_writer.py: one checkpoint written by all of them."""

import resource
from pathlib import Path

import torch

from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.config import ParallelConfig
from gspo_megatron.weights.hf_writer import write_hf_checkpoint
from tests.weights.hf_directories import random_tensors


def write_together(cases: list[dict]) -> list[str]:
    """For every case the directory that was written, or the error. Rank r hands in the tensors whose number modulo the
    number of ranks is r, in bf16; rank 2 none, the last rank what 2 would have."""
    mesh = Mesh.create(ParallelConfig(), seed=1, timeout_s=60)
    results = []
    for case in cases:
        tensors = random_tensors(case.get("count", 11), torch.bfloat16)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()} | case.get("shapes", {})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if case.get("full_disk") == mesh.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2200, limits[1]))
        try:
            path = write_hf_checkpoint(
                _of_rank(mesh, tensors, case), case["directory"], case["reference"], 300,
                writers=mesh, shapes=shapes, verified=True,
            )  # fmt: skip
            results.append(f"wrote {path.name}")
        except (OSError, ValueError) as error:
            results.append(f"{type(error).__name__}: {error}")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    mesh.close()
    return results


def _of_rank(mesh: Mesh, tensors: dict[str, torch.Tensor], case: dict):
    """Collective, as an export is: a rank that stopped asking would leave the others waiting."""
    for number, (name, tensor) in enumerate(tensors.items()):
        mesh.barrier(f"tensor {name}")
        owner = number % mesh.world_size
        if (3 if owner == 2 else owner) == mesh.rank or case.get("twice") == (name, mesh.rank):
            yield name, tensor


def half_written(parent: str) -> list[str]:
    return sorted(path.name for path in Path(parent).iterdir() if path.name.startswith("."))
