"""Prompt data sets with an order that can be saved and taken up again."""

import dataclasses
import difflib
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspo_megatron.config import ConfigError, DataConfig
from gspo_megatron.types import Prompt

MAX_FAULTS = 10
"""Faults of a file that are reported before giving up on it."""


class Row(NamedTuple):
    where: str
    """File and line, or task and index, for messages."""
    prompt: str | list[dict[str, Any]]
    record: dict[str, Any]


class PromptSource:
    """Endless prompts: epoch after epoch, each in an order of its own that follows from the seed and the epoch."""

    def __init__(self, prompts: Sequence[Prompt], shuffle: bool, seed: int, records: str = ""):
        """`records`: a hash of what the reward reads of them, where that is known to be the same in every process."""
        self.prompts, self._records = tuple(prompts), records
        self._shuffle, self._seed = shuffle, seed
        identity = json.dumps([seed if shuffle else None, [prompt.token_ids for prompt in self.prompts]])
        self._fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self._epoch, self._position = 0, 0
        self._order = self._epoch_order(0)

    def __len__(self) -> int:
        return len(self.prompts)

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next `num_prompts` prompts; goes on into the next epoch where this one ends."""
        taken = []
        while len(taken) < num_prompts:
            if self._position == len(self.prompts):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._epoch_order(self._epoch)
            until = min(len(self.prompts), self._position + num_prompts - len(taken))
            taken += [self.prompts[index] for index in self._order[self._position : until]]
            self._position = until
        return taken

    def state(self) -> dict[str, Any]:
        """The position, as JSON values."""
        position = {"epoch": self._epoch, "position": self._position, "fingerprint": self._fingerprint}
        return position | {"records": self._records}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a saved position. Raises ConfigError where prompts, seed or shuffling are not as they were then."""
        if state["fingerprint"] != self._fingerprint:
            raise ConfigError(
                "data.train: the prompts, data.shuffle or run.seed are not those of the checkpoint's run, so its "
                "position means nothing here; restore them, add data.train to run.allow_changed to begin with these, or "
                "start a new run.dir"
            )
        if state.get("records", self._records) != self._records:
            raise ConfigError(
                "data.train: the prompts are those of the checkpoint's run, but not what comes with them (answers, say); "
                "restore the file, add data.train to run.allow_changed to go on with these, or start a new run.dir"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def load_dataset(config: DataConfig, tokenizer: Any, seed: int) -> PromptSource:
    """The prompts of `data.train`, tokenised by a Hugging Face tokenizer.

    `seed` decides the order, and the problems of a reasoning-gym task where data.options has no seed of its own.
    Raises ConfigError, with file and line, for what can't be read and for prompts over `data.max_prompt_tokens`.
    """
    if config.train.startswith("reasoning_gym:"):
        rows = _reasoning_gym_rows(config, seed)
    else:
        rows = _jsonl_rows(config)
    token_ids = _tokenize(rows, config, tokenizer)
    faults = []
    for row, ids in zip(rows, token_ids, strict=True):
        if not 0 < len(ids) <= config.max_prompt_tokens:
            remedy = f"raise data.max_prompt_tokens={config.max_prompt_tokens} or drop it" if ids else "drop it"
            faults.append(f"data.train: {row.where}: the prompt has {len(ids)} tokens; {remedy}")
    _raise_faults(faults)
    prompts = [
        Prompt(index, tuple(ids), row.record) for index, (row, ids) in enumerate(zip(rows, token_ids, strict=True))
    ]
    from_file = not config.train.startswith("reasoning_gym:")  # whose problems follow from options and seed
    records = json.dumps([row.record for row in rows], sort_keys=True) if from_file else ""
    return PromptSource(prompts, config.shuffle, seed, hashlib.sha256(records.encode()).hexdigest())


def _raise_faults(faults: list[str]) -> None:
    if len(faults) > MAX_FAULTS:
        faults = [*faults[:MAX_FAULTS], f"data.train: {len(faults) - MAX_FAULTS} more faults of this kind"]
    if faults:
        raise ConfigError(faults)


def _tokenize(rows: list[Row], config: DataConfig, tokenizer: Any) -> list[list[int]]:
    chats = [config.chat_template or not isinstance(row.prompt, str) for row in rows]
    if any(chats) and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"data.chat_template: {rows[chats.index(True)].where} needs a chat template, the tokenizer of model.hf "
            "has none; give `prompt` as text with data.chat_template=false, or add chat_template.jinja to it"
        )
    texts = [row.prompt for row, chat in zip(rows, chats, strict=True) if not chat]
    plain = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    return [_chat_ids(row.prompt, tokenizer) if chat else next(plain) for row, chat in zip(rows, chats, strict=True)]


def _chat_ids(prompt: str | list[dict[str, Any]], tokenizer: Any) -> list[int]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)


def _jsonl_rows(config: DataConfig) -> list[Row]:
    path = Path(config.train)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"data.train: {config.train!r} can't be read ({error.strerror}); give a .jsonl file"
        ) from error
    rows, faults = [], []
    for number, line in enumerate(lines, start=1):
        where = f"{config.train}:{number}"
        if line.strip():
            row = _parse_line(where, line)
            (faults if isinstance(row, str) else rows).append(row)
    _raise_faults([f"data.train: {fault}" for fault in faults])
    if not rows:
        raise ConfigError(f"data.train: {config.train!r} is empty; it needs one JSON object a line, with a `prompt`")
    return rows


def _parse_line(where: str, line: bytes) -> Row | str:
    """The line's row, or what is wrong with it."""
    try:
        entry = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"{where}: byte {error.start} of the line is not UTF-8; convert the file"
    except json.JSONDecodeError as error:
        return f"{where}: not JSON ({error.msg} at column {error.colno}); write one JSON object a line"
    if not isinstance(entry, dict) or "prompt" not in entry:
        return f"{where}: no JSON object with a `prompt`; add it"
    prompt = entry.pop("prompt")
    is_chat = isinstance(prompt, list) and prompt and all(map(_is_message, prompt))
    if not isinstance(prompt, str) and not is_chat:
        return f"{where}: `prompt` must be a text or a list of messages with `role` and `content`"
    return Row(where, prompt, entry)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _reasoning_gym_rows(config: DataConfig, seed: int) -> list[Row]:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(f"data.train: {config.train!r} needs a package: pip install reasoning-gym") from error
    task = config.train.removeprefix("reasoning_gym:")
    if task not in DATASETS:
        nearest = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4)
        raise ConfigError(f"data.train: reasoning-gym has no task {task!r}; nearest: {', '.join(nearest) or 'none'}")
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    if unknown := [name for name in config.options if name not in known]:
        raise ConfigError(
            f"data.options: reasoning-gym task {task!r} has no option {unknown[0]!r}; it has {', '.join(known)}"
        )
    try:
        dataset = create_dataset(task, **{"seed": seed, **config.options})
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"data.options: reasoning-gym task {task!r} refuses {config.options}: {error}") from error
    rows = []
    for index in range(len(dataset)):
        entry = dataset[index]
        record = {key: entry[key] for key in ("question", "answer", "metadata")}
        record |= {"task": task, "options": dict(config.options)}
        rows.append(Row(f"{config.train} problem {index}", entry["question"], record))
    return rows
