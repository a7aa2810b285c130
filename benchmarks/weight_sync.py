"""How fast all weights come together as Hugging Face tensors, beside two other ways, on the same ranks in one run.

    torchrun --nproc-per-node 4 benchmarks/weight_sync.py [--tensor 2 --pipeline 2 --expert 2] [--repeats 5]

Ranks on gloo hold a Qwen3-MoE of 266 MiB in bf16 (843 tensors). `ours` brings every tensor to one rank of each
pipeline stage, in buckets; `per-tensor gather` is our own writing of the pattern of slime's weight update; `mbridge` is
the package (`pip install --no-deps --target DIR mbridge`, and DIR on PYTHONPATH), left out where it is not installed.
Printed are: seconds of the slowest rank (median of the repeats, which take turns), MiB of the model a second, how much
the resident memory of a rank rose at most, collectives and messages of rank 0, bytes received by all ranks together,
and those over the lower bound of our export. Every tensor that arrives is compared with what it must be, once.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from ctypes import CDLL
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from weight_sync_peers import (
    FAMILY, Traffic, hf_tensor, mbridge_export, per_tensor_gather, places, rank_parameters,
)  # fmt: skip

from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.config import ParallelConfig
from gspo_megatron.rollout.torchvision_operators import ensure_torchvision_operators
from gspo_megatron.weights.export import export_hf_tensors
from gspo_megatron.weights.plan import hf_shapes
from gspo_megatron.weights.reshard import ReshardPlan, one_per_stage, plan_reshard
from gspo_megatron.weights.rules import ModelShape

SHAPE = ModelShape(
    hidden=512, num_layers=8, num_heads=16, num_kv_heads=4, head_dim=64, ffn=1024, moe_ffn=296, num_experts=32,
    vocab=8192, tied_embeddings=False,
)  # fmt: skip

Export = Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Measured:
    seconds: float
    """Of the slowest rank."""
    extra_bytes: int
    """Rise of the resident memory, on the rank where it was largest."""
    calls: int
    """Collectives and messages of rank 0."""
    moved_bytes: int
    """Received by all ranks together."""


def exports(shape: ModelShape, mesh: Mesh, bucket_bytes: int) -> tuple[ReshardPlan, dict[str, Export]]:
    """The plan of our export, and every way by its name; each is run by all ranks at once."""
    parallel = mesh.parallel
    everyone = places(shape, mesh.world_size, parallel.tensor, parallel.pipeline, parallel.expert)
    params = rank_parameters(shape, everyone[mesh.rank])
    dtypes = dict.fromkeys(hf_shapes(FAMILY, shape), torch.bfloat16)
    plan = plan_reshard(FAMILY, shape, everyone, dtypes, one_per_stage(everyone), bucket_bytes)
    ways: dict[str, Export] = {
        "ours": lambda: export_hf_tensors(params, plan, None, mesh.device),
        "per-tensor gather": lambda: per_tensor_gather(params, shape, everyone, mesh, bucket_bytes),
    }
    if find_spec("mbridge"):
        ensure_torchvision_operators()  # it loads all of transformers
        ways["mbridge"] = lambda: mbridge_export(params, shape, everyone[mesh.rank])
    return plan, ways


def check(export: Export, plan: ReshardPlan, everywhere: bool) -> None:
    """Raises AssertionError for a tensor that is missing, comes twice or is not what it must be.

    `everywhere`: all ranks get all tensors, in place of the plan's senders.
    """
    names = []
    for name, tensor in export():
        assert torch.equal(tensor.view(torch.int16), hf_tensor(name, plan.specs[name][1]).view(torch.int16)), name
        names.append(name)
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, names)
    for got in everyone if everywhere else [[name for part in everyone for name in part]]:
        assert sorted(got) == sorted(plan.specs), set(plan.specs) ^ set(got)


def measure(export: Export) -> Measured:
    gc.collect()
    CDLL(None).malloc_trim(0)
    before = _resident("VmRSS", reset=True)
    dist.barrier()
    started = time.perf_counter()
    with Traffic() as traffic:
        for _ in export():
            pass
    seconds = time.perf_counter() - started
    mine = torch.tensor([seconds, _resident("VmHWM") - before, traffic.received_bytes, 0.0], dtype=torch.float64)
    mine[3] = traffic.calls if dist.get_rank() == 0 else 0
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    values = torch.stack(everyone)
    return Measured(
        float(values[:, 0].max()), int(values[:, 1].max()), int(values[:, 3].sum()), int(values[:, 2].sum())
    )


def _resident(field: str, reset: bool = False) -> int:
    """Bytes of resident memory now (VmRSS) or at most (VmHWM) since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--{axis}", type=int, default=2)
    parser.add_argument("--bucket-mib", type=float, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parallel = ParallelConfig(tensor=options.tensor, pipeline=options.pipeline, expert=options.expert)
    mesh = Mesh.create(parallel, seed=1, timeout_s=120)
    try:
        plan, ways = exports(SHAPE, mesh, int(options.bucket_mib * 2**20))
        for name, export in ways.items():
            check(export, plan, everywhere=name != "ours")
        found: dict[str, list[Measured]] = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, export in ways.items():
                found[name].append(measure(export))
        if mesh.rank == 0:
            print(plan.summary())
            report(found, plan)
    finally:
        mesh.close()


def report(found: dict[str, list[Measured]], plan: ReshardPlan) -> None:
    print(f"{'':18} {'seconds':>8} {'MiB/s':>8} {'extra MiB':>10} {'messages':>9} {'MiB moved':>10} {'of bound':>9}")
    medians = {name: statistics.median(one.seconds for one in values) for name, values in found.items()}
    for name, values in found.items():
        seconds, extra = medians[name], max(one.extra_bytes for one in values)
        bound = values[0].moved_bytes / plan.lower_bound_bytes if plan.lower_bound_bytes else float("nan")
        print(
            f"{name:18} {seconds:8.3f} {plan.total_bytes / 2**20 / seconds:8.0f} {extra / 2**20:10.1f} "
            f"{values[0].calls:9} {values[0].moved_bytes / 2**20:10.0f} {bound:9.2f}"
        )
    for name in list(medians)[1:]:
        print(f"ours is {medians[name] / medians['ours']:.1f} times as fast as {name}")


if __name__ == "__main__":
    main()
