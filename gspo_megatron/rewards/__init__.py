"""Rewards: `function(response_text, record) -> float`, and the registry of their names.

Importing this package imports no reward library and no torch: the scoring processes stay small.
"""

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from gspo_megatron.config import ConfigError

Reward = Callable[[str, dict[str, Any]], float]

REWARDS: dict[str, str] = {
    "exact_match": "gspo_megatron.rewards.exact_match:score",
    "math_verify": "gspo_megatron.rewards.math_verify:score",
    "reasoning_gym": "gspo_megatron.rewards.reasoning_gym:score",
}
"""Name -> where the function is, `module:function`."""

PIP_NAMES = {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}


def load_reward(name: str) -> Reward:
    """The function of a registered reward, or of `package.module:function`.

    Raises ConfigError for an unknown name, a module that can't be imported, or a missing library.
    """
    if ":" not in name and name not in REWARDS:
        nearest = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"; perhaps {nearest[0]!r}" if nearest else ""
        raise ConfigError(f"reward.name: {name!r} is not one of {', '.join(REWARDS)} or package.module:function{hint}")
    module_name, _, function_name = REWARDS.get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        remedy = f"pip install {PIP_NAMES[name]}" if name in PIP_NAMES else "put its directory on PYTHONPATH"
        raise ConfigError(f"reward.name: {name!r} can't be imported ({error}): {remedy}") from error
    except Exception as error:
        raise ConfigError(f"reward.name: importing {module_name} raised {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"reward.name: {name!r}: {module_name} has no function {function_name!r}")
    return function
