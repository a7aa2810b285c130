"""From the samples of one step to the micro-batches of one rank.

Shape legend: M samples of the step, N sequences in a micro-batch, T packed tokens of it, S = T / context-parallel size
of them on this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gspo_megatron.algorithm.losses import LossOutput, NonFiniteError, check_finite
from gspo_megatron.algorithm.packing import (
    PackedTokens,
    pack,
    plan_micro_batches,
    sequence_multiple,
    split_mini_batches,
)
from gspo_megatron.backend.context import ContextParallel
from gspo_megatron.config import ParallelConfig
from gspo_megatron.types import Rollout, SequenceBatch

WHOLE = ContextParallel()
"""No context parallelism: this rank sees whole sequences."""


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
    trained: np.ndarray
    """bool, one a response token: False for a token that is context only."""

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
            trained=np.ones(sum(len(sample.response_ids) for sample in samples), dtype=bool),
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

    def mask(self, sample: int) -> np.ndarray:
        return self.trained[self.response_bounds[sample] : self.response_bounds[sample + 1]]


@dataclass(frozen=True)
class MicroBatch:
    packed: PackedTokens
    """`values` holds "rollout_log_probs", "advantages" where each token has its own, and "reference_log_probs" where
    there is a reference policy."""
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
    parallel: ParallelConfig,
    least_micro_batches: int = 1,
    token_advantages: Sequence[Sequence[float]] | None = None,
    drop: np.ndarray | None = None,
    whole_groups: bool = False,
) -> list[list[MicroBatch]]:
    """[mini-batch][micro-batch] of one data-parallel rank; every rank has as many micro-batches in a mini-batch.

    Mini-batches are whole groups in the order of the rollout. Context parallelism pads each sequence, and the budget
    holds with that padding. `token_advantages` [M][R] take the place of `advantages` [M]. Samples of `drop` [M] bool
    are left out, of the loss's sum and of its count. `whole_groups` keeps the samples of a group in one micro-batch.
    Raises ValueError for a sequence (a group) longer than `token_budget`.
    """
    pieces = sequence_multiple(parallel)
    lengths = -(-arrays.lengths // pieces) * pieces
    # the interleaved schedule goes through micro-batches in groups of the pipeline's size
    multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1
    mini_batches = []
    for members in split_mini_batches(arrays.groups.tolist(), num_mini_batches):
        members = [sample for sample in members if drop is None or not drop[sample]]
        units = _groups(arrays.groups, members) if whole_groups else [[sample] for sample in members]
        plan = plan_micro_batches(
            [int(lengths[unit].sum()) for unit in units], data_size, token_budget,
            least=least_micro_batches, multiple=multiple,
        )[data_rank]  # fmt: skip
        if not units:  # every sample dropped: micro-batches of padding, so that the schedule runs
            plan = [[]] * (-(-least_micro_batches // multiple) * multiple)
        chosen = [[sample for unit in units_of_one for sample in units[unit]] for units_of_one in plan]
        mini_batches.append(
            [_micro_batch(arrays, advantages, samples, parallel, token_advantages) for samples in chosen]
        )
    return mini_batches


def _groups(groups: np.ndarray, members: Sequence[int]) -> list[list[int]]:
    """`members` by their group, in order."""
    units: dict[int, list[int]] = {}
    for sample in members:
        units.setdefault(int(groups[sample]), []).append(sample)
    return list(units.values())


def _micro_batch(
    arrays: RolloutArrays, advantages: Tensor, samples: Sequence[int], parallel: ParallelConfig,
    token_advantages: Sequence[Sequence[float]] | None,
) -> MicroBatch:  # fmt: skip
    values = {"rollout_log_probs": [arrays.log_probs(sample) for sample in samples]}
    if token_advantages is not None:
        values["advantages"] = [token_advantages[sample] for sample in samples]
    packed = pack(
        [(arrays.prompt(sample), arrays.response(sample)) for sample in samples],
        values,
        # sequence parallelism cuts each context-parallel rank's tokens into as many equal pieces
        alignment=parallel.tensor * parallel.context,
        sequence_multiple=sequence_multiple(parallel),
        trained=[arrays.mask(sample) for sample in samples],
    )
    return MicroBatch(packed, tuple(samples), advantages[list(samples)], torch.as_tensor(arrays.groups[list(samples)]))


def sequence_batch(
    micro_batch: MicroBatch, log_probs: Tensor, old_log_probs: Tensor, context: ContextParallel = WHOLE
) -> SequenceBatch:
    """What a loss sees on this rank: padding at the end cut away, everything on the device of `log_probs` [S].

    `log_probs` is [S], or [2, S] with entropies. `old_log_probs` is [T], of the whole micro-batch, as are all values
    in `micro_batch`. A sum over a sequence is over all context-parallel ranks and takes one collective; one of them
    counts the sequences.
    """
    packed, device = micro_batch.packed, log_probs.device
    positions = context.positions(packed.cu_seqlens)
    num_tokens = packed.num_tokens // context.size

    def mine(values: Tensor) -> Tensor:
        return values[positions.to(values.device)][:num_tokens].to(device)

    token_advantages, reference = packed.values.get("advantages"), packed.values.get("reference_log_probs")
    log_probs, entropies = log_probs if log_probs.dim() == 2 else (log_probs, None)
    batch = SequenceBatch(
        log_probs=log_probs[:num_tokens],
        entropies=None if entropies is None else entropies[:num_tokens],
        old_log_probs=mine(old_log_probs),
        rollout_log_probs=mine(packed.values["rollout_log_probs"]),
        advantages=micro_batch.advantages.to(device) if token_advantages is None else mine(token_advantages),
        has_token_advantages=token_advantages is not None,
        mask=mine(packed.loss_mask),
        cu_seqlens=packed.cu_seqlens[: packed.num_sequences + 1].to(device) // context.size,
        groups=micro_batch.groups.to(device),
        counts_sequences=context.counts_sequences,
        reference_log_probs=None if reference is None else mine(reference),
    )
    if context.size > 1:
        owner = batch.token_sequence

        def sum_over_sequences(values: Tensor) -> Tensor:
            local = values.new_zeros(batch.num_sequences, *values.shape[1:]).index_add(0, owner, values)
            return context.sum(local)

        batch.sequence_sum = batch.sequence_sums = sum_over_sequences
        batch.num_chunks, batch.token_chunk = context.chunks(batch.cu_seqlens)
    return batch


def mini_batch_loss(
    loss,
    config,
    mini_batch: Sequence[MicroBatch],
    old_log_probs: Sequence[Tensor],
    where: str,
    context: ContextParallel = WHOLE,
):
    """The loss of micro-batch `index` of a mini-batch, as `Policy.update` calls it; `old_log_probs` are [T] each.

    Raises FloatingPointError naming the sample and `where` (rank and stage) for a value that is not finite.
    """

    def of_micro_batch(index: int, log_probs: Tensor) -> LossOutput:
        batch = sequence_batch(mini_batch[index], log_probs, old_log_probs[index], context)
        try:
            check_finite(batch)
        except NonFiniteError as error:
            sample = mini_batch[index].samples[error.sequence]
            raise FloatingPointError(f"{where}: {error.quantity} of sample {sample} is {error.value}") from error
        out = loss(config, batch)
        return out._replace(metrics={**out.metrics, **_gap(batch)})

    return of_micro_batch


def _gap(batch: SequenceBatch) -> dict[str, Tensor]:
    """|log pi - log mu| between this policy and the rollout engine, over trained tokens of this rank, nats: sum,
    maximum, count."""
    mask = batch.mask.bool()
    gap = (batch.log_probs.detach().double() - batch.rollout_log_probs.double()).abs()[mask]
    return {"gap_sum": gap.sum(), "gap_max": gap.amax() if gap.numel() else gap.sum(), "gap_count": mask.sum().double()}


def gap_sums(micro_batches: Sequence[MicroBatch], log_probs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The same over whole micro-batches, for log-probs [T] that are known before any update; add up over data ranks."""
    total = {name: torch.zeros((), dtype=torch.float64) for name in ("gap_sum", "gap_max", "gap_count")}
    for micro_batch, values in zip(micro_batches, log_probs, strict=True):
        gaps = _gap(sequence_batch(micro_batch, values, values))
        total = {
            name: torch.maximum(total[name], gaps[name].cpu()) if name == "gap_max" else total[name] + gaps[name].cpu()
            for name in total
        }
    return total
