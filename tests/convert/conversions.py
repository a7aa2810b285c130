"""Runs conversions in processes of their own, as they make a process group."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from gspo_megatron import convert_to_hf, convert_to_megatron
from gspo_megatron.convert import Ranks
from gspo_megatron.weights.hf_files import read_hf_config
from gspo_megatron.weights.rules import ModelShape
from tests.ranks import REPOSITORY
from tests.ranks import run_ranks


def to_megatron(options: Sequence, num_ranks: int = 1) -> list[str]:
    """`gspo_megatron.convert_to_megatron.convert` for each; raises RuntimeError with its traceback."""
    return run_ranks(_to_megatron, num_ranks, list(options))[0]


def _to_megatron(options: Sequence) -> list[str]:
    return [convert_to_megatron.convert(each) for each in options]


def to_megatron_here(hf, megatron, **options) -> str:
    """Without a process of its own: only for what is refused before a process group is made."""
    return convert_to_megatron.convert(convert_to_megatron.Options(Path(hf), Path(megatron), **options))


def to_hf(megatron, hf, **options) -> str:
    return convert_to_hf.convert(convert_to_hf.Options(Path(megatron), Path(hf), **options), Ranks())


def to_megatron_late(options, seconds: float) -> str:
    """On a rank: one conversion whose ranks other than 0 begin to write when rank 0 has gone on to what joins the
    files, or after `seconds`."""
    import torch.distributed as dist

    write_file = convert_to_megatron._Plan.write_file
    joined = options.megatron.parent / f".{options.megatron.name}.partial" / "__objects_0.distcp"

    def late(plan, *arguments):
        deadline = time.monotonic() + seconds
        while dist.get_rank() and not joined.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return write_file(plan, *arguments)

    convert_to_megatron._Plan.write_file = late
    return convert_to_megatron.convert(options)


def has_experts(directory) -> bool:
    return ModelShape.from_hf(read_hf_config(directory)).num_experts > 0


def tool(name: str, *arguments, num_ranks: int = 0, **options) -> subprocess.CompletedProcess:
    """`python tools/NAME.py ...` to its end, under torchrun where `num_ranks` is given."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--standalone"] if num_ranks else []
    command = [sys.executable, *launcher, f"tools/{name}.py", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, timeout=240, text=True, capture_output=True, **options
    )  # fmt: skip


def hashes(directory: Path) -> dict[str, tuple]:
    """Name -> dtype, shape and hash of every tensor, as the safetensors library reads them."""
    found = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                tensor = tensors.get_tensor(name)
                assert name not in found
                bytes_ = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                found[name] = (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(bytes_).hexdigest())
    index = Path(directory) / "model.safetensors.index.json"
    if index.exists():
        assert set(json.loads(index.read_text())["weight_map"]) == set(found)
    return found


def leftovers(directory: Path, *known: str) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir() if path.name not in known)
