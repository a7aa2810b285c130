"""What a run minimises: its loss, corrected for the rollout engine's gap, plus its regularizers."""

from collections.abc import Callable

from gspo_megatron.algorithm.corrections import correct
from gspo_megatron.algorithm.loss_terms import LossOutput
from gspo_megatron.algorithm.regularizers import regularize
from gspo_megatron.config import Config
from gspo_megatron.types import SequenceBatch

Loss = Callable[..., LossOutput]


def make_objective(loss: Loss, config: Config) -> Loss:
    """`loss` as a function of the same two arguments (its configuration, a batch) with `config.correction` and
    `config.regularizer` applied in this order: the regularizers are not weighed by the correction."""

    def objective(loss_config, batch: SequenceBatch) -> LossOutput:
        out = correct(config.correction, batch, loss(loss_config, batch))
        return regularize(config.regularizer, batch, out)

    return objective
