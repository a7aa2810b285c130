"""Runs conversions in processes of their own, as they make a process group."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from gspo_megatron.weights.hf_files import read_hf_config
from gspo_megatron.weights.rules import ModelShape
from tests.ranks import REPOSITORY
from tests.ranks import run_ranks


def to_megatron(options: Sequence, num_ranks: int = 1) -> list[str]:
    """`gspo_megatron.convert_to_megatron.convert` for each; raises RuntimeError with its traceback."""
    return run_ranks(_to_megatron, num_ranks, list(options))[0]


def _to_megatron(options: Sequence) -> list[str]:
    from gspo_megatron.convert_to_megatron import convert

    return [convert(each) for each in options]


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
