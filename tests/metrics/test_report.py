"""The picture and the table of a run."""

import json
import math
import subprocess
import sys

import pytest

from gspo_megatron.report import summary_table, write_report


def write_run(run_dir, num_steps):
    run_dir.mkdir()
    lines = [
        {
            "step": step,
            "reward/mean": 0.9 - 0.6 * math.exp(-step / 15) + 0.03 * math.sin(step * 1.7),
            "reward/std": 0.2,
            "gspo/clip_fraction_sequences": 0.3 + 0.1 * math.sin(step),
            "gspo/clip_fraction_tokens": 0.35 + 0.1 * math.sin(step),
            "rollout/logprob_gap_mean": 1e-6 * (1 + 0.5 * math.sin(step / 3)),
            "rollout/logprob_gap_max": 2e-5 * (1 + 0.5 * math.cos(step / 3)),
            "time/step_s": 4.0, "time/rollout_s": 2.0, "time/train_s": 1.25,
            "time/log_likelihood_s": 0.5, "time/weight_sync_s": 0.25, "tokens/per_s": 1234.0,
        }
        for step in range(num_steps)
    ]  # fmt: skip
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def test_table(tmp_path):
    lines = write_run(tmp_path / "quickstart", 40)
    text = summary_table(tmp_path / "quickstart")
    first = sum(line["reward/mean"] for line in lines[:3]) / 3
    last = sum(line["reward/mean"] for line in lines[-5:]) / 5
    values = {row.split("│")[1].strip(): row.split("│")[2].strip() for row in text.splitlines() if row.startswith("│")}
    assert values["mean reward, first 3 steps"] == f"{first:.3f}"
    assert values["mean reward, last 5 steps"] == f"{last:.3f}"
    assert values["log-prob gap, max (nats per token)"] == "3.00e-05"
    assert values["rollout (s per step)"] == "2.00" and values["whole step (s per step)"] == "4.00"
    assert values["tokens per second"] == "1,234" and "quickstart: 40 steps" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("num_steps", [1, 2, 40])
def test_picture(tmp_path, num_steps):
    write_run(tmp_path / "run", num_steps)
    path = write_report(tmp_path / "run")
    assert path == tmp_path / "run" / "report.png"
    from matplotlib import image

    height, width, _ = image.imread(path).shape
    assert (width, height) == (1080, 1200)


def test_picture_without_some_metrics(tmp_path):
    """A replayed run has no log-prob gap at all, and a step without trained tokens no clip fractions."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 1.0}\n{"step": 1, "reward/mean": 0.0}\n')
    assert write_report(tmp_path).stat().st_size > 1000
    assert "mean reward" in summary_table(tmp_path) and "gap" not in summary_table(tmp_path)


def test_command_line(tmp_path):
    write_run(tmp_path / "run", 3)
    command = [sys.executable, "-m", "gspo_megatron.report", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "mean reward" in done.stdout and "report.png" in done.stdout
    (tmp_path / "run" / "metrics.jsonl").unlink()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "no finished step" in done.stderr and "Traceback" not in done.stderr
