"""From the samples of one step to the micro-batches of one rank.

Shape legend: M samples of the step, N sequences in a micro-batch, T packed tokens on this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gspo_megatron.algorithm.losses import LossOutput, NonFiniteError, check_finite
from gspo_megatron.algorithm.packing import PackedTokens, pack, plan_micro_batches, split_mini_batches
from gspo_megatron.types import Rollout, SequenceBatch


@dataclass(frozen=True)
class RolloutArrays:
    """All samples of a step in flat arrays: what rank 0 sends to all ranks as one message."""

    groups: np.ndarray
    """[M] int64."""
    rewards: np.ndarray
    """[M] float64."""
    truncated: np.ndarray
    """[M] bool: ended by the length limit."""
    weight_versions: np.ndarray
    """[M] int64."""
    prompt_bounds: np.ndarray
    """[M+1] int64 offsets into prompt_ids."""
    response_bounds: np.ndarray
    """[M+1] int64 offsets into response_ids and rollout_log_probs."""
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    rollout_log_probs: np.ndarray
    """float32, nats."""

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> "RolloutArrays":
        samples = rollout.samples

        def bounds(lengths: list[int]) -> np.ndarray:
            return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

        def flat(rows, dtype) -> np.ndarray:
            return np.fromiter((value for row in rows for value in row), dtype=dtype)

        return cls(
            groups=np.array([sample.group for sample in samples], dtype=np.int64),
            rewards=np.array([sample.reward for sample in samples], dtype=np.float64),
            truncated=np.array([sample.finish_reason == "length" for sample in samples]),
            weight_versions=np.array([sample.weight_version for sample in samples], dtype=np.int64),
            prompt_bounds=bounds([len(sample.prompt_ids) for sample in samples]),
            response_bounds=bounds([len(sample.response_ids) for sample in samples]),
            prompt_ids=flat((sample.prompt_ids for sample in samples), np.int32),
            response_ids=flat((sample.response_ids for sample in samples), np.int32),
            rollout_log_probs=flat((sample.rollout_log_probs for sample in samples), np.float32),
        )

    @property
    def num_samples(self) -> int:
        return len(self.groups)

    @property
    def response_lengths(self) -> np.ndarray:
        return np.diff(self.response_bounds)

    @property
    def lengths(self) -> np.ndarray:
        """[M] tokens of prompt and response."""
        return np.diff(self.prompt_bounds) + self.response_lengths

    def prompt(self, sample: int) -> np.ndarray:
        return self.prompt_ids[self.prompt_bounds[sample] : self.prompt_bounds[sample + 1]]

    def response(self, sample: int) -> np.ndarray:
        return self.response_ids[self.response_bounds[sample] : self.response_bounds[sample + 1]]

    def log_probs(self, sample: int) -> np.ndarray:
        return self.rollout_log_probs[self.response_bounds[sample] : self.response_bounds[sample + 1]]


@dataclass(frozen=True)
class MicroBatch:
    packed: PackedTokens
    """`values` holds "rollout_log_probs"."""
    samples: tuple[int, ...]
    """[N] indices into the step's samples."""
    advantages: Tensor
    """[N] float32."""
    groups: Tensor
    """[N] int64."""


def plan_rank(
    arrays: RolloutArrays,
    advantages: Tensor,
    *,
    num_mini_batches: int,
    token_budget: int,
    data_rank: int,
    data_size: int,
    alignment: int,
) -> list[list[MicroBatch]]:
    """[mini-batch][micro-batch] of one data-parallel rank; every rank has as many micro-batches in a mini-batch.

    Mini-batches are whole groups in the order of the rollout. `alignment`: T is made a multiple of it (sequence
    parallelism cuts T into as many equal pieces). Raises ValueError for a sequence longer than `token_budget`.
    """
    mini_batches = []
    for members in split_mini_batches(arrays.groups.tolist(), num_mini_batches):
        plan = plan_micro_batches(arrays.lengths[members].tolist(), data_size, token_budget)
        mini_batches.append(
            [_micro_batch(arrays, advantages, [members[i] for i in chosen], alignment) for chosen in plan[data_rank]]
        )
    return mini_batches


def _micro_batch(arrays: RolloutArrays, advantages: Tensor, samples: Sequence[int], alignment: int) -> MicroBatch:
    packed = pack(
        [(arrays.prompt(sample), arrays.response(sample)) for sample in samples],
        {"rollout_log_probs": [arrays.log_probs(sample) for sample in samples]},
        alignment=alignment,
    )
    return MicroBatch(packed, tuple(samples), advantages[list(samples)], torch.as_tensor(arrays.groups[list(samples)]))


def sequence_batch(micro_batch: MicroBatch, log_probs: Tensor, old_log_probs: Tensor) -> SequenceBatch:
    """What a loss sees: padding at the end cut away, everything on the device of `log_probs` [T]."""
    packed, device = micro_batch.packed, log_probs.device
    num_tokens = packed.num_tokens
    return SequenceBatch(
        log_probs=log_probs[:num_tokens],
        old_log_probs=old_log_probs[:num_tokens],
        rollout_log_probs=packed.values["rollout_log_probs"][:num_tokens].to(device),
        advantages=micro_batch.advantages.to(device),
        mask=packed.loss_mask[:num_tokens].to(device),
        cu_seqlens=packed.cu_seqlens[: packed.num_sequences + 1].to(device),
        groups=micro_batch.groups.to(device),
    )


def mini_batch_loss(loss, config, mini_batch: Sequence[MicroBatch], old_log_probs: Sequence[Tensor], where: str):
    """The loss of micro-batch `index` of a mini-batch, as `Policy.update` calls it.

    Raises FloatingPointError naming the sample and `where` (rank and stage) for a value that is not finite.
    """

    def of_micro_batch(index: int, log_probs: Tensor) -> LossOutput:
        batch = sequence_batch(mini_batch[index], log_probs, old_log_probs[index].to(log_probs.device))
        try:
            check_finite(batch)
        except NonFiniteError as error:
            sample = mini_batch[index].samples[error.sequence]
            raise FloatingPointError(f"{where}: {error.quantity} of sample {sample} is {error.value}") from error
        out = loss(config, batch)
        return out._replace(metrics={**out.metrics, **_gap(batch)})

    return of_micro_batch


def _gap(batch: SequenceBatch) -> dict[str, Tensor]:
    """|log pi - log mu| between this policy and the rollout engine, over trained tokens, nats: sum, maximum, count."""
    mask = batch.mask.bool()
    gap = (batch.log_probs.detach().double() - batch.rollout_log_probs.double()).abs()[mask]
    return {"gap_sum": gap.sum(), "gap_max": gap.amax() if gap.numel() else gap.sum(), "gap_count": mask.sum().double()}


def gap_sums(micro_batches: Sequence[MicroBatch], log_probs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The same over whole micro-batches, for log-probs [T] that are known before any update."""
    total = {name: torch.zeros((), dtype=torch.float64) for name in ("gap_sum", "gap_max", "gap_count")}
    for micro_batch, values in zip(micro_batches, log_probs, strict=True):
        gaps = _gap(sequence_batch(micro_batch, values, values))
        total = {
            name: torch.maximum(total[name], gaps[name].cpu()) if name == "gap_max" else total[name] + gaps[name].cpu()
            for name in total
        }
    return total
