"""Rotary frequencies from config.json, for the kinds that published checkpoints have: default, linear, llama3, yarn.

Megatron's own (`models/common/embeddings/rotary_pos_embedding.py`, `yarn_rotary_pos_embedding.py`) take part of the
settings as constants, so that the frequencies are computed here and put into its embedding.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_megatron.config import ConfigError


class Rotary(NamedTuple):
    inv_freq: Tensor
    """fp32 [rotary dimensions of a head / 2], radians a position."""
    attention_factor: float
    """Cosines and sines are multiplied by it; attention scores by its square."""
    fraction: float
    """Of a head's dimensions that are rotated, the first ones."""


def rotary(hf: dict[str, Any], head_dim: int, default_theta: float = 10000.0, default_fraction: float = 1.0) -> Rotary:
    """From where older and newer config.json files keep it. Raises ConfigError for other kinds and missing numbers."""
    settings = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in _KINDS:
        raise ConfigError(
            f"model.hf: rope type {kind!r} is not supported; use a checkpoint with one of {', '.join(_KINDS)}"
        )
    theta = settings.get("rope_theta") or hf.get("rope_theta") or default_theta
    fraction = settings.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or default_fraction
    dim = int(head_dim * fraction)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    positions = {
        "original_max_position_embeddings": hf.get("original_max_position_embeddings", hf["max_position_embeddings"])
    }
    try:
        inv_freq, factor = _KINDS[kind](powers, theta, positions | settings)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"model.hf: config.json has rope type {kind!r} without a valid {error}") from None
    if factor != 1.0 and fraction != 1.0:
        raise ConfigError("model.hf: an attention factor with a partial rotary embedding is not supported")
    return Rotary(inv_freq, factor, fraction)


def _default(powers: Tensor, theta: float, settings: dict[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / powers, 1.0


def _linear(powers: Tensor, theta: float, settings: dict[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / powers / settings["factor"], 1.0


def _llama3(powers: Tensor, theta: float, settings: dict[str, Any]) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, and those between interpolated."""
    inv_freq = 1.0 / powers
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    turns = settings["original_max_position_embeddings"] * inv_freq / (2 * math.pi)  # over the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / settings["factor"] + kept * inv_freq, 1.0


def _yarn(powers: Tensor, theta: float, settings: dict[str, Any]) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, sections 3.2 and 3.4): dimensions are interpolated by how often they turn in the original
    context, and scores are sharpened."""
    factor, context = settings["factor"], settings["original_max_position_embeddings"]
    half = powers.numel()

    def dimension(turns: float) -> float:
        """Which pair of dimensions turns so often."""
        return half * math.log(context / (turns * 2 * math.pi)) / math.log(theta)

    low, high = dimension(settings.get("beta_fast") or 32), dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    stretched = ramp.clamp(0, 1)
    inv_freq = stretched / (factor * powers) + (1 - stretched) / powers
    return inv_freq, _yarn_attention_factor(settings, factor)


def _yarn_attention_factor(settings: dict[str, Any], factor: float) -> float:
    if settings.get("attention_factor") is not None:
        return settings["attention_factor"]

    def sharpening(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, all_dims = settings.get("mscale"), settings.get("mscale_all_dim")
    return sharpening(mscale) / sharpening(all_dims) if mscale and all_dims else sharpening(1.0)


_KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
