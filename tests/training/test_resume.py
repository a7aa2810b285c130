"""A run that ended early and is started again goes on as if nothing had happened."""

import json
import pickle
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.training.replayed import num_lines, settings, signal_when, start, write_rollouts
from tests.training.runs import from_servers, metrics, overrides, train, train_alone, untimed


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    return write_rollouts(tmp_path_factory.mktemp("rollouts"))


@pytest.fixture(scope="module")
def whole(tiny_qwen3_moe, rollouts, tmp_path_factory):
    """A run of all steps without an interruption. Tests must not write into it."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finished = train_alone(settings(tiny_qwen3_moe, rollouts, run_dir))
    assert finished.returncode == 0, finished.stdout[-4000:]
    assert "Warning" not in finished.stdout, finished.stdout
    return run_dir


def checkpoints(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def assert_same(run_dir, whole):
    assert untimed(metrics(run_dir)) == untimed(metrics(whole))
    ours, theirs = (load_file(directory / "hf" / "model.safetensors") for directory in (run_dir, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


KILLS = {
    "between checkpoints": lambda run_dir: num_lines(run_dir / "metrics.jsonl") == 7,
    "while saving": lambda run_dir: (run_dir / "checkpoints" / "step_6.partial").exists(),
    "as a checkpoint gets its name": lambda run_dir: (run_dir / "checkpoints" / "step_3").exists(),
}


@pytest.mark.parametrize("when", KILLS)
def test_a_killed_run_goes_on_bit_for_bit(tiny_qwen3_moe, rollouts, whole, tmp_path, when):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = settings(tiny_qwen3_moe, rollouts, run_dir)
    killed = start(arguments, log)
    assert signal_when(killed, lambda: KILLS[when](run_dir), signal.SIGKILL) == -signal.SIGKILL
    before = num_lines(run_dir / "metrics.jsonl")
    assert 3 <= before < 12
    if when == "while saving":
        assert "step_6.partial" in checkpoints(run_dir)
    again = train_alone(arguments)
    assert again.returncode == 0, again.stdout[-4000:]
    assert "going on after step" in again.stdout and "step  1/12" not in again.stdout
    assert "Warning" not in again.stdout, again.stdout
    assert_same(run_dir, whole)
    assert checkpoints(run_dir) == checkpoints(whole) == ["latest.json", "step_12", "step_9"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_has_the_run_save_and_end_with_75(tiny_qwen3_moe, rollouts, whole, tmp_path, number):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = settings(tiny_qwen3_moe, rollouts, run_dir, "checkpoint.every=0")
    process = start(arguments, log)
    status = signal_when(process, lambda: num_lines(run_dir / "metrics.jsonl") == 1, number)
    assert status == 75, log.read_text()[-4000:]
    done = num_lines(run_dir / "metrics.jsonl")
    assert checkpoints(run_dir) == ["latest.json", f"step_{done}"] and done < 12
    again = train_alone(arguments)
    assert again.returncode == 0, again.stdout[-4000:]
    assert_same(run_dir, whole)


@pytest.mark.slow
def test_torchrun_passes_sigterm_on_and_all_ranks_save(tiny_qwen3_moe, rollouts, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = settings(tiny_qwen3_moe, rollouts, run_dir, "parallel.expert=2")
    process = start(arguments, log, num_ranks=2)
    assert signal_when(process, lambda: num_lines(run_dir / "metrics.jsonl") == 1, signal.SIGTERM) != 0
    assert "is done and saved; start again to go on" in log.read_text(), log.read_text()[-4000:]
    done = num_lines(run_dir / "metrics.jsonl")
    assert done < 12 and f"step_{done}" in checkpoints(run_dir)
    again = train(2, arguments)
    assert again.returncode == 0, again.stdout[-4000:]
    uninterrupted = train(2, settings(tiny_qwen3_moe, rollouts, tmp_path / "whole", "parallel.expert=2"))
    assert uninterrupted.returncode == 0, uninterrupted.stdout[-4000:]
    assert_same(run_dir, tmp_path / "whole")


def test_a_full_disk_is_named_and_leaves_the_last_checkpoint(tiny_qwen3_moe, rollouts, whole, tmp_path):
    """A bound on the size of files stands for the disk; the exported model is smaller than it, the checkpoint is
    not."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(whole, run_dir)
    (run_dir / "checkpoints" / "latest.json").write_text('{"checkpoint": "step_9"}')
    process = start(settings(tiny_qwen3_moe, rollouts, run_dir, "checkpoint.every=1"), log, largest_file=1_200_000)
    assert process.wait(120) == 1
    assert f"the checkpoint of step 10 can't be written to {run_dir}" in log.read_text(), log.read_text()[-4000:]
    assert checkpoints(run_dir) == ["latest.json", "step_12", "step_9"]
    again = train_alone(settings(tiny_qwen3_moe, rollouts, run_dir))
    assert again.returncode == 0, again.stdout[-4000:]
    assert_same(run_dir, whole)


def test_a_finished_run_has_nothing_left_to_do(tiny_qwen3_moe, rollouts, whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    again = train_alone(settings(tiny_qwen3_moe, rollouts, whole))
    assert again.returncode == 0 and "all 12 train.steps are done" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_overwrite_starts_anew(tiny_qwen3_moe, rollouts, whole, tmp_path):
    run_dir = shutil.copytree(whole, tmp_path / "run")
    again = train_alone(settings(tiny_qwen3_moe, rollouts, run_dir, "run.overwrite=true", "checkpoint.save=false"))
    assert again.returncode == 0, again.stdout[-4000:]
    assert "going on" not in again.stdout
    assert_same(run_dir, whole)
    assert not (run_dir / "checkpoints").exists()


def test_allowed_changes_take_effect(tiny_qwen3_moe, rollouts, whole, tmp_path):
    """The new learning rate holds from the checkpoint on, which makes the same step with the same weights."""
    run_dir = shutil.copytree(whole, tmp_path / "run")
    (run_dir / "checkpoints" / "latest.json").write_text('{"checkpoint": "step_9"}')
    more = ["optimizer.lr=1e-9", "run.allow_changed=[optimizer.lr]"]
    again = train_alone(settings(tiny_qwen3_moe, rollouts, run_dir, *more))
    assert again.returncode == 0, again.stdout[-4000:]
    ours, theirs = metrics(run_dir), metrics(whole)
    assert untimed(ours[:9]) == untimed(theirs[:9])
    assert ours[9]["reward/mean"] == theirs[9]["reward/mean"]
    assert ours[9]["learning_rate"] < 2e-9 < theirs[9]["learning_rate"]
    assert ours[9]["rollout/logprob_gap_mean"] == theirs[9]["rollout/logprob_gap_mean"]


@pytest.mark.slow
def test_another_layout_goes_on(tiny_qwen3_moe, rollouts, tmp_path):
    """TP2 on two ranks, then PP2 EP2 on four; against TP2 all the way."""
    run_dir, straight = tmp_path / "run", tmp_path / "straight"
    one, two = ["parallel.tensor=2"], ["parallel.pipeline=2", "parallel.expert=2"]

    def run(num_ranks, directory, steps, *layout):
        more = ["optimizer.schedule=constant", f"train.steps={steps}"]
        finished = train(num_ranks, settings(tiny_qwen3_moe, rollouts, directory, *layout, *more))
        assert finished.returncode == 0, finished.stdout[-4000:]
        return finished.stdout

    run(2, straight, 5, *one)
    run(2, run_dir, 3, *one)
    assert "of another layout" in run(4, run_dir, 5, *two)
    ours, theirs = metrics(run_dir), metrics(straight)
    assert [line["step"] for line in ours] == list(range(5))
    for step in range(5):
        for key in ("reward/mean", "gspo/ratio_mean", "rollout/logprob_gap_mean", "learning_rate"):
            assert ours[step][key] == pytest.approx(theirs[step][key], rel=1e-4, abs=1e-7), (step, key)
        assert ours[step]["grad_norm"] == pytest.approx(theirs[step]["grad_norm"], rel=1e-2), step


@pytest.mark.slow
def test_live_prompts_go_on_in_their_order(sglang_server, tmp_path):
    url, model = sglang_server
    run_dir, whole = tmp_path / "run", tmp_path / "whole"

    def arguments(directory):
        more = ["train.steps=4", "rollout.save=true", "checkpoint.save=true", "checkpoint.every=2", "parallel.expert=1"]
        return overrides(model, directory, *from_servers(url), *more)

    def prompts(directory):
        files = [directory / "rollouts" / f"step_{step}.jsonl" for step in range(4)]
        return [json.loads(line)["prompt_ids"] for file in files for line in file.read_text().splitlines()]

    finished = train_alone(arguments(whole))
    assert finished.returncode == 0, finished.stdout[-4000:]
    killed = start(arguments(run_dir), tmp_path / "log")
    signal_when(killed, lambda: num_lines(run_dir / "metrics.jsonl") == 3, signal.SIGKILL)
    again = train_alone(arguments(run_dir))
    assert again.returncode == 0, again.stdout[-4000:]
    assert "going on after step 2" in again.stdout
    assert "every parameter of the servers proven covered" in again.stdout
    assert prompts(run_dir) == prompts(whole)
    for line in metrics(run_dir):
        assert line["rollout/weight_version"] == line["step"]
        assert line["rollout/logprob_gap_max"] <= 1e-3, line


class Touch:
    """A pickle that makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def spoil_object(directory, touch):
    """The generators come from a file of their own, with a call of `open` in it."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    (index,) = [index for index in metadata.storage_data if index.fqn.startswith("generators")]
    torch.save([touch], directory / "spoilt.distcp")
    length = (directory / "spoilt.distcp").stat().st_size
    metadata.storage_data[index] = replace(
        metadata.storage_data[index], relative_path="spoilt.distcp", offset=0, length=length
    )
    path.write_bytes(pickle.dumps(metadata))


CODE = {
    ".metadata": lambda directory, touch: (directory / ".metadata").write_bytes(pickle.dumps(touch)),
    "common.pt": lambda directory, touch: (directory / "common.pt").write_bytes(pickle.dumps(touch)),
    "generators": spoil_object,
}


@pytest.mark.parametrize("where", CODE)
def test_code_in_a_checkpoint_is_not_run(tiny_qwen3_moe, rollouts, whole, tmp_path, where):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    directory = run_dir / "checkpoints" / "step_9"
    shutil.rmtree(run_dir / "checkpoints" / "step_12")
    (run_dir / "checkpoints" / "latest.json").write_text('{"checkpoint": "step_9"}')
    CODE[where](directory, Touch(tmp_path / "touched"))
    manifest = json.loads((directory / "run.json").read_text())
    manifest["files"] = {name: (directory / name).stat().st_size for name in manifest["files"]}
    (directory / "run.json").write_text(json.dumps(manifest))
    refused = train_alone(settings(tiny_qwen3_moe, rollouts, run_dir))
    assert refused.returncode == 2, refused.stdout[-4000:]
    assert f"the checkpoint {directory} can't be loaded" in refused.stdout
    assert where in refused.stdout and "not loaded" in refused.stdout, refused.stdout[-4000:]
    assert not (tmp_path / "touched").exists()
