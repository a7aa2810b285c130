"""The run's directory: results are never lost by accident, and config.yaml is the run's configuration."""

from pathlib import Path

import pytest

from gspo_megatron.config import Config, ConfigError, DataConfig, GRPOConfig, ModelConfig, RolloutConfig, RunConfig
from gspo_megatron.config_loader import load_config
from gspo_megatron.run_dir import OUTPUTS, prepare_run_dir


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
        ("rollout.replay", "rollouts", lambda place: {"rollout": RolloutConfig(replay=place)}),
        ("data.train", "rollouts", lambda place: {"data": DataConfig(train=f"{place}/inside.txt")}),
    ],
)
@pytest.mark.parametrize("relative", [False, True])
def test_a_run_does_not_remove_its_own_input(tmp_path, monkeypatch, key, output, sections, relative):
    fill(tmp_path / "run", "metrics.jsonl", "hf", "rollouts")
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
