"""How long checkpoints and exports take, and the memory beside the model, against what the disk takes for the bytes.

A made-up Qwen3-MoE of about 300 MB in bf16 on 4 ranks (TP2 PP2 EP2) by default; smaller sizes leave ranks that hold the
same parameters (data parallel). Memory is the most that a rank's resident set rises above what it was; the files are in
the page cache of a machine that has room for them, and on disk (fsync) at the end.

    python benchmarks/saving.py [--layers N] [--hidden N] [--bucket-mib N] [--tensor N] [--pipeline N] [--expert N]
"""

import argparse
import ctypes
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from make_tiny_model import make_tiny_model  # noqa: E402

WORLD, REPEATS = 4, 3


def resident(field: str = "VmRSS") -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def measured(mesh, action: Callable[[], None]) -> tuple[float, int]:
    """Seconds of the slowest rank, and the most extra memory of a rank."""
    mesh.barrier("the start of a measurement")
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before would be used again, and not count
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, started = resident(), time.monotonic()
    action()
    found = [time.monotonic() - started, resident("VmHWM") - before]
    by_rank = mesh.gather_objects(found, "a measurement")
    return max(seconds for seconds, _ in by_rank), max(memory for _, memory in by_rank)


def rank_main(rank: int, port: int, model: str, scratch: str, bucket_mib: float, layout: dict[str, int]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    from gspo_megatron.notices import hide_known_notices

    hide_known_notices(on_gpu=False)
    from gspo_megatron.backend.mesh import Mesh
    from gspo_megatron.backend.policy import Policy
    from gspo_megatron.config import Config, ModelConfig, ParallelConfig, WeightsConfig
    from gspo_megatron.weights.hf_writer import write_hf_checkpoint

    parallel = ParallelConfig(**layout)
    mesh = Mesh.create(parallel, seed=1, timeout_s=300)
    config = Config(model=ModelConfig(model), parallel=parallel, weights=WeightsConfig(bucket_mib=bucket_mib))
    policy = Policy(config, mesh)
    for part in parts(policy):
        part._init_optimizer_states_with_dummy_values()

    def export(senders: str, verified: bool) -> None:
        write_hf_checkpoint(
            policy.hf_tensors(senders), f"{scratch}/hf_{senders}", model,
            writers=mesh, shapes=policy.hf_shapes, verified=verified,
        )  # fmt: skip

    pending = []

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(f"{scratch}/checkpoint", ignore_errors=True)
            Path(f"{scratch}/checkpoint").mkdir()
        mesh.barrier("the directory")
        pending.append(policy.begin_save(Path(f"{scratch}/checkpoint")))

    def finish() -> None:
        last = pending.pop()
        last.write()
        last.finish(300)

    cases = {
        "export, one rank": lambda: export("first", False),
        "export, all ranks": lambda: export("all", False),
        "export, all ranks, verified": lambda: export("all", True),
        "checkpoint: copying (all that an asynchronous save waits for)": begin,
        "checkpoint: writing": finish,
        "checkpoint: reading": lambda: policy.load(Path(f"{scratch}/checkpoint"), same_layout=True),
    }
    found = {name: [] for name in cases}
    for _ in range(REPEATS):
        for name, action in cases.items():
            found[name].append(measured(mesh, action))
    if rank == 0:
        report(found, Path(scratch))
    mesh.close()


def parts(policy) -> list:
    return list(getattr(policy._optimizer, "chained_optimizers", [policy._optimizer]))


def report(found: dict[str, list[tuple[float, int]]], scratch: Path) -> None:
    """Best of the repeats in seconds, the most memory, and the disk's time for the same bytes."""
    floors = {}
    for name in ("hf_all", "checkpoint"):
        files = [path for path in (scratch / name).iterdir() if path.is_file()]
        floors[name] = (sum(path.stat().st_size for path in files), min(copy_seconds(files) for _ in range(REPEATS)))
    for name, values in found.items():
        seconds, memory = min(value[0] for value in values), max(value[1] for value in values)
        print(f"{name}: {seconds:.2f} s, {memory / 2**20:.0f} MiB extra on a rank")
    for name, (size, seconds) in floors.items():
        print(f"{name}: {size / 2**20:.0f} MiB; copying the files and fsync: {seconds:.2f} s")


def copy_seconds(files: list[Path]) -> float:
    with tempfile.TemporaryDirectory(dir=files[0].parent.parent) as target:
        started = time.monotonic()
        for file in files:
            shutil.copyfile(file, Path(target) / file.name)
            with (Path(target) / file.name).open("rb") as copy:
                os.fsync(copy.fileno())
        return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--bucket-mib", type=float, default=32.0)
    for axis in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--{axis}", type=int, default=2)
    options = parser.parse_args()
    sizes = {
        "num_hidden_layers": options.layers, "hidden_size": options.hidden, "num_experts": 16, "vocab_size": 32000,
        "moe_intermediate_size": options.hidden, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        model = str(make_tiny_model("qwen3_moe", Path(scratch) / "model", 1, sizes))
        layout = {axis: getattr(options, axis) for axis in ("tensor", "pipeline", "expert")}
        mp.spawn(rank_main, (port, model, scratch, options.bucket_mib, layout), nprocs=WORLD)


if __name__ == "__main__":
    main()
