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

from gspo_megatron.checkpoints import find_checkpoint
from gspo_megatron.config import LOCAL_HOSTS, Config, ConfigError
from gspo_megatron.guards import GUARDS, algorithm_faults
from gspo_megatron.model_files import ModelInfo, megatron_faults, read_model, tokenizer_faults, weight_faults
from gspo_megatron.plugins import MODULE_FUNCTION
from gspo_megatron.resume import changed_faults
from gspo_megatron.run_dir import results_in_the_way
from gspo_megatron.topology import alternatives, divisors, model_faults, world_faults

__all__ = ["GUARDS", "RANGES", "check_config"]

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
    "rollout.launch.restarts": at_least(0),
    "weights.bucket_mib": above(0),
    "weights.timeout_s": above(0),
    "weights.checked_share": within(0, 1),
    "weights.appliers": at_least(0),
    "health.max_expert_change": within(0, 1),
    "health.max_load_imbalance": at_least(0),
    "health.min_ess": within(0, 1),
    "health.max_clip_fraction": within(0, 1),
    "health.max_log_ratio_std": at_least(0),
    "health.max_token_log_ratio_std": at_least(0),
    "health.max_grad_norm": at_least(0),
    "health.max_logprob_gap": at_least(0),
    "health.max_zero_std": within(0, 1),
    "health.max_truncated": within(0, 1),
    "checkpoint.every": at_least(0),
    "checkpoint.keep": at_least(1),
    "checkpoint.keep_every": at_least(0),
    "checkpoint.keep_hours": at_least(0),
    "export.hf_every": at_least(0),
    "export.keep": at_least(0),
    "export.shard_mib": above(0),
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


def check_config(config: Config, world_size: int | None = None, earlier_run: bool = True) -> list[str]:
    """All faults of `config`, one line each; an empty list means that it can run on `world_size` ranks.

    Without a world size the rules about it are left out, and without `earlier_run` those about what run.dir holds.
    """
    faults = [*_ranges(config), *_run(config), *_sources(config)]
    if earlier_run:
        faults += _earlier_run(config)
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
            faults += tokenizer_faults(directory)
            if config.model.megatron:
                may_differ = {"model", "model.hf"} & set(config.run.allow_changed)
                faults += megatron_faults(Path(config.model.megatron), model, None if may_differ else directory)
            else:
                faults += weight_faults(directory, model)
    if model is not None:
        faults += [*model_faults(config, model), *_lengths(config, model), *_routing_replay(config, model)]
    if world_size is not None and not any(fault.startswith("parallel.") for fault in _ranges(config)):
        faults += world_faults(config, world_size)
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


def _run(config: Config) -> Iterable[str]:
    run = config.run
    if not run.dir:
        yield "run.dir: required; give a directory for what the run writes"
        return
    directory = Path(run.dir)
    if directory.exists() and not directory.is_dir():
        yield f"run.dir: {run.dir!r} is a file; give a directory"


def _earlier_run(config: Config) -> Iterable[str]:
    """What is in run.dir already: a checkpoint to go on from, if settings allow it, or results in the way."""
    try:
        saved = find_checkpoint(config) if config.run.dir else None
    except ConfigError as error:
        yield from error.faults
        return
    if saved is not None:
        yield from changed_faults(config, saved)
    elif config.run.dir:
        yield from results_in_the_way(config)


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
    yield from _weights(config)


def _weights(config: Config) -> Iterable[str]:
    weights = config.weights
    far = [url for url in config.rollout.servers if urlsplit(url).hostname not in LOCAL_HOSTS]
    if weights.transport == "tensor" and far:
        yield (
            f"weights.transport: tensor: {', '.join(far)} is not on this machine by its URL; take distributed, or"
            " write http://127.0.0.1:PORT"
        )
    if weights.transport != "delta" and (weights.appliers or weights.engine_dir):
        key = "appliers" if weights.appliers else "engine_dir"
        yield f"weights.{key}: has an effect with weights.transport=delta only, not {weights.transport}; leave it out"
    elif weights.appliers and not weights.engine_dir:
        yield "weights.engine_dir: required with weights.appliers; give the --local of tools/apply_weight_delta.py"


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
        choices = divisors(prompts)
        yield (
            f"train.updates_per_rollout: {updates} does not divide rollout.prompts_per_step ({prompts}); "
            f"use {alternatives(choices)}, or change the prompts"
        )
    longest, context = config.data.max_prompt_tokens + config.rollout.max_response_tokens, config.parallel.context
    pieces = 2 * context if context > 1 else 1
    needed = -(-longest // pieces) * pieces
    if config.train.tokens_per_micro_batch < needed:
        padding = f", padded to {needed} for parallel.context {context}" if needed > longest else ""
        yield (
            f"train.tokens_per_micro_batch: {config.train.tokens_per_micro_batch} is less than the longest sequence, "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest}{padding}; use at least {needed}"
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


def _routing_replay(config: Config, model: ModelInfo) -> Iterable[str]:
    if not config.train.routing_replay:
        return
    refused = "train.routing_replay: true is refused"
    if not model.shape.num_experts:
        yield f"{refused}, {model.architecture} has no experts; use false"
    if config.loss.old_log_probs == "rollout":
        yield (
            f"{refused} with loss.old_log_probs=rollout: no pass of the trainer's chooses the experts to replay; use "
            "loss.old_log_probs=recompute"
        )
    if config.megatron.transformer.get("moe_router_fusion"):
        yield f"{refused} with megatron.transformer.moe_router_fusion, which chooses by itself; drop one"


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
