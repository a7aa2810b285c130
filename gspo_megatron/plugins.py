"""Functions of the user's own, named `package.module:function` in the configuration."""

import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Callable

from gspo_megatron.algorithm_config import LossConfig
from gspo_megatron.config import ConfigError

MODULE_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def load_function(key: str, name: str) -> Callable:
    """The function `name`, for the configuration key `key`. Raises ConfigError where it can't be had."""
    if not MODULE_FUNCTION.fullmatch(name):
        raise ConfigError(f"{key}: {name!r} must have the form package.module:function")
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{key}: {name!r} can't be imported ({error}); put its directory on PYTHONPATH") from error
    except Exception as error:
        raise ConfigError(f"{key}: importing {module_name} raised {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key}: {name!r}: {module_name} has no function {function_name!r}")
    return function


def load_loss(name: str) -> tuple[type[LossConfig], Callable]:
    """A loss of the user's own and its configuration class: the annotation of the function's first parameter.

    Raises ConfigError where the function can't be had, or that annotation is no frozen dataclass below LossConfig.
    """
    function = load_function("loss.name", name)
    try:
        hints = typing.get_type_hints(function)
        parameters = list(inspect.signature(function).parameters)
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"loss.name: the annotations of {name!r} can't be read: {error}") from error
    config_type = hints.get(parameters[0]) if parameters else None
    is_class = isinstance(config_type, type) and issubclass(config_type, LossConfig)
    if not is_class or not dataclasses.is_dataclass(config_type):
        raise ConfigError(
            f"loss.name: the first parameter of {name!r} must be annotated with the class of its settings, a frozen "
            f"dataclass that inherits from gspo_megatron.algorithm_config.LossConfig, but it is {config_type}"
        )
    return config_type, function
