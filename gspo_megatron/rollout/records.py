"""Rollouts as JSON lines, one sample a line: written by `rollout.save`, read by `rollout.replay`."""

import json
import os
from dataclasses import asdict, fields
from pathlib import Path

from gspo_megatron.config import ConfigError
from gspo_megatron.types import Rollout, Sample

_TUPLES = ("prompt_ids", "response_ids", "rollout_log_probs")
_KINDS = {
    "group": (int,), "prompt_ids": (int,), "response_ids": (int,), "rollout_log_probs": (float, int),
    "reward": (float, int), "finish_reason": (str,), "weight_version": (int,),
}  # fmt: skip
"""What JSON may give for each field, or for the items of a list."""


def step_file(directory: str | Path, step: int) -> Path:
    return Path(directory) / f"step_{step}.jsonl"


def save_rollout(rollout: Rollout, directory: str | Path, step: int) -> Path:
    """Write the samples of a step; the file has its name only when it is whole."""
    path = step_file(directory, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for sample in rollout.samples:
            file.write(json.dumps(asdict(sample)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    return path


def load_rollout(directory: str | Path, step: int) -> Rollout:
    """Read a step's samples. Raises ConfigError naming file and line for what is missing or no sample."""
    path = step_file(directory, step)
    if not path.exists():
        raise ConfigError(f"rollout.replay: {path} is missing; lower train.steps or give a directory with this step")
    samples = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rollout.replay: {path} can't be read ({error}); save the rollout again") from error
    for number, line in enumerate(lines, start=1):
        try:
            samples.append(_sample(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"rollout.replay: {path}:{number}: not a sample ({error}); save the rollout again"
            ) from error
    if not samples:
        raise ConfigError(f"rollout.replay: {path} is empty; save the rollout again")
    return Rollout(tuple(samples))


def _sample(values: dict) -> Sample:
    missing = [field.name for field in fields(Sample) if field.name not in values]
    if missing:
        raise KeyError(f"no {', '.join(missing)}")
    sample = Sample(**{f.name: tuple(values[f.name]) if f.name in _TUPLES else values[f.name] for f in fields(Sample)})
    for name, kinds in _KINDS.items():
        value = getattr(sample, name)
        wrong = [x for x in (value if name in _TUPLES else (value,)) if type(x) not in kinds]
        if wrong:
            raise TypeError(f"{name} has {wrong[0]!r}, which is no {' or '.join(kind.__name__ for kind in kinds)}")
    if not sample.prompt_ids:
        raise ValueError("prompt_ids is empty: nothing predicts the first response token")
    if len(sample.rollout_log_probs) != len(sample.response_ids):
        raise ValueError(f"{len(sample.rollout_log_probs)} log-probs for {len(sample.response_ids)} response tokens")
    return sample
