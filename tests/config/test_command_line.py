"""`check` and `train` as a user runs them: exit status, and every fault one line on stderr."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.fakes import TINY, write_checkpoint, write_config

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]} | environment
    command = [sys.executable, "-m", "gspo_megatron", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path, write_checkpoint(tmp_path / "model", TINY))


def test_check_prints_layout_batches_and_memory(config):
    answer = run("check", config, "--world-size", "8", "parallel.tensor=2", "parallel.expert=4")
    assert answer.returncode == 0, answer.stderr
    for part in ("tensor 2 x pipeline 1 x context 1 x data 4", "copies 2", "64 sequences", "MiB", "ok"):
        assert part in answer.stdout, answer.stdout
    assert answer.stderr == ""


def test_check_without_a_world_size_takes_the_smallest(config):
    answer = run("check", config, "parallel.tensor=2", "parallel.expert=4")
    assert answer.returncode == 0 and "the fewest ranks that work, 4" in answer.stdout


def test_check_reports_faults_of_file_rules_and_files_together(config):
    answer = run("check", config, "train.stepz=3", "parallel.tensor=3", "rollout.temperature=0", "--world-size", "7")
    assert answer.returncode == 2
    lines = answer.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "train.stepz", "rollout.temperature", "parallel.tensor", "world size",
    ]  # fmt: skip
    assert "did you mean steps?" in lines[0]


def test_a_key_that_could_not_be_read_is_not_judged_at_its_default(config):
    answer = run("check", config, "run.dir=5")
    assert answer.returncode == 2 and answer.stderr.splitlines() == [
        'run.dir: 5 is an integer, must be text; quote it: "5" (RunConfig.dir)'
    ]


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.steps=many", "train.steps: 'many' is text, must be an integer"),
        ("model.hf=/nonexistent", "model.hf: '/nonexistent' is not a directory"),
        ("rollout.launch.count=1", "exactly one of rollout.servers, rollout.launch and rollout.replay"),
        ("loss.clip_high=0.2", "loss.clip_high: 0.2 is refused"),
        ("megatron.transformer.moe_aux_loss_coeff=0.01", "moe_aux_loss_coeff: 0.01 is refused"),
    ],
)
def test_one_mistake_is_one_line_and_exit_status_2(config, override, part):
    answer = run("check", config, override)
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert part in line


def test_train_refuses_on_every_rank_and_prints_on_the_first(config):
    first = run("train", config, "parallel.tensor=3", RANK="0", WORLD_SIZE="2")
    other = run("train", config, "parallel.tensor=3", RANK="1", WORLD_SIZE="2")
    assert (first.returncode, other.returncode) == (2, 2)
    assert [line.split(":")[0] for line in first.stderr.splitlines()] == ["parallel.tensor", "world size"]
    assert other.stderr == ""


def test_a_config_error_of_the_trainer_is_printed_as_lines(config, tmp_path, monkeypatch, capsys):
    import types

    from gspo_megatron import __main__ as command_line
    from gspo_megatron.config import ConfigError

    def refuse(_config):
        raise ConfigError(["a: wrong", "b: wrong"])

    monkeypatch.setitem(sys.modules, "gspo_megatron.trainer", types.SimpleNamespace(train=refuse))
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a run without torchrun sets a rank's variables
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert command_line.main(["train", str(config)]) == 2
    assert capsys.readouterr().err.splitlines() == ["a: wrong", "b: wrong"]


def test_an_unknown_option_is_refused(config):
    answer = run("check", config, "--word-size", "8")
    assert answer.returncode == 2 and "--word-size" in answer.stderr
