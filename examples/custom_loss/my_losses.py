"""A loss and a reward of one's own, outside the package: see docs/algorithms.md and custom_loss.yaml beside this file.

The loss is simple on purpose: GSPO's sequence ratio with a soft gate in place of the clip,
objective s_i A_i exp(-(log s_i / width)^2), a mean over sequences.
"""

from dataclasses import dataclass
from typing import Any

from gspo_megatron.algorithm.loss_terms import LossOutput, aggregate, loss_output, sequence_values, token_values
from gspo_megatron.algorithm_config import LossConfig
from gspo_megatron.types import SequenceBatch


@dataclass(frozen=True)
class SoftGateConfig(LossConfig):
    """The loss's settings: keys of `loss:` beside `name`, checked as strictly as those of the package."""

    name: str = "examples.custom_loss.my_losses:soft_gate"
    width: float = 1e-3
    """Log ratio at which the objective has fallen to 1/e of s A."""


def soft_gate(config: SoftGateConfig, batch: SequenceBatch) -> LossOutput:
    """-sum_i s_i A_i exp(-(l_i / width)^2) with l_i = mean_t log r_t, s_i = exp(l_i); count = N.

    Takes `batch.advantages` [N] or [T]. The annotation of `config` tells the loader which class holds the settings.
    """
    tokens = token_values(batch)  # masked, float64, no gradient
    sequences = sequence_values(batch, tokens)  # over whole sequences, also where context parallelism cuts them
    log_ratio = sequences.mean_log_ratio
    value = sequences.ratio * (-((log_ratio / config.width) ** 2)).exp()  # [N]
    slope = value * (1 - 2 * log_ratio / config.width**2)  # d value / d log_ratio
    owner = batch.token_sequence  # [T] -> which sequence a token is of
    share, count = aggregate(batch, "seq-mean-token-mean", tokens.mask, sequences.length)
    return loss_output(
        batch,
        tokens,
        sequences,
        value=value[owner] * tokens.advantages,
        slope=slope[owner] * tokens.advantages,  # the 1 / L of the mean log ratio is in `share`
        clipped=tokens.mask & False,
        share=share,
        count=count,
        clipped_sequences=sequences.length < 0,
    )


def short_and_right(response_text: str, record: dict[str, Any]) -> float:
    """The reward: 1 for a response that contains the record's answer, half of that where it goes on for long."""
    if str(record["answer"]) not in response_text:
        return 0.0
    return 1.0 if len(response_text) <= 20 else 0.5
