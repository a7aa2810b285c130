"""The directory that a run writes into."""

import shutil
from pathlib import Path

from gspo_megatron.checkpoints import SavedRun, checkpoints_dir, remove_partial
from gspo_megatron.config import Config, ConfigError
from gspo_megatron.config_loader import dump_config

OUTPUTS = ("metrics.jsonl", "config.yaml", "rollouts", "servers", "hf", "checkpoints", "tensorboard", "report.png")
"""What a run leaves behind, and `run.overwrite` removes; anything else in the directory is left alone."""

_RESULTS = ("metrics.jsonl", "rollouts", "hf", "checkpoints")
"""Outputs that are never removed without `run.overwrite`."""


def prepare_run_dir(config: Config, saved: SavedRun | None = None) -> Path:
    """Make run.dir, with the resolved configuration in config.yaml; a run from `saved` on keeps what is there.

    Raises ConfigError where an earlier run's results are there and `run.overwrite` is not set, where this run would
    remove its own input, or where it can't be written.
    """
    directory = Path(config.run.dir)
    if saved is None:
        _refuse_losses(config, directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in OUTPUTS if saved is None else ():
            target = directory / name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        remove_partial(checkpoints_dir(config))
        (directory / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"run.dir: {directory} can't be written ({error.strerror}); give a writable directory"
        ) from error
    return directory


def _refuse_losses(config: Config, directory: Path) -> None:
    """Raises ConfigError for results, and for an input, that lie in what is about to be removed."""
    found = [name for name in _RESULTS if (directory / name).exists()]
    if found and not config.run.overwrite:
        raise ConfigError(
            f"run.dir: {directory} holds the results of a run ({', '.join(found)}); give another directory, "
            "or run.overwrite=true to replace them"
        )
    inputs = {"model.hf": config.model.hf, "rollout.replay": config.rollout.replay, "data.train": config.data.train}
    for key, value in inputs.items():
        for name in OUTPUTS if value else ():
            if Path(value).resolve().is_relative_to((directory / name).resolve()):
                raise ConfigError(
                    f"{key}: {value} lies in run.dir, where this run starts by removing {name}; "
                    "copy it elsewhere or give another run.dir"
                )
