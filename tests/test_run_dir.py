"""The run's directory: results are never lost by accident, and config.yaml is the run's configuration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_megatron.checkpoints import SavedRun
from gspo_megatron.config import (
    Config, ConfigError, DataConfig, ExportConfig, GRPOConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig,
)  # fmt: skip
from gspo_megatron.config_loader import load_config
from gspo_megatron.run_dir import OUTPUTS, hold_run_dir, prepare_run_dir
from tests.ranks import REPOSITORY


def config_in(directory: Path, overwrite: bool = False, **sections) -> Config:
    return Config(run=RunConfig(dir=str(directory), overwrite=overwrite), **sections)


def fill(directory: Path, *names: str) -> None:
    """Every name as it is in a run: with a suffix a file, else a directory with a file in it."""
    for name in names:
        path = directory / name if "." in name else directory / name / "inside.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_a_new_directory_holds_the_resolved_configuration(tmp_path):
    config = config_in(tmp_path / "deep" / "run", loss=GRPOConfig(clip_low=0.1), rollout=RolloutConfig(replay="r"))
    directory = prepare_run_dir(config)
    assert directory == tmp_path / "deep" / "run" and files(directory) == {"config.yaml"}
    assert load_config(directory / "config.yaml") == config


@pytest.mark.parametrize("result", ["metrics.jsonl", "rollouts", "hf"])
def test_results_are_refused_and_stay(tmp_path, result):
    fill(tmp_path, result, "config.yaml")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=f"run.dir: .*holds the results of a run \\({result}\\).*run.overwrite=true"):
        prepare_run_dir(config_in(tmp_path))
    assert files(tmp_path) == before and (tmp_path / "config.yaml").read_text() == "config.yaml"


def test_overwrite_removes_what_a_run_leaves_and_nothing_else(tmp_path):
    fill(tmp_path, *OUTPUTS, "model", "notes.txt")
    prepare_run_dir(config_in(tmp_path, overwrite=True))
    assert files(tmp_path) == {"config.yaml", "model/inside.txt", "notes.txt"}
    assert load_config(tmp_path / "config.yaml").run.overwrite


def test_a_start_that_failed_does_not_stand_in_the_way(tmp_path):
    fill(tmp_path, "config.yaml", "servers", "tensorboard")
    prepare_run_dir(config_in(tmp_path))
    assert files(tmp_path) == {"config.yaml"}


@pytest.mark.parametrize(
    "key, output, sections",
    [
        ("model.hf", "hf", lambda place: {"model": ModelConfig(hf=place)}),
        ("model.megatron", "checkpoints", lambda place: {"model": ModelConfig(hf="elsewhere", megatron=place)}),
        ("rollout.replay", "rollouts", lambda place: {"rollout": RolloutConfig(replay=place)}),
        ("data.train", "rollouts", lambda place: {"data": DataConfig(train=f"{place}/inside.txt")}),
    ],
)
@pytest.mark.parametrize("relative", [False, True])
def test_a_run_does_not_remove_its_own_input(tmp_path, monkeypatch, key, output, sections, relative):
    fill(tmp_path / "run", "metrics.jsonl", "hf", "rollouts", "checkpoints")
    before = files(tmp_path)
    monkeypatch.chdir(tmp_path)
    place = f"run/../run/{output}" if relative else str(tmp_path / "run" / output)
    with pytest.raises(ConfigError, match=f"{key}: .*{output}.* lies in run.dir"):
        prepare_run_dir(config_in(tmp_path / "run", overwrite=True, **sections(place)))
    assert files(tmp_path) == before


def test_inputs_elsewhere_and_task_names_are_no_obstacle(tmp_path):
    fill(tmp_path / "run", "metrics.jsonl", "model")
    model, data = ModelConfig(hf=str(tmp_path / "run" / "model")), DataConfig(train="reasoning_gym:chain_sum")
    prepare_run_dir(config_in(tmp_path / "run", overwrite=True, model=model, data=data))
    assert files(tmp_path / "run") == {"config.yaml", "model/inside.txt"}


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path):
    fill(tmp_path, "elsewhere", "run/metrics.jsonl")
    (tmp_path / "run" / "rollouts").symlink_to(tmp_path / "elsewhere")
    prepare_run_dir(config_in(tmp_path / "run", overwrite=True))
    assert files(tmp_path) == {"elsewhere/inside.txt", "run/config.yaml"}
    assert not (tmp_path / "run" / "rollouts").is_symlink()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "run"
    with pytest.raises(ConfigError, match=f"run.dir: {place} can't be written \\(Not a directory\\)"):
        prepare_run_dir(config_in(place))


def test_a_directory_without_permission_is_named(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refused)
    with pytest.raises(ConfigError, match="can't be written \\(Permission denied\\)"):
        prepare_run_dir(config_in(tmp_path / "run"))


def test_exports_of_replaced_steps_that_are_not_made_again_are_set_aside(tmp_path):
    """The run stood at step 3 and had exported 2, 4, 6 and 8; now it exports every third step."""
    fill(tmp_path, "hf_step_2", "hf_step_4", "hf_step_6", "hf_step_8")
    (tmp_path / "hf_step_8.1").mkdir()
    said, saved = [], SavedRun(3, 3, None, 1, {}, {})
    prepare_run_dir(config_in(tmp_path, export=ExportConfig(hf_every=2)), saved, said.append)
    assert said == []
    prepare_run_dir(config_in(tmp_path, export=ExportConfig(hf_every=3)), saved, said.append)
    assert said == [f"{tmp_path}: exports of steps after 3, which are made again, are in hf_step_4.2, hf_step_8.2"]
    names = {"hf_step_2", "hf_step_4.2", "hf_step_6", "hf_step_8.2"}
    assert files(tmp_path) == {"config.yaml", *(f"{name}/inside.txt" for name in names)}


HOLD = """
import sys
from gspo_megatron.config import Config, RunConfig
from gspo_megatron.run_dir import hold_run_dir
with hold_run_dir(Config(run=RunConfig(dir=sys.argv[1]))):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    """Until the first is gone, however it ended."""
    config = config_in(tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, config.run.dir], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    ) as first:  # fmt: skip
        assert first.stdout.readline() == "holds\n"
        with pytest.raises(ConfigError, match=f"run.dir: .*run is written by process {first.pid} on .*; wait for that"):
            with hold_run_dir(config, wait_s=0.2):
                pass
        first.kill()
        with hold_run_dir(config):
            pass


def test_a_place_that_cannot_be_held_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run.dir: .*file/run can't be written .Not a directory"):
        with hold_run_dir(config_in(tmp_path / "file" / "run")):
            pass


@pytest.mark.parametrize("left", [("checkpoints/step_3.partial/w.distcp",), ()])
def test_a_run_killed_before_its_only_checkpoint_was_whole_starts_again(tmp_path, left):
    """It had made all its steps and its export: nothing else says that it did not end."""
    config = config_in(tmp_path, train=TrainConfig(steps=3))
    prepare_run_dir(config)
    fill(tmp_path, "hf", *left)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    said = []
    prepare_run_dir(config, report=said.append)
    assert "ended before its first checkpoint; starting again" in said[0]
    assert files(tmp_path) == {"config.yaml", "hf.1/inside.txt", "metrics.jsonl.1"}
    (tmp_path / "hf").mkdir()
    (tmp_path / "checkpoints").rmdir()  # by somebody who wanted the room
    with pytest.raises(ConfigError, match="holds the results of a run \\(hf\\) that ended"):
        prepare_run_dir(config)
