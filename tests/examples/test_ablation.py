"""The ablation's script on saved rollouts: arms, resumption, and what it writes."""

import csv
import json
import os
import subprocess
import sys

import pytest

from tests.ranks import REPOSITORY
from tests.training.replayed import GROUP_SIZE, NUM_GROUPS, write_rollouts

SMALL = [
    f"rollout.prompts_per_step={NUM_GROUPS}", f"rollout.samples_per_prompt={GROUP_SIZE}", "train.updates_per_rollout=2",
    "rollout.max_response_tokens=8", "rollout.max_logprob_gap=10", "optimizer.lr=5e-3",
    "health.max_expert_change=1.0e-6",
]  # fmt: skip


def ablation(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "examples/ablation/ablation.py", *arguments], cwd=REPOSITORY, timeout=240, text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.slow
def test_two_steps_of_three_arms_from_saved_rollouts(tiny_qwen3_moe, tmp_path):
    out = tmp_path / "out"
    common = [f"--out={out}", f"--model={tiny_qwen3_moe}", f"--rollouts={write_rollouts(tmp_path / 'rollouts')}"]
    settings = [*common, "--steps=2", "--seeds=3", *SMALL]
    finished = ablation(*settings, "--arms=gspo,gspo_token")
    assert finished.returncode == 0, finished.stdout[-4000:]
    assert "trained parameters bit for bit equal" in finished.stdout
    # the alarms as a user sees them: on the terminal when they go on, in the metrics of every step
    assert finished.stdout.count("step 1: ALARM expert_change: moe/expert_change_last is") == 2
    lines = [json.loads(line) for line in (out / "gspo" / "seed_3" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["health/alarm_expert_change"] == 1 and line["health/alarms"] >= 1 for line in lines)
    metrics = {arm: (out / arm / "seed_3" / "metrics.jsonl").read_bytes() for arm in ("gspo", "gspo_token")}

    again = ablation(*settings, "--arms=gspo,gspo_token,grpo_replay")  # makes only what is missing
    assert again.returncode == 0, again.stdout[-4000:]
    assert "== seed 3: GRPO with routing replay" in again.stdout and again.stdout.count("== seed") == 1
    assert metrics == {arm: (out / arm / "seed_3" / "metrics.jsonl").read_bytes() for arm in metrics}

    rows = list(csv.DictReader((out / "results.csv").open()))
    assert [(row["arm"], row["step"]) for row in rows] == [
        (arm, str(step)) for arm in ("gspo", "gspo_token", "grpo_replay") for step in range(2)
    ]
    changes = {arm: [float(row["moe/expert_change_last"]) for row in rows if row["arm"] == arm] for arm in metrics}
    assert min(changes["gspo"]) > 0 and changes["gspo"] == changes["gspo_token"]
    assert all(float(row["moe/expert_change_last"]) == 0 for row in rows if row["arm"] == "grpo_replay")
    summary = json.loads((out / "results.json").read_text())
    assert summary["seeds"] == [3] and summary["steps"] == 2
    assert (out / "ablation.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_understood_is_refused(tmp_path):
    assert "--arms gspo_token needs gspo" in ablation(f"--out={tmp_path}", "--arms=gspo_token").stdout
    assert "choose from gspo," in ablation(f"--out={tmp_path}", "--arms=gspo,grp").stdout
    assert "not understood: --stepps" in ablation(f"--out={tmp_path}", "--stepps", "3").stdout
    assert not list(tmp_path.iterdir())
