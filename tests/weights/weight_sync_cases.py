"""Runs on trainer ranks: every way of the weight-sync benchmark, at a tiny size."""

from weight_sync import check, exports, measure

from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.config import ParallelConfig
from gspo_megatron.weights.rules import ModelShape


def export_every_way(layout: dict, shape: ModelShape, bucket_bytes: int) -> dict[str, tuple[int, int]]:
    """Name -> messages of rank 0, bytes received by all ranks; each way's tensors are checked."""
    mesh = Mesh.create(ParallelConfig(**layout), seed=1, timeout_s=60)
    plan, ways = exports(shape, mesh, bucket_bytes)
    found = {}
    for name, export in ways.items():
        check(export, plan, everywhere=name != "ours")
        measured = measure(export)
        found[name] = (measured.calls, measured.moved_bytes)
    assert found["ours"] == (plan.messages(0), plan.moved_bytes) or mesh.rank
    mesh.close()
    return found
