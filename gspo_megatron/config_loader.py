"""Strict YAML and dotted overrides -> `Config`. An unknown key, a wrong type or a wrong choice is an error, and all of
them are reported at once. Imports no torch, but where a loss of the user's own does: Megatron's fields are read from
its source (`passthrough.py`).

    load_config("run.yaml", ["train.steps=2", "rollout.launch.port=0", "parallel={tensor: 2}"])
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gspo_megatron import config as schema
from gspo_megatron import yaml_strict
from gspo_megatron.config import LOSS_CONFIGS, Config, ConfigError, LossConfig
from gspo_megatron.passthrough import passthrough_faults
from gspo_megatron.plugins import load_loss


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of file `path` with `overrides` (`section.key=value`, value in YAML) applied in their order.

    Raises ConfigError with every fault of the file and the overrides, one line each.
    """
    config, faults = read_config(path, overrides)
    if faults:
        raise ConfigError(faults)
    return config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """As `load_config`, but gives the faults beside a config in which every faulty value is left at its default, so
    that `check` can go on to judge the rest."""
    values, faults = _read_file(Path(path))
    for override in overrides:
        faults += _apply_override(values, override)
    config = _Builder(faults).section(Config, values, "")
    faults += passthrough_faults(config.megatron)
    return config, faults


def dump_config(config: Config) -> str:
    """YAML text that `load_config` reads back to an equal Config."""
    return yaml_strict.dump(_plain(config))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _read_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        return {}, [f"{path}: cannot read the configuration file: {reason}"]
    values, faults = yaml_strict.parse(text, str(path))
    if values is None:
        return {}, faults
    if not isinstance(values, dict):
        return {}, [*faults, f"{path}: must hold sections (`train:` ...), not {_kind(values)}"]
    return values, faults


def _apply_override(values: dict[str, Any], override: str) -> list[str]:
    """Sets one `a.b=c` in the nested `values`; a mapping is merged into what is there."""
    path, equals, text = override.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        return [f"override {override!r}: must have the form section.key=value, say train.steps=2"]
    value, faults = yaml_strict.parse(text, f"override {override!r}") if text.strip() else ("", [])
    if faults:
        return faults
    for name in reversed(names):
        value = {name: value}
    return _merge(values, value, "")


def _merge(into: dict[str, Any], new: dict[str, Any], path: str) -> list[str]:
    faults = []
    for key, value in new.items():
        place = f"{path}{key}"
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            faults += _merge(into[key], value, f"{place}.")
        elif isinstance(value, dict) and into.get(key) is not None:
            faults.append(f"{place}: is {into[key]!r} in the file, so that no key below it can be overridden")
        else:
            into[key] = value
    return faults


class _Builder:
    """Builds the dataclasses and notes every fault; a faulty value leaves its field at the default."""

    def __init__(self, faults: list[str]):
        self.faults = faults

    def section(self, cls: type, values: Any, path: str) -> Any:
        if values is None:  # `train:` with nothing below it
            values = {}
        if not isinstance(values, dict):
            self.faults.append(f"{path}: {values!r} is {_kind(values)}, but {cls.__name__} is a section of keys")
            return cls()
        if cls is LossConfig:
            cls, values = self._loss_class(values, path)
        hints = get_type_hints(cls)
        known = {}
        for key, value in values.items():
            place = f"{path}.{key}" if path else str(key)
            if key not in hints:
                self.faults.append(_unknown_key(cls, key, value, place))
                continue
            try:
                known[key] = self._value(hints[key], value, place, cls)
            except _Wrong as wrong:
                self.faults.append(f"{place}: {value!r} {wrong} ({cls.__name__}.{key})")
        return cls(**known)

    def _loss_class(self, values: dict[str, Any], path: str) -> tuple[type[LossConfig], dict[str, Any]]:
        name = values.get("name", Config().loss.name)
        if isinstance(name, str) and name in LOSS_CONFIGS:
            return LOSS_CONFIGS[name], values
        if isinstance(name, str) and ":" in name:
            try:
                return load_loss(name)[0], values
            except ConfigError as error:
                self.faults += error.faults
        else:
            allowed = f"allowed: {', '.join(LOSS_CONFIGS)} or package.module:function"
            remedy = "is not a loss" + _did_you_mean(str(name), LOSS_CONFIGS)
            self.faults.append(f"{path}.name: {name!r} {remedy}; {allowed} (LossConfig.name)")
        # Without a class there is nothing to hold the other keys against: only those that all losses share remain.
        shared = {field.name for field in dataclasses.fields(LossConfig)} - {"name"}
        return type(Config().loss), {key: value for key, value in values.items() if key in shared}

    def _value(self, hint: Any, value: Any, place: str, cls: type) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            if value is None:
                return None
            (hint,) = [argument for argument in arguments if argument is not types.NoneType]
            return self._value(hint, value, place, cls)
        if dataclasses.is_dataclass(hint):
            return self.section(hint, value, place)
        if origin is Literal:
            return _choice(arguments, value)
        if origin is tuple:
            if not isinstance(value, list):
                raise _Wrong(f"is {_kind(value)}, must be a list: [{value}]")
            return tuple(self._item(arguments[0], index, item, place, cls) for index, item in enumerate(value))
        if origin is dict:
            return _dictionary(value)
        return _scalar(hint, value)

    def _item(self, hint: Any, index: int, item: Any, place: str, cls: type) -> Any:
        try:
            return self._value(hint, item, place, cls)
        except _Wrong as wrong:
            raise _Wrong(f"has {item!r} as item {index + 1}, which {wrong}") from None


class _Wrong(Exception):
    """Why a value does not fit its field."""


def _choice(allowed: tuple[Any, ...], value: Any) -> Any:
    if value in allowed and isinstance(value, str):
        return value
    names = ", ".join(map(str, allowed))
    raise _Wrong(f"is not allowed{_did_you_mean(str(value), allowed)}; allowed: {names}")


def _dictionary(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _Wrong(f"is {_kind(value)}, must be a mapping of keys to values")
    strange = [key for key in value if not isinstance(key, str)]
    if strange:
        raise _Wrong(f"has keys that are not text: {strange}; quote them")
    return value


def _scalar(hint: type, value: Any) -> Any:
    if hint is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise _Wrong("is not a finite number")
        return float(value)
    if type(value) is hint:
        return value
    name = {int: "an integer", float: "a number", str: "text", bool: "true or false"}[hint]
    remedy = ""
    if hint is int and type(value) is float and value.is_integer():
        remedy = f"; write {int(value)}"
    elif hint is str and type(value) in (int, float, bool):
        remedy = f'; quote it: "{value}"'
    raise _Wrong(f"is {_kind(value)}, must be {name}{remedy}")


def _kind(value: Any) -> str:
    names = {
        str: "text",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        list: "a list",
        dict: "a section",
    }
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def _did_you_mean(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, [str(known) for known in names], n=1)
    return f", did you mean {near[0]}?" if near else ""


def _unknown_key(cls: type, key: Any, value: Any, place: str) -> str:
    own = [field.name for field in dataclasses.fields(cls)]
    hint = _did_you_mean(str(key), own)
    if not hint:
        everywhere = all_keys()
        homes = [path for path in everywhere if path.rsplit(".", 1)[-1] == key and path != place]
        last_names = {path.rsplit(".", 1)[-1]: path for path in everywhere}
        if homes:
            hint = f", it belongs at {' or '.join(homes)}"
        elif near := difflib.get_close_matches(str(key), last_names, n=1, cutoff=0.75):
            hint = f", did you mean {last_names[near[0]]}?"
        elif others := [name for name, other in LOSS_CONFIGS.items() if key in get_type_hints(other)]:
            hint = f", a key of the loss {' and '.join(others)}" if issubclass(cls, LossConfig) else ""
    given = "" if isinstance(value, dict) else f" (given {value!r})"
    return f"{place}: unknown key of {cls.__name__}{given}{hint}; allowed: {', '.join(own)}"


def all_keys(cls: type = Config, prefix: str = "") -> list[str]:
    """Dotted paths of all keys, sections left out; those of `loss` are the default loss's."""
    paths = []
    for name, hint in get_type_hints(cls).items():
        if hint is LossConfig:
            hint = type(schema.Config().loss)
        inner = next((argument for argument in (hint, *get_args(hint)) if dataclasses.is_dataclass(argument)), None)
        paths += all_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return paths
