"""Which checkpoint a run goes on from, which are kept, and what may have changed since."""

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_megatron.checkpoints import (
    SavedRun, begin, checkpoints_dir, find_checkpoint, finish, remove_partial, steps_in, steps_to_remove,
)  # fmt: skip
from gspo_megatron.checks import check_config
from gspo_megatron.config import (
    CheckpointConfig, Config, ConfigError, DataConfig, GRPOConfig, MetricsConfig, ModelConfig, OptimizerConfig,
    ParallelConfig, RegularizerConfig, RolloutConfig, RunConfig, TrainConfig,
)  # fmt: skip
from gspo_megatron.resume import as_json, changed_faults
from tests.kills import Killed, killed_while_removing

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "num_experts": 8,
    "rope_parameters": {"rope_theta": 1e6},
}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    return Config(run=RunConfig(dir=str(tmp_path / "run")), model=ModelConfig(hf=str(tmp_path / "model")))


def state(config, step):
    return SavedRun(step, step, {"epoch": 0, "position": 4 * step, "fingerprint": "f"}, 2, as_json(config), MODEL)


def write(config, step, keep=None) -> Path:
    partial = begin(checkpoints_dir(config), step)
    (partial / "weights").write_bytes(b"x" * 100)
    finish(partial, state(config, step), keep or CheckpointConfig(keep=10))
    return checkpoints_dir(config) / f"step_{step}"


def test_the_last_one_is_found_with_all_that_was_said(config):
    assert find_checkpoint(config) is None
    write(config, 3)
    directory = write(config, 6)
    assert find_checkpoint(config) == replace(state(config, 6), directory=directory)
    assert find_checkpoint(replace(config, run=replace(config.run, overwrite=True))) is None


def test_what_was_killed_half_way_is_not_looked_at(config):
    write(config, 3)
    begin(checkpoints_dir(config), 6)
    assert find_checkpoint(config).step == 3
    write(config, 9)
    (checkpoints_dir(config) / "latest.json").write_text('{"checkpoint": "step_3"}')  # killed before this was replaced
    assert find_checkpoint(config).step == 3
    write(config, 6)
    assert steps_in(checkpoints_dir(config)) == [3, 6]


def test_killed_before_the_first_pointer(config):
    write(config, 3)
    (checkpoints_dir(config) / "latest.json").unlink()
    assert find_checkpoint(config).step == 3


def test_killed_at_any_operation_of_finishing(config, monkeypatch):
    """A start then finds the one before or the new one, whole, and the next checkpoint is made as if nothing was."""
    found = []
    for last in range(100):
        root = checkpoints_dir(config)
        shutil.rmtree(root, ignore_errors=True)
        write(config, 3, CheckpointConfig(keep=1))
        calls = 0

        def counted(operation, last=last):
            def call(*args, **kwargs):
                nonlocal calls
                if calls == last:
                    raise Killed
                calls += 1
                return operation(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for owner, name in ((Path, "rename"), (Path, "replace"), (shutil, "rmtree"), (os, "fsync")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                write(config, 6, CheckpointConfig(keep=1))
                killed = False
            except Killed:
                killed = True
        found.append(find_checkpoint(config).step)
        write(config, 9, CheckpointConfig(keep=1))
        assert find_checkpoint(config).step == 9 and steps_in(root) == [9]
        if not killed:
            break
    assert found == sorted(found) and set(found) == {3, 6} and len(found) >= 7


DAMAGE = {
    "weights": lambda directory: (directory / "weights").write_bytes(b"x" * 60),
    "weights is missing": lambda directory: (directory / "weights").unlink(),
    "run.json": lambda directory: (directory / "run.json").write_text('{"step":'),
    "run.json is missing": lambda directory: (directory / "run.json").unlink(),
    "latest.json": lambda directory: (directory.parent / "latest.json").write_text(""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_named_and_only_passed_over_when_told(config, damage):
    write(config, 3)
    DAMAGE[damage](write(config, 6))
    before = "step_6" if damage == "latest.json" else "step_3"
    with pytest.raises(ConfigError, match=f"{damage}.*checkpoint.fall_back=true to go on from {before}"):
        find_checkpoint(config)
    (fault,) = [fault for fault in check_config(config) if fault.startswith("run.dir: ")]
    assert damage in fault
    found = find_checkpoint(replace(config, checkpoint=CheckpointConfig(fall_back=True)))
    assert found.directory.name == before and damage in found.note


def test_checkpoints_that_are_gone_while_the_pointer_is_there(config):
    """As after a clean-up of old files: the run must not begin anew without a word."""
    shutil.rmtree(write(config, 6))
    with pytest.raises(
        ConfigError, match="step_6/run.json is missing, and no whole checkpoint is before it.*overwrite"
    ):
        find_checkpoint(config)


def test_a_damaged_one_without_another(config):
    DAMAGE["weights"](write(config, 6))
    for fall_back in (False, True):
        with pytest.raises(ConfigError, match="weights is cut off.*: 60 bytes, 100 were written.*run.overwrite=true"):
            find_checkpoint(replace(config, checkpoint=CheckpointConfig(fall_back=fall_back)))


@pytest.mark.parametrize(
    "keep, keep_every, kept",
    [(1, 0, [12]), (2, 0, [10, 12]), (3, 0, [8, 10, 12]), (1, 4, [4, 8, 12]), (9, 0, [2, 4, 6, 8, 10, 12])],
)
def test_keep_rules(config, keep, keep_every, kept):
    for step in range(2, 13, 2):
        write(config, step, CheckpointConfig(keep=keep, keep_every=keep_every))
    assert steps_in(checkpoints_dir(config)) == kept


def test_killed_while_one_is_removed(config):
    """Nothing half-removed has the name of a whole one."""
    write(config, 3)
    with killed_while_removing("weights"):
        write(config, 6, CheckpointConfig(keep=1))
    assert steps_in(checkpoints_dir(config)) == [6] and find_checkpoint(config).step == 6
    write(config, 9, CheckpointConfig(keep=1))
    remove_partial(checkpoints_dir(config))
    assert sorted(path.name for path in checkpoints_dir(config).iterdir()) == ["latest.json", "step_9"]


def test_all_files_are_on_disk_before_a_checkpoint_has_its_name(config, monkeypatch):
    synced, renamed = set(), []
    fsync, rename = os.fsync, Path.rename

    def noted_rename(path, target):
        renamed.append((path.name, {file.stat().st_ino for file in path.iterdir()} - synced))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), fsync(file))[1])
    monkeypatch.setattr(Path, "rename", noted_rename)
    write(config, 3)
    assert renamed == [("step_3.partial", set())]


def test_those_of_a_run_that_was_replaced_go():
    ages = dict.fromkeys([3, 6, 9, 12], 0.0)
    assert steps_to_remove(ages, 6, CheckpointConfig(keep=1, keep_every=3, keep_hours=1.0)) == [9, 12]


def test_those_of_the_last_hours_are_kept(config):
    for step in range(1, 6):
        written = time.time() - 3600 * (5.5 - step)  # 4.5, 3.5, 2.5, 1.5, 0.5 hours ago
        os.utime(write(config, step), (written, written))
    write(config, 6, CheckpointConfig(keep=1, keep_hours=2.0))
    assert steps_in(checkpoints_dir(config)) == [4, 5, 6]


def test_one_that_is_replaced_stays_until_the_new_one_has_its_name(config, monkeypatch):
    write(config, 3)
    rename, seen = Path.rename, []

    def noted_rename(path, target):
        if Path(target).name == "step_3":
            seen.append((Path(target).with_name("step_3.going.partial") / "weights").exists())
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", noted_rename)
    write(config, 3)
    assert seen == [True] and find_checkpoint(config).step == 3
    assert sorted(path.name for path in checkpoints_dir(config).iterdir()) == ["latest.json", "step_3"]


def faults(config, saved_config, model=MODEL):
    return list(changed_faults(config, replace(state(saved_config, 3), model=model, directory=Path("c/step_3"))))


FREE = {
    "parallel": ParallelConfig(tensor=4, pipeline=2),
    "train": TrainConfig(steps=7, tokens_per_micro_batch=99, timeout_s=5.0),
    "metrics": MetricsConfig(writers=("wandb",)),
    "rollout": RolloutConfig(servers=("http://a:1",), concurrency=3, retries=9, save=True),
    "checkpoint": CheckpointConfig(every=1),
}


@pytest.mark.parametrize("section", FREE)
def test_what_may_always_change(config, section):
    assert faults(replace(config, **{section: FREE[section]}), config) == []


REFUSED = {
    "optimizer.lr": ("optimizer", OptimizerConfig(lr=3e-6), "3e-06, but .*step_3 was made with 1e-06"),
    "optimizer.beta2": ("optimizer", OptimizerConfig(beta2=0.9), "0.9, but .*0.98"),
    "loss.clip_low": ("loss", GRPOConfig(), r"0.2, but .*0.0003"),
    "loss.name": ("loss", GRPOConfig(), '"grpo", but .*"gspo"'),
    "data.train": ("data", DataConfig(train="b.jsonl"), '"b.jsonl", but .*""'),
    "data.options.size": ("data", DataConfig(options={"size": 3}), "3, but .*\\(not given\\)"),
    "run.seed": ("run", RunConfig(seed=9), "9, but .*1"),
    "train.dtype": ("train", TrainConfig(dtype="fp32"), '"fp32", but .*"bf16"'),
    "train.updates_per_rollout": ("train", TrainConfig(updates_per_rollout=1), "1, but .*4"),
    "rollout.temperature": ("rollout", RolloutConfig(temperature=0.5), "0.5, but .*1.0"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_refused_unless_allowed(config, key):
    section, value, says = REFUSED[key]
    changed = replace(config, **{section: value})
    found = [fault for fault in faults(changed, config) if fault.startswith(f"{key}: ")]
    assert len(found) == 1
    assert re.search(f"^{key}: {says}; restore it, or add {key} to run.allow_changed", found[0]), found
    for allowed in (key, section):
        now = replace(changed, run=replace(changed.run, allow_changed=(allowed,)))
        assert not [fault for fault in faults(now, config) if fault.startswith(f"{key}: ")]


def test_steps_decide_a_schedule_that_ends_at_them(config):
    cosine = replace(config, optimizer=OptimizerConfig(schedule="cosine"))
    (fault,) = faults(replace(cosine, train=TrainConfig(steps=7)), cosine)
    assert fault.startswith("train.steps: 7, but ")


def test_the_reference_policy_is_the_model_that_a_run_started_from(config, tmp_path):
    moved = (tmp_path / "model").rename(tmp_path / "moved")
    elsewhere = replace(config, model=ModelConfig(hf=str(moved)))
    assert faults(elsewhere, config) == []
    kl = replace(config, regularizer=RegularizerConfig(kl=0.1))
    (fault,) = faults(replace(kl, model=elsewhere.model), kl)
    assert fault.startswith("model.hf: ")


def test_another_model(config):
    (fault,) = faults(config, config, MODEL | {"hidden_size": 128, "transformers_version": "4.0"})
    assert "hidden_size = 64" in fault and "a model with 128" in fault and fault.startswith("model.hf: ")
    allowed = replace(config, run=replace(config.run, allow_changed=("model.hf",)))
    assert faults(allowed, config, MODEL | {"hidden_size": 128}) == []


def test_a_key_newer_than_the_checkpoint_was_at_its_default(config):
    saved = as_json(config)
    del saved["sampling"]
    then = replace(state(config, 3), config=saved)
    assert list(changed_faults(config, then)) == []


def test_a_mistyped_allowance(config):
    now = replace(config, run=replace(config.run, allow_changed=("optimiser.lr",)))
    (fault,) = faults(now, config)
    assert fault.startswith("run.allow_changed: 'optimiser.lr' is no key")


def test_the_preflight_says_what_changed(config):
    write(config, 3)
    found = check_config(replace(config, optimizer=OptimizerConfig(lr=1.0)))
    assert any(fault.startswith("optimizer.lr: 1.0, but ") for fault in found)
    assert not any(fault.startswith("optimizer") for fault in check_config(config))
