"""Made-up rollouts to train on without a server, and runs on them that are killed and started again."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gspo_megatron.rollout.records import save_rollout
from gspo_megatron.types import Rollout, Sample
from tests.ranks import REPOSITORY
from tests.training.runs import CONFIG, TIMEOUT_S, from_files, overrides

VOCABULARY = 512
NUM_GROUPS, GROUP_SIZE, NUM_STEPS = 4, 4, 12


def write_rollouts(directory: Path) -> Path:
    """Four groups of four; responses of 1 to 8 random tokens, rewards drawn, log-probs near those of a random model."""
    for step in range(NUM_STEPS):
        random = np.random.default_rng(step)
        samples = []
        for group in range(NUM_GROUPS):
            prompt = tuple(random.integers(3, VOCABULARY, random.integers(2, 9)).tolist())
            for _ in range(GROUP_SIZE):
                length = int(random.integers(1, 9))
                samples.append(
                    Sample(
                        group=group,
                        prompt_ids=prompt,
                        response_ids=tuple(random.integers(3, VOCABULARY, length).tolist()),
                        rollout_log_probs=tuple((random.normal(0, 0.1, length) - math.log(VOCABULARY)).tolist()),
                        reward=float(random.normal()),
                        finish_reason="stop",
                        weight_version=step,
                    )
                )
        save_rollout(Rollout(tuple(samples)), directory, step)
    return directory


def settings(model: Path, rollouts: Path, run_dir: Path, *more: str) -> list[str]:
    """Twelve steps on one rank, a checkpoint every third one."""
    return overrides(
        model, run_dir, *from_files(rollouts), "parallel.expert=1", f"train.steps={NUM_STEPS}",
        "rollout.prompts_per_step=4", "train.updates_per_rollout=2", "rollout.max_logprob_gap=10",
        "optimizer.schedule=cosine", "optimizer.warmup_steps=3", "checkpoint.save=true", "checkpoint.every=3", *more,
    )  # fmt: skip


def num_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def start(
    arguments: list[str], log: Path, num_ranks: int = 1, largest_file: int | str = "unlimited", held_files: str = ""
) -> subprocess.Popen:
    """`python -m gspo_megatron train`, or with several ranks torchrun, in a process group of its own.

    `largest_file`: bytes that a file can have. `held_files`: files with this in their path are not finished before
    `release(log)` is called.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "HELD_FILES": held_files}
    environment["RELEASE"] = str(_release_of(log))
    module = "tests.training.held_disk" if held_files else "gspo_megatron"
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
    launcher = [] if num_ranks == 1 else torchrun
    limited = ["prlimit", f"--fsize={largest_file}", sys.executable, "-m"]
    with log.open("a") as output:
        return subprocess.Popen(
            [*limited, *launcher, module, "train", CONFIG, *arguments],
            cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def release(log: Path) -> None:
    """Have the files finished that the run of this log holds back."""
    _release_of(log).touch()


def _release_of(log: Path) -> Path:
    return log.with_suffix(".release")


def signal_when(process: subprocess.Popen, condition: Callable[[], bool], number: signal.Signals) -> int:
    """Send `number` to the process, SIGKILL to all that it started too, once the condition holds; its exit status."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, "it ended before the condition held"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    if number == signal.SIGKILL:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    return process.wait(TIMEOUT_S)
