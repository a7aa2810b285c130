"""What every loss reports of its ratios, as sums that add up over micro-batches and ranks.

Reduction rule by key: `*_min` by minimum, `*_max` by maximum, all others by sum. A key with a `/` is reported under its
own name: divided by the key with `_count` behind it where there is one, as it is otherwise.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gspo_megatron.types import SequenceBatch

MEANS = {
    "gspo/ratio_mean": ("ratio_sum", "num_trained_sequences"),
    "gspo/clip_fraction_sequences": ("num_clipped_sequences", "num_trained_sequences"),
    "gspo/clip_fraction_tokens": ("num_clipped_tokens", "num_trained_tokens"),
    "gspo/kl_k1": ("kl_k1_sum", "num_trained_tokens"),
    "gspo/kl_k3": ("kl_k3_sum", "num_trained_tokens"),
}
"""Reported metric -> (numerator, denominator), keys of the summed metrics."""


LOG_RATIO_EDGES = (-1e-1, -3e-2, -1e-2, -3e-3, -1e-3, -3e-4, -1e-4, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Edges of the histogram of sequences' mean log ratios, nats per token; the outer bins are open. None is at 0, where
all ratios of a first mini-batch are."""
_TEXT = [f"{edge:.0e}".replace("e-0", "e-") for edge in LOG_RATIO_EDGES]
LOG_RATIO_BINS = (
    f"below_{_TEXT[0]}",
    *(f"{low}_to_{high}" for low, high in zip(_TEXT, _TEXT[1:], strict=False)),
    f"above_{_TEXT[-1]}",
)
"""`gspo/log_ratio_hist/<name>`, the share of trained sequences in each bin."""


def ratio_metrics(
    batch: SequenceBatch,
    mask: Tensor,
    log_ratio: Tensor,
    clipped: Tensor,
    length: Tensor,
    mean_log_ratio: Tensor,
    ratio: Tensor,
    clipped_sequences: Tensor,
) -> dict[str, Tensor]:
    """Detached float64 scalars from token ([T]: mask, log_ratio, clipped) and sequence ([N]: the rest) quantities.

    KL and effective-sample-size sums are of token ratios pi_theta / pi_old, never of the sequence ratio: with tokens
    drawn from pi_old, mean(-log r) (k1) and mean(r - 1 - log r) (k3) estimate KL(pi_old || pi_theta) in nats per token.
    """
    nonempty = length > 0
    counted = nonempty if batch.counts_sequences else torch.zeros_like(nonempty)
    token_ratio = torch.where(mask, log_ratio.clamp(-20, 20).exp(), 0.0)
    infinity = ratio.new_full((1,), math.inf)  # for a micro-batch of no sequences
    return {
        "num_trained_sequences": counted.sum(dtype=torch.float64),
        "num_trained_tokens": mask.sum(dtype=torch.float64),
        "num_clipped_sequences": (counted & clipped_sequences).sum(dtype=torch.float64),
        "num_clipped_tokens": clipped.sum(dtype=torch.float64),
        "ratio_sum": torch.where(counted, ratio, 0.0).sum(),
        "ratio_min": torch.cat([torch.where(nonempty, ratio, math.inf), infinity]).amin(),
        "ratio_max": torch.cat([torch.where(nonempty, ratio, -math.inf), -infinity]).amax(),
        "log_ratio_sum": torch.where(counted, mean_log_ratio, 0.0).sum(),
        "log_ratio_square_sum": torch.where(counted, mean_log_ratio.square(), 0.0).sum(),
        **_histogram(mean_log_ratio, counted),
        "token_log_ratio_square_sum": log_ratio.square().sum(),
        "kl_k1_sum": -log_ratio.sum(),
        "kl_k3_sum": torch.where(mask, token_ratio - 1 - log_ratio, 0.0).sum(),
        "token_ratio_sum": token_ratio.sum(),
        "token_ratio_square_sum": token_ratio.square().sum(),
    }


def _histogram(mean_log_ratio: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Sequences in each bin."""
    bins = torch.bucketize(mean_log_ratio, mean_log_ratio.new_tensor(LOG_RATIO_EDGES))
    counts = mean_log_ratio.new_zeros(len(LOG_RATIO_BINS), dtype=torch.float64).index_add(0, bins, counted.double())
    return {f"log_ratio_bin_{name}": count for name, count in zip(LOG_RATIO_BINS, counts.unbind(), strict=True)}


def add_metrics(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The metrics of two micro-batches (or ranks) together, key by key; a key may be missing on one side."""
    total = dict(left)
    for key, value in right.items():
        if key not in total:
            total[key] = value
        elif key.endswith("_min"):
            total[key] = torch.minimum(total[key], value)
        elif key.endswith("_max"):
            total[key] = torch.maximum(total[key], value)
        else:
            total[key] = total[key] + value
    return total


def reduce_metrics(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """The metrics to report, from sums that were added over all micro-batches and ranks.

    A mean over nothing (no trained token in the whole step) is left out, as are its minimum and maximum.
    `gspo/log_ratio_std` is of sequences' mean log ratios log s, `gspo/token_log_ratio_std` of tokens' log r (nats),
    `gspo/log_ratio_hist/*` the shares of sequences by log s, `gspo/ess` = (sum r)^2 / (T sum r^2) in (0, 1].
    """
    values = {key: float(value) for key, value in sums.items()}
    result = {
        name: values[numerator] / values[denominator]
        for name, (numerator, denominator) in MEANS.items()
        if values.get(denominator, 0) > 0
    }
    for key, value in values.items():
        if "/" in key and not key.endswith("_count") and values.get(f"{key}_count") != 0 and math.isfinite(value):
            result[key] = value / values.get(f"{key}_count", 1.0)
    num_sequences, num_tokens = values.get("num_trained_sequences", 0), values.get("num_trained_tokens", 0)
    if num_sequences > 0:
        result["gspo/ratio_min"], result["gspo/ratio_max"] = values["ratio_min"], values["ratio_max"]
        mean = values["log_ratio_sum"] / num_sequences
        result["gspo/log_ratio_std"] = math.sqrt(max(values["log_ratio_square_sum"] / num_sequences - mean**2, 0.0))
        for name in LOG_RATIO_BINS:
            result[f"gspo/log_ratio_hist/{name}"] = values[f"log_ratio_bin_{name}"] / num_sequences
    if num_tokens > 0:
        square, mean = values["token_log_ratio_square_sum"] / num_tokens, values["kl_k1_sum"] / num_tokens
        result["gspo/token_log_ratio_std"] = math.sqrt(max(square - mean**2, 0.0))
        result["gspo/ess"] = values["token_ratio_sum"] ** 2 / (num_tokens * values["token_ratio_square_sum"])
    return result
