"""Checkpoints written while training goes on, exports on the way, and runs that end before their first checkpoint."""

import json
import shutil
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.training.replayed import num_lines, release, settings, signal_when, start, write_rollouts
from tests.training.runs import TIMEOUT_S, metrics, train_alone, untimed

NUM_STEPS = 8


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    return write_rollouts(tmp_path_factory.mktemp("rollouts"))


@pytest.fixture(scope="module")
def run_of(tiny_qwen3_moe, rollouts):
    """run_of(run_dir, more...): the arguments of a run of eight steps."""
    fixed = (f"train.steps={NUM_STEPS}", "optimizer.schedule=constant")
    return lambda run_dir, *more: settings(tiny_qwen3_moe, rollouts, run_dir, *fixed, *more)


@pytest.fixture(scope="module")
def whole(run_of, tmp_path_factory):
    """A run without an interruption that saves nothing on the way. Tests must not write into it."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finished = train_alone(run_of(run_dir, "checkpoint.save=false"))
    assert finished.returncode == 0, finished.stdout[-4000:]
    return run_dir


def names(run_dir, pattern="checkpoints/*"):
    return sorted(path.name for path in run_dir.glob(pattern))


def weights(directory):
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same_weights(directory, other):
    ours, theirs = weights(directory), weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_same(run_dir, whole):
    assert untimed(metrics(run_dir)) == untimed(metrics(whole))
    assert_same_weights(run_dir / "hf", whole / "hf")


def goes_on(arguments, step):
    again = train_alone(arguments)
    assert again.returncode == 0, again.stdout[-4000:]
    assert f"going on after step {step} " in again.stdout and "Warning" not in again.stdout, again.stdout


def test_killed_while_files_are_written_beside_training(run_of, whole, tmp_path):
    """The second checkpoint is under way for some steps; the first is what a start finds."""
    run_dir = tmp_path / "run"
    arguments = run_of(run_dir, "checkpoint.async_save=true", "checkpoint.every=2")
    killed = start(arguments, tmp_path / "log", held_files="step_4.partial")

    def trained_on():
        return (run_dir / "checkpoints" / "step_4.partial").exists() and num_lines(run_dir / "metrics.jsonl") == 6

    assert signal_when(killed, trained_on, signal.SIGKILL) == -signal.SIGKILL
    assert names(run_dir) == ["latest.json", "step_2", "step_4.partial"]
    goes_on(arguments, 2)
    assert_same(run_dir, whole)
    assert names(run_dir) == ["latest.json", "step_6", "step_8"]


def test_a_checkpoint_written_beside_training_is_of_its_own_step(run_of, whole, tmp_path):
    """Killed some steps after it was begun: what it holds is what was there then."""
    run_dir = tmp_path / "run"
    arguments = run_of(run_dir, "checkpoint.async_save=true", "checkpoint.every=3")
    log = tmp_path / "log"
    killed = start(arguments, log, held_files="step_3.partial")

    def written_late():
        if num_lines(run_dir / "metrics.jsonl") >= 5:
            release(log)
        return (run_dir / "checkpoints" / "step_3").exists()

    signal_when(killed, written_late, signal.SIGKILL)
    assert num_lines(run_dir / "metrics.jsonl") >= 5
    goes_on(arguments, 3)
    assert_same(run_dir, whole)


def test_a_signal_waits_for_the_checkpoint_under_way(run_of, whole, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = run_of(run_dir, "checkpoint.async_save=true", "checkpoint.every=2")
    process = start(arguments, log, held_files="step_2.partial")
    late = threading.Timer(0, release, [log])

    def under_way():
        if num_lines(run_dir / "metrics.jsonl") < 3:
            return False
        late.interval = 1.0
        late.start()
        return True

    assert signal_when(process, under_way, signal.SIGTERM) == 75, log.read_text()[-4000:]
    late.join()
    done = num_lines(run_dir / "metrics.jsonl")
    said = log.read_text()
    assert done < NUM_STEPS and said.index("checkpoint: step 2,") < said.index(f"step {done} of {NUM_STEPS} is done")
    assert names(run_dir)[0] == "latest.json" and names(run_dir)[-1] == f"step_{done}"
    goes_on(arguments, done)
    assert_same(run_dir, whole)


def test_a_full_disk_beside_training_stops_the_run_by_name(run_of, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = ["checkpoint.async_save=true", "checkpoint.every=2", "export.hf_final=false"]
    process = start(run_of(run_dir, *more), log, largest_file=1_200_000)
    assert process.wait(120) == 1
    assert f"the checkpoint of step 2 can't be written to {run_dir}" in log.read_text(), log.read_text()[-4000:]
    assert "File too large" in log.read_text() and names(run_dir) == []
    assert 2 <= num_lines(run_dir / "metrics.jsonl") <= 4


def test_ended_before_its_first_checkpoint(run_of, whole, tmp_path):
    """The same command starts it again, and what was there is kept; while the first checkpoint was written, too."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = run_of(run_dir, "checkpoint.every=3")
    killed = start(arguments, log, held_files="step_3.partial")
    signal_when(killed, lambda: num_lines(run_dir / "metrics.jsonl") >= 2, signal.SIGKILL)
    killed = start(arguments, log, held_files="step_3.partial")

    def saving_again():  # not the one before, which may have been as far
        started = (run_dir / "metrics.jsonl.1").exists() and num_lines(run_dir / "metrics.jsonl") >= 3
        return started and (run_dir / "checkpoints" / "step_3.partial").exists()

    signal_when(killed, saving_again, signal.SIGKILL)
    again = train_alone(arguments)
    assert again.returncode == 0, again.stdout[-4000:]
    assert "ended before its first checkpoint; starting again, what it left is in metrics.jsonl.2" in again.stdout
    assert_same(run_dir, whole)
    for name, least in (("metrics.jsonl.1", 2), ("metrics.jsonl.2", 3)):
        kept = [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
        assert least <= len(kept) <= 3 and untimed(kept) == untimed(metrics(whole)[: len(kept)])


def test_killed_while_its_only_checkpoint_is_written(run_of, whole, tmp_path):
    """After the last step and the export: the same command makes both again, and keeps what was there."""
    run_dir = tmp_path / "run"
    arguments = run_of(run_dir, "checkpoint.every=0")
    killed = start(arguments, tmp_path / "log", held_files="step_8.partial")
    signal_when(killed, (run_dir / "checkpoints" / "step_8.partial").exists, signal.SIGKILL)
    again = train_alone(arguments)
    assert again.returncode == 0, again.stdout[-4000:]
    assert "what it left is in metrics.jsonl.1, hf.1" in again.stdout
    assert_same(run_dir, whole)
    assert_same_weights(run_dir / "hf.1", whole / "hf")
    assert names(run_dir) == ["latest.json", "step_8"]


def test_a_second_run_in_one_directory_does_no_harm(run_of, whole, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = run_of(run_dir, "checkpoint.every=2")
    first = start(arguments, log, held_files="step_2.partial")
    deadline = time.monotonic() + TIMEOUT_S
    while not (run_dir / "checkpoints" / "step_2.partial").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    second = train_alone(arguments)
    release(log)
    assert second.returncode == 2 and f"run.dir: {run_dir} is written by process {first.pid} on" in second.stdout
    assert first.wait(TIMEOUT_S) == 0, log.read_text()[-4000:]
    assert_same(run_dir, whole)


def test_exports_on_the_way(run_of, whole, tmp_path):
    """Each is the policy of its step, bit for bit; the newest are kept."""
    run_dir = tmp_path / "run"
    finished = train_alone(run_of(run_dir, "export.hf_every=2", "export.keep=2", "export.shard_mib=0.4"))
    assert finished.returncode == 0, finished.stdout[-4000:]
    assert names(run_dir, "hf*") == ["hf", "hf_step_4", "hf_step_6"]
    assert_same(run_dir, whole)
    files = names(run_dir / "hf_step_4", "*.safetensors")
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    four = train_alone(run_of(tmp_path / "four", "train.steps=4", "checkpoint.save=false"))
    assert four.returncode == 0, four.stdout[-4000:]
    assert_same_weights(run_dir / "hf_step_4", tmp_path / "four" / "hf")


def test_killed_while_exporting(run_of, whole, tmp_path):
    """Nothing half-written has a name, or stays; the run goes on and makes the export."""
    run_dir = tmp_path / "run"
    arguments = run_of(run_dir, "export.hf_every=4", "checkpoint.every=2")
    killed = start(arguments, tmp_path / "log", held_files=".hf_step_4.partial")
    signal_when(killed, lambda: any(run_dir.glob(".hf_step_4.partial/*.safetensors")), signal.SIGKILL)
    assert names(run_dir, "*hf*") == [".hf_step_4.partial"]
    goes_on(arguments, 2)
    assert names(run_dir, "*hf*") == ["hf", "hf_step_4"]
    assert_same(run_dir, whole)


def test_a_full_disk_while_exporting_is_named(run_of, whole, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    process = start(run_of(run_dir, "export.hf_every=1", "checkpoint.save=false"), log, largest_file=300_000)
    assert process.wait(120) == 1
    assert "the model can't be exported: " in log.read_text() and "File too large" in log.read_text()
    assert names(run_dir, "*hf*") == []


def test_a_finished_run_without_checkpoints_is_left_alone(run_of, whole, tmp_path):
    run_dir = shutil.copytree(whole, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    again = train_alone(run_of(run_dir, "checkpoint.save=false"))
    assert again.returncode == 2 and "holds the results of a run (metrics.jsonl, hf) that ended" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
