"""Every rule that a configuration must obey before a process group starts: `check_config`.

A rule looks at one thing and gives its faults, one line each: key, value, what is allowed, what to do. No torch here.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gspo_megatron.config import Config
from gspo_megatron.guards import GUARDS, algorithm_faults
from gspo_megatron.layout import layout_of, world_step
from gspo_megatron.model_files import ModelInfo, read_model, tokenizer_faults, weight_faults
from gspo_megatron.plugins import MODULE_FUNCTION

__all__ = ["GUARDS", "NOT_BUILT", "RANGES", "check_config"]

NOT_BUILT = ("parallel.context", "parallel.virtual_pipeline", "parallel.expert_tensor")
"""Axes that the configuration knows and the backend does not build yet: only 1 is accepted."""

_RESERVED_SERVER_ARGS = ("model", "model-path", "host", "port", "tp", "tp-size", "tensor-parallel-size", "device")


def at_least(low: float) -> tuple[str, Callable[[Any], bool]]:
    return f"at least {low}", lambda value: value >= low


def above(low: float) -> tuple[str, Callable[[Any], bool]]:
    return f"above {low}", lambda value: value > low


def within(low: float, high: float) -> tuple[str, Callable[[Any], bool]]:
    return f"from {low} to {high}", lambda value: low <= value <= high


_FRACTION = ("at least 0 and below 1", lambda value: 0 <= value < 1)

RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **{f"parallel.{axis}": at_least(1) for axis in ("tensor", "pipeline", "virtual_pipeline", "context", "expert")},
    "parallel.expert_tensor": at_least(1),
    "run.seed": within(0, 2**31 - 1),
    "advantage.eps": at_least(0),
    "advantage.equal_tolerance": at_least(0),
    "correction.token_cap": above(0),
    "correction.sequence_cap": above(0),
    "correction.off_policy_delta": at_least(0),
    "regularizer.kl": at_least(0),
    "regularizer.entropy": at_least(0),
    "sampling.oversample": at_least(1),
    "sampling.max_rounds": at_least(1),
    "train.steps": at_least(1),
    "train.updates_per_rollout": at_least(1),
    "train.timeout_s": above(0),
    "optimizer.lr": above(0),
    "optimizer.min_lr": at_least(0),
    "optimizer.warmup_steps": at_least(0),
    "optimizer.beta1": _FRACTION,
    "optimizer.beta2": _FRACTION,
    "optimizer.eps": above(0),
    "optimizer.weight_decay": at_least(0),
    "optimizer.clip_grad": at_least(0),
    "rollout.prompts_per_step": at_least(1),
    "rollout.samples_per_prompt": (
        "at least 2: the advantage compares samples of one prompt",
        lambda value: value >= 2,
    ),
    "rollout.max_response_tokens": at_least(1),
    "rollout.temperature": ("above 0: the trainer divides its logits by it", lambda value: value > 0),
    "rollout.top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "rollout.top_k": at_least(0),
    "rollout.concurrency": at_least(1),
    "rollout.request_timeout_s": above(0),
    "rollout.retries": at_least(0),
    "rollout.max_logprob_gap": above(0),
    "rollout.launch.count": at_least(1),
    "rollout.launch.tensor_parallel": at_least(1),
    "rollout.launch.first_device": at_least(0),
    "rollout.launch.ready_timeout_s": above(0),
    "weights.bucket_mib": above(0),
    "weights.timeout_s": above(0),
    "data.max_prompt_tokens": at_least(1),
    "reward.timeout_s": above(0),
    "reward.workers": at_least(1),
    "reward.soft_overlong.cache_tokens": at_least(1),
    "reward.soft_overlong.factor": at_least(0),
    "reward.length.coefficient": at_least(0),
    "reward.repetition.coefficient": at_least(0),
    "reward.repetition.ngram": at_least(1),
    "reward.verbosity.coefficient": at_least(0),
}
"""Key -> the values allowed, in words and as a test."""


def check_config(config: Config, world_size: int | None = None) -> list[str]:
    """All faults of `config`, one line each; an empty list means that it can run on `world_size` ranks.

    Without a world size the rules about it are left out.
    """
    faults = [*_ranges(config), *_not_built(config), *_run(config), *_sources(config)]
    faults += algorithm_faults(config)
    faults += [*_data(config), *_reward(config), *_batches(config), *_timeouts(config), *_metrics(config)]
    model = None
    if not config.model.hf:
        faults.append("model.hf: required; give the directory of a Hugging Face checkpoint")
    else:
        directory = Path(config.model.hf)
        model, found = read_model(directory)
        faults += found
        if (directory / "config.json").is_file():
            faults += [*tokenizer_faults(directory), *weight_faults(directory)]
    if model is not None:
        faults += [*_topology(config, model), *_lengths(config, model)]
    if world_size is not None and not any(fault.startswith("parallel.") for fault in _ranges(config)):
        faults += _world(config, world_size)
    return faults


def _value(config: Config, path: str) -> Any:
    """The value at a dotted path; None below a section that is not there."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name) if value is not None else None
    return value


def _ranges(config: Config) -> Iterable[str]:
    for path, (allowed, test) in RANGES.items():
        value = _value(config, path)
        if value is not None and not test(value):
            yield f"{path}: {value} is out of range, must be {allowed}"
    if config.optimizer.min_lr > config.optimizer.lr > 0:
        yield f"optimizer.min_lr: {config.optimizer.min_lr} is above optimizer.lr ({config.optimizer.lr}); lower it"


def _not_built(config: Config) -> Iterable[str]:
    for path in NOT_BUILT:
        if _value(config, path) > 1:
            yield f"{path}: {_value(config, path)} is not supported by this version, only 1 is; set it to 1"


def _run(config: Config) -> Iterable[str]:
    run = config.run
    if not run.dir:
        yield "run.dir: required; give a directory for what the run writes"
        return
    directory = Path(run.dir)
    if directory.exists() and not directory.is_dir():
        yield f"run.dir: {run.dir!r} is a file; give a directory"
    elif (directory / "metrics.jsonl").exists() and not run.overwrite:
        yield (
            f"run.dir: {run.dir!r} holds metrics.jsonl of an earlier run; choose another directory, "
            "or set run.overwrite=true to replace that run"
        )


def _sources(config: Config) -> Iterable[str]:
    rollout = config.rollout
    given = {"servers": bool(rollout.servers), "launch": rollout.launch is not None, "replay": bool(rollout.replay)}
    names = [f"rollout.{name}" for name, is_given in given.items() if is_given]
    if len(names) != 1:
        state = f"{' and '.join(names)} are given" if names else "none of them is given"
        yield f"rollout: exactly one of rollout.servers, rollout.launch and rollout.replay must be given, but {state}"
    for url in rollout.servers:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _port_ok(parts):
            yield f"rollout.servers: {url!r} is no server URL, must have the form http://host:port"
    if len(set(rollout.servers)) != len(rollout.servers):
        yield f"rollout.servers: {list(rollout.servers)} names a server twice; remove one"
    if rollout.replay and not any(Path(rollout.replay).glob("step_*.jsonl")):
        yield f"rollout.replay: {rollout.replay!r} holds no step_*.jsonl; give the rollouts/ directory of a saved run"
    if rollout.launch is not None:
        yield from _launch(config)


def _port_ok(parts: Any) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:  # what urlsplit raises for a port above 65535 or with letters
        return False


def _launch(config: Config) -> Iterable[str]:
    launch = config.rollout.launch
    last = launch.port + launch.count - 1
    if launch.port != 0 and (launch.port < 1024 or last > 65535):
        yield (
            f"rollout.launch.port: {launch.port} is out of range, {launch.count} servers need ports from 1024 to "
            "65535; 0 takes free ones"
        )
    for key in launch.args:
        if key.replace("_", "-").lstrip("-") in _RESERVED_SERVER_ARGS:
            yield f"rollout.launch.args: {key!r} is set by this program; use model.hf or a key of rollout.launch"


def _data(config: Config) -> Iterable[str]:
    train = config.data.train
    if not train:
        if not config.rollout.replay:
            yield "data.train: required unless rollout.replay is given; give a .jsonl file or reasoning_gym:TASK"
        return
    if train.startswith("reasoning_gym:"):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", train.partition(":")[2]):
            yield f"data.train: {train!r} must have the form reasoning_gym:TASK, say reasoning_gym:basic_arithmetic"
        return
    path = Path(train)
    if path.suffix != ".jsonl":
        yield f"data.train: {train!r} is refused; must be a .jsonl file or reasoning_gym:TASK"
    elif not path.is_file():
        yield f"data.train: {train!r} does not exist; give a .jsonl file or reasoning_gym:TASK"
    else:
        yield from _first_record(path)


def _first_record(path: Path) -> Iterable[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        line = next((line for line in file if line.strip()), None)
    if line is None:
        yield f"data.train: {str(path)!r} is empty; it needs one JSON object a line, with a `prompt`"
        return
    try:
        record = json.loads(line)
    except ValueError as error:
        yield f"data.train: {str(path)!r}: its first line is not JSON ({error}); write one JSON object a line"
        return
    if not isinstance(record, dict) or "prompt" not in record:
        yield f"data.train: {str(path)!r}: its first line is no JSON object with a `prompt`; add it"


def _reward(config: Config) -> Iterable[str]:
    name = config.reward.name
    if not name:
        if not config.rollout.replay:
            yield "reward.name: required unless rollout.replay is given; name a reward, or package.module:function"
    elif not name.isidentifier() and not MODULE_FUNCTION.fullmatch(name):
        yield f"reward.name: {name!r} must be a registered name or have the form package.module:function"


def _batches(config: Config) -> Iterable[str]:
    prompts, updates = config.rollout.prompts_per_step, config.train.updates_per_rollout
    if prompts >= 1 and updates >= 1 and prompts % updates:
        choices = _divisors(prompts)
        yield (
            f"train.updates_per_rollout: {updates} does not divide rollout.prompts_per_step ({prompts}); "
            f"use {_alternatives(choices)}, or change the prompts"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if config.train.tokens_per_micro_batch < longest:
        yield (
            f"train.tokens_per_micro_batch: {config.train.tokens_per_micro_batch} is less than the longest sequence, "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest}; use at least {longest}"
        )


def _timeouts(config: Config) -> Iterable[str]:
    train, request = config.train.timeout_s, config.rollout.request_timeout_s
    if train <= request and not config.rollout.replay:
        yield (
            f"train.timeout_s: {train} is not above rollout.request_timeout_s ({request}), so that the other ranks "
            "would give up while rank 0 still waits for a response; raise it, or lower the other"
        )


def _metrics(config: Config) -> Iterable[str]:
    for writer in config.metrics.writers:
        if importlib.util.find_spec(writer) is None:
            yield f"metrics.writers: {writer!r} is not installed here; run pip install {writer}, or drop it"


def _lengths(config: Config, model: ModelInfo) -> Iterable[str]:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > model.max_positions:
        yield (
            f"rollout.max_response_tokens: {config.rollout.max_response_tokens} with data.max_prompt_tokens "
            f"{config.data.max_prompt_tokens} exceeds the model's {model.max_positions} positions; lower one"
        )
    for token in config.rollout.stop_token_ids:
        if not 0 <= token < model.shape.vocab:
            yield f"rollout.stop_token_ids: {token} is no token, must be from 0 to {model.shape.vocab - 1}"


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _alternatives(values: list[int]) -> str:
    """`1, 2 or 4`; of many the smallest twelve."""
    names = [str(value) for value in values[:12]]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _tensor_divisors(model: ModelInfo) -> list[int]:
    """Tensor-parallel sizes that the attention and the dense layers can be cut into.

    With fewer key-value heads than ranks Megatron gathers them and every rank keeps the one it needs, so that then the
    ranks must be a multiple of those heads (Megatron-Core: transformer/attention.py, get_query_key_value_tensors).
    """
    shape = model.shape
    width = shape.ffn if not shape.num_experts else shape.hidden
    return [
        size
        for size in _divisors(shape.num_heads)
        if (shape.num_kv_heads % size == 0 or size % shape.num_kv_heads == 0)
        and shape.hidden % size == 0
        and width % size == 0
    ]


def _topology(config: Config, model: ModelInfo) -> Iterable[str]:
    """Sizes of the model that the axes must divide."""
    shape, parallel = model.shape, config.parallel
    axes = [(parallel.tensor, _tensor_divisors(model), "tensor")]
    what = {
        "tensor": f"the model's {shape.num_heads} heads, {shape.num_kv_heads} key-value heads and "
        f"hidden size {shape.hidden}" + (f", feed-forward size {shape.ffn}" if not shape.num_experts else ""),
        "pipeline": f"the model's {shape.num_layers} layers",
        "expert": f"the model's {shape.num_experts} experts",
        "expert_tensor": f"an expert's feed-forward size {shape.moe_ffn}",
    }
    axes.append((parallel.pipeline, _divisors(shape.num_layers), "pipeline"))
    if shape.num_experts:
        axes.append((parallel.expert, _divisors(shape.num_experts), "expert"))
        axes.append((parallel.expert_tensor, _divisors(shape.moe_ffn), "expert_tensor"))
    else:
        for axis in ("expert", "expert_tensor"):
            size = getattr(parallel, axis)
            if size > 1:
                yield f"parallel.{axis}: {size} is refused, {model.architecture} has no experts; use 1"
    for size, allowed, axis in axes:
        if size >= 1 and size not in allowed:
            yield f"parallel.{axis}: {size} does not divide {what[axis]}; use {_alternatives(allowed)}"
    stages = parallel.pipeline * parallel.virtual_pipeline
    if parallel.virtual_pipeline > 1 and stages >= 1 and shape.num_layers % stages:
        yield (
            f"parallel.virtual_pipeline: {parallel.virtual_pipeline} with pipeline {parallel.pipeline} does not divide "
            f"the model's {shape.num_layers} layers; lower it"
        )


def _world(config: Config, world: int) -> Iterable[str]:
    parallel = config.parallel
    step = world_step(parallel)
    if world < 1 or world % step:
        dense = parallel.tensor * parallel.pipeline * parallel.context
        experts = parallel.expert * parallel.expert_tensor * parallel.pipeline
        below, over = world // step * step, (world // step + 1) * step
        nearest = f"{below} or {over}" if below else str(over)
        yield (
            f"world size: {world} is not a multiple of parallel.tensor * pipeline * context = {dense} and of "
            f"parallel.expert * expert_tensor * pipeline = {experts}; use {nearest} ranks, or other sizes"
        )
        return
    if config.train.updates_per_rollout < 1:
        return
    layout = layout_of(config, world)
    if layout.sequences_per_update < layout.data:
        yield (
            f"rollout.prompts_per_step: {config.rollout.prompts_per_step} gives {layout.sequences_per_update} "
            f"sequences an update, fewer than the {layout.data} data-parallel ranks; raise it, or lower "
            "train.updates_per_rollout"
        )
