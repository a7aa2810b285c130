"""What may differ between a run and the checkpoint that it goes on from. No torch here."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoints import MANIFEST, SavedRun
from gspo_megatron.config import Config

FREE = (
    "run.dir", "run.overwrite", "run.allow_changed", "model.hf", "model.megatron", "parallel", "metrics",
    "health", "export", "checkpoint",
    "weights", "train.steps", "train.tokens_per_micro_batch", "train.timeout_s",
    "rollout.servers", "rollout.launch", "rollout.concurrency", "rollout.request_timeout_s", "rollout.retries",
    "rollout.save", "rollout.replay", "rollout.max_logprob_gap",
    "reward.timeout_s", "reward.workers",
    "megatron.transformer.recompute_granularity", "megatron.transformer.recompute_method",
    "megatron.transformer.recompute_num_layers",
)  # fmt: skip
"""Keys and sections that change where and how fast a run goes, not what it computes. `model.hf` is judged by what its
config.json says, for a checkpoint may be moved. See `_matters` for what takes two of them out."""

IGNORED_OF_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Keys of config.json that say nothing about the model. Its type is train.dtype here."""

NOTHING = "(not given)"
HF_SUBDIRECTORY = "hf"
"""Of a converted checkpoint: config.json and tokenizer files, so that the way back needs nothing else."""


def changed_faults(config: Config, saved: SavedRun, with_model: bool = True) -> Iterable[str]:
    """One line for each setting that differs from the checkpoint's and is neither free nor in `run.allow_changed`;
    `with_model`, for each of its model's too."""
    allowed = config.run.allow_changed
    now, then = flat(as_json(config)), flat(saved.config)
    sections = {name[:end] for name in {**now, **then} for end in _ends(name)}
    for name in allowed:
        if name not in sections:
            yield f"run.allow_changed: {name!r} is no key and no section of the configuration; correct it"
    default = flat(as_json(Config()))
    where = f"the checkpoint {saved.directory}"
    for name in sorted({**now, **then}):
        # a key that is newer than the checkpoint was at its default then
        old, new = then.get(name, default.get(name, NOTHING)), now.get(name, NOTHING)
        if old == new or _covered(name, allowed) or (_covered(name, FREE) and not _matters(name, config)):
            continue
        yield (
            f"{name}: {_text(new)}, but {where} was made with {_text(old)}; restore it, or add {name} to "
            "run.allow_changed to go on with the new value"
        )
    if with_model and not _covered("model.hf", allowed):
        yield from _model_faults(config, saved, where)


def as_json(config: Config) -> dict[str, Any]:
    """The configuration in JSON values, as a checkpoint keeps it."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path -> value."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            result |= flat(value, f"{prefix}{key}.")
        elif value not in ({}, None):  # an empty or absent section is as none
            result[f"{prefix}{key}"] = value
    return result


def _ends(name: str) -> list[int]:
    """Where the sections of a dotted path end, and itself."""
    return [index for index, letter in enumerate(name) if letter == "."] + [len(name)]


def _covered(name: str, keys: Iterable[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def _matters(name: str, config: Config) -> bool:
    """A free key that decides something with these settings: where a schedule ends, what the reference policy is."""
    if name == "train.steps":
        return config.optimizer.schedule != "constant"
    return name in ("model.hf", "model.megatron") and config.regularizer.kl > 0


def _model_faults(config: Config, saved: SavedRun, where: str) -> Iterable[str]:
    path = Path(config.model.hf) / "config.json"
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # the rules about the model say what is wrong with it
    for name, old, new in model_differences(saved.model, model):
        yield (
            f"model.hf: {path} has {name} = {new}, but {where} is of a model with {old}; give that model, or another "
            "run.dir"
        )


def model_differences(then: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Where two config.json tell of different models: (key, old, new), the values as text."""
    old, new = flat(then), flat(now)
    return [
        (name, _text(old.get(name, NOTHING)), _text(new.get(name, NOTHING)))
        for name in sorted({**old, **new})
        if old.get(name, NOTHING) != new.get(name, NOTHING) and not _covered(name, IGNORED_OF_MODEL)
    ]


def model_of_checkpoint(directory: Path) -> dict[str, Any] | None:
    """config.json of the model that a `torch_dist` checkpoint is of: what the converter put into its folder `hf`, or
    what a run's run.json says; None for another program's."""
    for path, key in ((directory / HF_SUBDIRECTORY / "config.json", None), (directory / MANIFEST, "model")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values = values if key is None else values[key]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(values, dict) and values:
            return values
    return None


def _text(value: Any) -> str:
    return value if value == NOTHING else json.dumps(value)
