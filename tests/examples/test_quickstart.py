"""The quickstart as a user runs it, shortened, and what is left of it when it is interrupted."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.ranks import REPOSITORY

SHORT = ["train.steps=2", "rollout.prompts_per_step=16", "data.options={size: 200}"]


def start(run_dir, *overrides: str, log) -> subprocess.Popen:
    command = [sys.executable, "examples/quickstart/quickstart.py", f"run.dir={run_dir}", *SHORT, *overrides]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT)


def left_behind(run_dir) -> list[list[str]]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(
            str(run_dir) in word for word in process.info["cmdline"] or ()
        ):
            found.append(process.info["cmdline"])
    return found


def test_a_short_quickstart_trains_and_draws_its_report(tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with log.open("w") as output:
        assert start(run_dir, "run.seed=4", log=output).wait(240) == 0, log.read_text()[-4000:]
    text = log.read_text()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["rollout/logprob_gap_max"] <= 1e-3 for line in lines)
    # Warm-started until it answers about three problems in ten; sixteen prompts are few, so the bound is wide.
    assert 0.05 < lines[0]["reward/mean"] < 0.7
    assert "mean reward, first" in text and "warm start" in text and "step 2/2" in text
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "Warning" not in text, text
    assert not left_behind(run_dir)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_quickstart_leaves_no_process(tmp_path, number):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with log.open("w") as output:
        process = start(run_dir, "train.steps=500", log=output)
        deadline = time.monotonic() + 200
        while "step   2/500" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(60) == 128 + number, log.read_text()[-4000:]
    deadline = time.monotonic() + 20
    while left_behind(run_dir) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left_behind(run_dir) == []


def test_bad_input_is_refused_before_anything_starts(tmp_path):
    log = tmp_path / "log"
    with log.open("w") as output:
        assert start(tmp_path / "run", "train.stepz=3", log=output).wait(30) == 2
    assert "train.stepz: unknown key" in log.read_text() and "did you mean steps" in log.read_text()
    assert not (tmp_path / "run").exists()
