"""The directory that a run writes into."""

import shutil
from pathlib import Path

from gspo_megatron.config import Config, ConfigError
from gspo_megatron.config_loader import dump_config

OUTPUTS = ("metrics.jsonl", "config.yaml", "rollouts", "servers", "hf", "tensorboard", "report.png")
"""What a run leaves behind, and `run.overwrite` removes; anything else in the directory is left alone."""


def prepare_run_dir(config: Config) -> Path:
    """Make run.dir, with the resolved configuration in config.yaml.

    Raises ConfigError where an earlier run's results are there and `run.overwrite` is not set, or it can't be written.
    """
    directory = Path(config.run.dir)
    if (directory / "metrics.jsonl").exists() and not config.run.overwrite:
        raise ConfigError(
            f"run.dir: {directory} holds the results of a run; give another directory, or run.overwrite=true to replace them"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in OUTPUTS:
            target = directory / name
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        (directory / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run.dir: {directory} can't be written ({error.strerror}); give a writable directory") from error
    return directory
