"""Policy losses: one function each, `loss(config, batch) -> LossOutput`, and the registry `LOSSES`.

Shape legend: N sequences in a micro-batch, T packed tokens on this rank.

Everything in a `LossOutput` adds up: over micro-batches, data-parallel and context-parallel ranks. A token contributes
its own share (1/L_i of sequence i), so a sequence that is spread over context-parallel ranks is counted once in
`loss_sum`; `count` and the sequence metrics are non-zero on the one rank whose batch says `counts_sequences`.
sum(loss_sum) / sum(count) over all of them is the loss.
"""

from collections.abc import Callable

import torch

from gspo_megatron.algorithm.group_losses import real
from gspo_megatron.algorithm.loss_metrics import reduce_metrics
from gspo_megatron.algorithm.loss_terms import LossOutput, NonFiniteError
from gspo_megatron.algorithm.sequence_losses import fspo, gmpo, gspo, gspo_token, luspo, vespo
from gspo_megatron.algorithm.token_losses import aspo, cfpo, cispo, ctpo, dcpo, dppo_tv, grpo, minirl, pspo, sapo
from gspo_megatron.config import LOSS_CONFIGS, GRPOConfig, GSPOConfig, GSPOTokenConfig, LossConfig
from gspo_megatron.types import SequenceBatch, from_lists

__all__ = [
    "LOSSES", "GRPOConfig", "GSPOConfig", "GSPOTokenConfig", "LossConfig", "LossOutput", "NonFiniteError",
    "check_finite", "from_lists", "grpo", "gspo", "gspo_token", "reduce_metrics",
]  # fmt: skip

LOSSES: dict[str, tuple[type[LossConfig], Callable[..., LossOutput]]] = {
    name: (LOSS_CONFIGS[name], function)
    for name, function in {
        "gspo": gspo,
        "gspo_token": gspo_token,
        "luspo": luspo,
        "gmpo": gmpo,
        "fspo": fspo,
        "vespo": vespo,
        "grpo": grpo,
        "sapo": sapo,
        "cispo": cispo,
        "cfpo": cfpo,
        "pspo": pspo,
        "dppo_tv": dppo_tv,
        "minirl": minirl,
        "ctpo": ctpo,
        "aspo": aspo,
        "dcpo": dcpo,
        "real": real,
    }.items()
}


def check_finite(batch: SequenceBatch) -> None:
    """Raises NonFiniteError for the first trained token or advantage of the batch that is NaN or infinite.

    Sequences without trained tokens on this rank are not looked at.
    """
    mask = batch.mask.bool()
    per_token = batch.advantages if batch.has_token_advantages else batch.advantages[batch.token_sequence]
    quantities = {
        "log_probs": batch.log_probs.detach(),
        "old_log_probs": batch.old_log_probs,
        "rollout_log_probs": batch.rollout_log_probs,
        "reference_log_probs": batch.reference_log_probs,
        "entropies": None if batch.entropies is None else batch.entropies.detach(),
        "advantages": per_token,
    }
    for name, values in quantities.items():
        if values is None:
            continue
        bad = mask & ~torch.isfinite(values)
        if bad.any():
            token = int(bad.nonzero()[0, 0])
            raise NonFiniteError(name, int(batch.token_sequence[token]), float(values[token]))
