"""The directory of checkpoints of a run: which of them are whole, which is the last, which are kept. No torch here.

    run.dir/checkpoints/step_20/      what the ranks wrote, and run.json: where the run stood, the size of every file
    run.dir/checkpoints/latest.json   {"checkpoint": "step_20"}

A checkpoint is written as step_N.partial, gets its run.json when all ranks are done, and then its name; latest.json
comes last. So whatever has the name step_N was whole once, and what was killed half-way is never looked at.
"""

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.config import CheckpointConfig, Config, ConfigError
from gspo_megatron.weights.partial import sync, take_name

MANIFEST, LATEST = "run.json", "latest.json"


@dataclass(frozen=True)
class SavedRun:
    """Where a run stood when a checkpoint was written."""

    step: int
    """Steps done; the next one to make."""
    weight_version: int
    """What the servers' weights were called."""
    data: dict[str, Any] | None
    """The source's position: PromptSource.state(), or what a run that replays saved rollouts knows of them."""
    world_size: int
    config: dict[str, Any]
    """The resolved configuration, as JSON values."""
    model: dict[str, Any]
    """config.json of the Hugging Face checkpoint that the run started from."""
    directory: Path = Path()
    note: str = ""
    """What to tell the user about why it was this one; empty for the last."""


def checkpoints_dir(config: Config) -> Path:
    return Path(config.run.dir) / "checkpoints"


def find_checkpoint(config: Config) -> SavedRun | None:
    """The checkpoint that a run with this configuration goes on from; None where there is none, or with run.overwrite.

    Raises ConfigError, naming the file, for a last checkpoint that is damaged or gone, unless `checkpoint.fall_back` is
    set and there is a whole one before it.
    """
    if config.run.overwrite:
        return None
    root = checkpoints_dir(config)
    steps = steps_in(root)
    if not steps and not (root / LATEST).exists():
        return None
    last, fault = _last_step(root, steps)
    found = None
    if not fault:
        found, fault = _read(root / f"step_{last}")
    if found is not None:
        return found
    before = [step for step in steps if last is None or step < last]
    for step in reversed(before):
        older, _ = _read(root / f"step_{step}")
        if older is None:
            continue
        if config.checkpoint.fall_back:
            return dataclasses.replace(older, note=f"{fault}: going on from {older.directory} (checkpoint.fall_back)")
        raise ConfigError(
            f"run.dir: {fault}; restore it, or set checkpoint.fall_back=true to go on from step_{step}, the newest whole "
            "one"
        )
    raise ConfigError(
        f"run.dir: {fault}, and no whole checkpoint is before it; restore it, or set run.overwrite=true to start anew"
    )


def steps_in(root: Path) -> list[int]:
    """Steps of the checkpoints that have their name, ascending."""
    names = (re.fullmatch(r"step_(\d+)", path.name) for path in root.glob("step_*"))
    return sorted(int(match[1]) for match in names if match)


def _last_step(root: Path, steps: list[int]) -> tuple[int | None, str]:
    """What latest.json says, or what is wrong with it; without the file (killed before the first) the newest."""
    path = root / LATEST
    if not path.exists():
        return steps[-1], ""
    try:
        match = re.fullmatch(r"step_(\d+)", json.loads(path.read_text(encoding="utf-8"))["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"{path} can't be read ({error})"
    return (int(match[1]), "") if match else (None, f"{path} names no checkpoint")


def _read(directory: Path) -> tuple[SavedRun | None, str]:
    """The checkpoint, or what is wrong with it."""
    path = directory / MANIFEST
    if not path.is_file():
        return None, f"{path} is missing"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        files = values.pop("files")
        saved = SavedRun(**values, directory=directory)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"{path} can't be read ({error})"
    for name, size in files.items():
        file = directory / name
        if not file.is_file():
            return None, f"{file} is missing"
        if file.stat().st_size != size:
            return None, f"{file} is cut off or changed: {file.stat().st_size} bytes, {size} were written"
    return saved, ""


def begin(root: Path, step: int) -> Path:
    """An empty directory to write the checkpoint of `step` into; what was half-written there before is removed."""
    partial = root / f"step_{step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish(partial: Path, saved: SavedRun, keep: CheckpointConfig) -> int:
    """Give a checkpoint that all ranks have written its name, make it the last, and remove those not to be kept.

    Returns its size in bytes.
    """
    root, final = partial.parent, partial.with_suffix("")
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    values = dataclasses.asdict(saved)
    del values["directory"], values["note"]
    _write_json(partial / MANIFEST, {**values, "files": files})
    for path in partial.iterdir():
        sync(path)  # Megatron leaves the small ones to the operating system
    sync(partial)
    replaced = _going(final)  # of a run that was killed after it, or whose last checkpoints were damaged
    partial.rename(final)
    _write_json(root / LATEST, {"checkpoint": final.name})
    sync(root)
    steps = steps_in(root)
    ages = {step: (time.time() - (root / f"step_{step}").stat().st_mtime) / 3600 for step in steps}
    going = [_going(root / f"step_{step}") for step in steps_to_remove(ages, saved.step, keep)]
    for directory in (replaced, *going):
        shutil.rmtree(directory, ignore_errors=True)
    return sum(files.values())


def _going(directory: Path) -> Path:
    """What it is called from now on, until it is removed (by `remove_partial` too)."""
    going = directory.with_name(f"{directory.name}.going.partial")
    if directory.exists():
        take_name(directory, going)
    return going


def steps_to_remove(ages: Mapping[int, float], last: int, keep: CheckpointConfig) -> list[int]:
    """Of checkpoints (step -> hours since it was written) those that the rules of `keep` do not keep; those after
    `last` are of a run that this one has replaced."""
    until_last = sorted(step for step in ages if step <= last)
    kept = set(until_last[-keep.keep :])
    if keep.keep_every:
        kept |= {step for step in until_last if step % keep.keep_every == 0}
    if keep.keep_hours:
        kept |= {step for step in until_last if ages[step] <= keep.keep_hours}
    return sorted(ages.keys() - kept)


def remove_partial(root: Path) -> None:
    """Remove what an earlier run left half-written."""
    for path in root.glob("step_*.partial"):
        shutil.rmtree(path)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    """All or nothing, and on disk when this returns."""
    temporary = path.with_name(f"{path.name}.temporary")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
