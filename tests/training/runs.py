"""Starts training runs as a user would, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.ranks import REPOSITORY

CONFIG = str(REPOSITORY / "examples" / "quickstart.yaml")
TIMEOUT_S = 480
UNTIMED = ("time/", "tokens/per_s")


def overrides(model: Path, run_dir: Path, *more: str) -> list[str]:
    """A small run of the quickstart's configuration, scored by a reward that a random model gets something of."""
    return [
        f"model.hf={model}",
        f"run.dir={run_dir}",
        "run.overwrite=false",
        "checkpoint.save=false",
        "reward.name=tests.training.rewards_for_training:share_of_letters",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=8",
        "train.steps=3",
        "data.options={size: 50, min_terms: 2, max_terms: 3}",
        "loss.clip_low=0.01",
        "loss.clip_high=0.01",
        *more,
    ]


def from_servers(url: str) -> list[str]:
    return ["rollout.launch=null", f"rollout.servers=[{url}]"]


def from_files(directory: Path) -> list[str]:
    return ["rollout.launch=null", f"rollout.replay={directory}"]


def train(num_ranks: int, arguments: list[str]) -> subprocess.CompletedProcess:
    """`torchrun -m gspo_megatron train` to its end; its output is in `stdout`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    return _run([*command, "-m", "gspo_megatron", "train", CONFIG, *arguments])


def train_alone(arguments: list[str]) -> subprocess.CompletedProcess:
    """`python -m gspo_megatron train`: one rank, without torchrun."""
    return _run([sys.executable, "-m", "gspo_megatron", "train", CONFIG, *arguments])


def _run(command: list[str]) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, timeout=TIMEOUT_S, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def untimed(lines: list[dict]) -> list[dict]:
    """The metrics without seconds and what is computed from them."""
    return [{key: value for key, value in line.items() if not key.startswith(UNTIMED)} for line in lines]
