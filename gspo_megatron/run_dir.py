"""The directory that a run writes into: what may be removed there, and what is set aside. No torch here."""

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from gspo_megatron.checkpoints import SavedRun, checkpoints_dir, remove_partial, steps_in
from gspo_megatron.config import Config, ConfigError
from gspo_megatron.config_loader import dump_config, load_config
from gspo_megatron.file_lock import take
from gspo_megatron.resume import as_json, changed_faults

OUTPUTS = ("metrics.jsonl", "config.yaml", "rollouts", "servers", "hf", "checkpoints", "tensorboard", "report.png")
"""What a run leaves behind, with hf_step_N, and `run.overwrite` removes; anything else in the directory stays."""

_RESULTS = ("metrics.jsonl", "rollouts", "hf")
"""Outputs that are never removed without `run.overwrite`, as are hf_step_N and whole checkpoints."""
_MADE_ANEW = ("config.yaml", "servers", "checkpoints", "report.png")
"""Outputs that are not worth keeping of a run that starts again from its first step."""


LOCK = ".lock"
"""In run.dir: held by the run that writes there."""
_LOCK_WAIT_S = 10.0
"""For a killed run's processes to be gone."""


@contextlib.contextmanager
def hold_run_dir(config: Config, wait_s: float = _LOCK_WAIT_S) -> Iterator[None]:
    """Hold run.dir until the end of the block or of this process, however it ends: two runs would take each other's
    files away. Raises ConfigError naming the process that holds it, or where it can't be written."""
    directory = Path(config.run.dir)
    with contextlib.ExitStack() as held:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((directory / LOCK).open("a+b"))
        except OSError as error:
            raise _unwritable(directory, error) from error
        owner = take(file, f"process {os.getpid()} on {socket.gethostname()}", wait_s)
        if owner is not None:
            raise ConfigError(
                f"run.dir: {directory} is written by {owner}; wait for that run's end, stop it, or give another "
                "directory"
            )
        yield


def _unwritable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run.dir: {directory} can't be written ({error.strerror}); give a writable directory")


def prepare_run_dir(
    config: Config, saved: SavedRun | None = None, report: Callable[[str], None] = lambda message: None
) -> Path:
    """Make run.dir, with the resolved configuration in config.yaml; a run from `saved` on keeps what is there.

    What a run of the same configuration left that was ended before its first checkpoint is set aside (metrics.jsonl as
    metrics.jsonl.1 and so on), and `report` told so. Raises ConfigError where other results are there and
    `run.overwrite` is not set, where this run would remove its own input, or where it can't be written.
    """
    directory = Path(config.run.dir)
    if saved is None:
        faults = results_in_the_way(config)
        if faults:
            raise ConfigError(faults)
        _refuse_own_input(config, directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if saved is not None:
            _set_aside_replaced(config, saved, directory, report)
        elif not config.run.overwrite:
            _set_aside(directory, report)
        for name in _outputs_in(directory) if saved is None else ():
            target = directory / name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        _remove_half_written(config)
        if config.checkpoint.save:
            checkpoints_dir(config).mkdir(exist_ok=True)  # empty, it says that a run was killed before its first
        (directory / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        raise _unwritable(directory, error) from error
    return directory


def results_in_the_way(config: Config) -> list[str]:
    """Faults, for a run that starts from its first step: results in run.dir that nothing would make again.

    Those of a run that ended before its first checkpoint, with settings under which it could have gone on, are none.
    """
    directory = Path(config.run.dir)
    found = _results_in(config)
    if not found or config.run.overwrite:
        return []
    reason = _why_not_started_again(config, directory)
    if not reason:
        return []
    return [
        f"run.dir: {directory} holds the results of a run ({', '.join(found)}){reason}; give another directory, or "
        "run.overwrite=true to replace them"
    ]


def _results_in(config: Config) -> list[str]:
    directory = Path(config.run.dir)
    found = [name for name in _outputs_in(directory) if name in _RESULTS or name.startswith("hf_step_")]
    return found + (["checkpoints"] if steps_in(checkpoints_dir(config)) else [])


def _outputs_in(directory: Path) -> list[str]:
    exports = sorted(path.name for path in directory.glob("hf_step_*") if path.name.removeprefix("hf_step_").isdigit())
    return [name for name in OUTPUTS if (directory / name).exists() or (directory / name).is_symlink()] + exports


def _why_not_started_again(config: Config, directory: Path) -> str:
    """Why the run whose results are there is not this one, ended before its first checkpoint; empty where it is."""
    if steps_in(checkpoints_dir(config)):
        return " with checkpoints"
    try:
        earlier = load_config(directory / "config.yaml")
    except (OSError, ValueError):
        return " of an unknown configuration (config.yaml can't be read)"
    metrics = directory / "metrics.jsonl"
    num_steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    # one that saves ends with a checkpoint: without any it was killed before, unless somebody removed the directory
    never_saved = earlier.checkpoint.save and checkpoints_dir(config).is_dir()
    if not never_saved and ((directory / "hf").exists() or num_steps >= earlier.train.steps):
        return " that ended"
    changed = list(changed_faults(config, SavedRun(0, 0, None, 1, as_json(earlier), {}, directory), with_model=False))
    return f" of another configuration ({changed[0].split(':')[0]})" if changed else ""


def _set_aside(directory: Path, report: Callable[[str], None]) -> None:
    names = [name for name in _outputs_in(directory) if name not in _MADE_ANEW]
    if not any(name in _RESULTS or name.startswith("hf_step_") for name in names):
        return
    kept = _renamed(directory, names)
    report(f"{directory}: the run here ended before its first checkpoint; starting again, what it left is in {kept}")


def _set_aside_replaced(config: Config, saved: SavedRun, directory: Path, report: Callable[[str], None]) -> None:
    """Exports of steps that are about to be made again, which this run, of another export.hf_every, would leave as they
    are: its metrics would be of other weights."""
    steps = [int(name.removeprefix("hf_step_")) for name in _outputs_in(directory) if name.startswith("hf_step_")]
    every = config.export.hf_every
    names = [f"hf_step_{step}" for step in steps if step > saved.step and (not every or step % every)]
    if names:
        kept = _renamed(directory, names)
        report(f"{directory}: exports of steps after {saved.step}, which are made again, are in {kept}")


def _renamed(directory: Path, names: list[str]) -> str:
    """Give each the first number that all of them can have; their new names."""
    number = 1
    while any((directory / f"{name}.{number}").exists() for name in names):
        number += 1
    for name in names:
        (directory / name).rename(directory / f"{name}.{number}")
    return ", ".join(f"{name}.{number}" for name in names)


def _refuse_own_input(config: Config, directory: Path) -> None:
    """Raises ConfigError for an input that lies in what is about to be removed or renamed."""
    inputs = {"model.hf": config.model.hf, "model.megatron": config.model.megatron}
    inputs |= {"rollout.replay": config.rollout.replay, "data.train": config.data.train}
    for key, value in inputs.items():
        for name in {*OUTPUTS, *_outputs_in(directory)} if value else ():
            if Path(value).resolve().is_relative_to((directory / name).resolve()):
                raise ConfigError(
                    f"{key}: {value} lies in run.dir, where this run starts by removing {name}; "
                    "copy it elsewhere or give another run.dir"
                )


def _remove_half_written(config: Config) -> None:
    from gspo_megatron.weights.hf_writer import remove_half_written  # here: it brings torch

    remove_partial(checkpoints_dir(config))
    for names in ("hf", "hf_step_*"):
        remove_half_written(Path(config.run.dir), names)
