"""The cuts by themselves: zigzag order, padding to one length, and numbers of micro-batches."""

import pytest
import torch

from gspo_megatron.algorithm.losses import LOSSES
from gspo_megatron.algorithm.packing import pack, pad_to, plan_micro_batches
from gspo_megatron.backend.context import ContextParallel, zigzag
from gspo_megatron.batches import MicroBatch, sequence_batch


def test_zigzag_by_hand():
    """Two ranks, sequences of 4 and 8 tokens: rank 0 holds the outer chunks, rank 1 the inner ones."""
    bounds = torch.tensor([0, 4, 12])
    assert zigzag(bounds, 0, 2).tolist() == [0, 3, 4, 5, 10, 11]
    assert zigzag(bounds, 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    assert zigzag(bounds, 0, 1).tolist() == list(range(12))


def test_zigzag_holds_every_token_once():
    bounds = torch.tensor([0, 8, 32, 40])
    held = torch.cat([zigzag(bounds, rank, 4) for rank in range(4)])
    assert sorted(held.tolist()) == list(range(40))


def test_a_sequence_that_can_not_be_cut_is_refused():
    with pytest.raises(ValueError, match="6 tokens.*sequence_multiple"):
        zigzag(torch.tensor([0, 6]), 0, 2)


def test_padding_changes_no_sequence():
    batch = pack([([5, 6], [7, 8, 9]), ([5], [])], {"x": [[0.1, 0.2, 0.3], []]}, alignment=4)
    longer = pad_to(batch, 20)
    assert longer.labels.numel() == 20 and longer.cu_seqlens[-1] == 20
    assert longer.num_sequences == 2 and longer.num_tokens == batch.num_tokens == 6
    for name in ("input_ids", "labels", "loss_mask", "position_ids"):
        assert torch.equal(getattr(longer, name)[:8], getattr(batch, name))
    assert not longer.loss_mask[8:].any() and longer.position_ids[8:].tolist() == list(range(12))
    assert longer.max_seqlen == 12
    assert pad_to(batch, 8) is batch


def test_untrained_response_tokens_are_masked_and_hold_no_value():
    batch = pack([([5, 6], [7, 8, 9])], {"x": [[0.1, 0.2, 0.3]]}, trained=[[True, False, True]])
    assert batch.loss_mask.tolist() == [False, True, False, True, False]
    assert batch.values["x"].tolist() == pytest.approx([0.0, 0.1, 0.0, 0.3, 0.0])
    assert batch.labels.tolist() == [6, 7, 8, 9, 0]
    with pytest.raises(ValueError, match="trained of sequence 0 has 2 values, response 3"):
        pack([([5, 6], [7, 8, 9])], trained=[[True, False]])


@pytest.mark.parametrize(("least", "multiple", "number"), [(1, 1, 2), (3, 1, 3), (1, 4, 4), (5, 4, 8)])
def test_numbers_of_micro_batches(least, multiple, number):
    plan = plan_micro_batches([10] * 8, num_ranks=2, token_budget=20, least=least, multiple=multiple)
    assert [len(rank) for rank in plan] == [number] * 2
    assert sorted(index for rank in plan for micro_batch in rank for index in micro_batch) == list(range(8))


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo"])
def test_a_loss_takes_one_collective_a_micro_batch(name):
    """However many sequences the micro-batch has."""
    packed = pack(
        [([1, 2], [3, 4]), ([1], [2, 3, 4, 5, 6]), ([1, 2, 3], [])],
        {"rollout_log_probs": [[-1.0] * 2, [-1.0] * 5, []]},
        sequence_multiple=4,
    )
    context = ContextParallel()
    context.size, sums = 2, []
    context.sum = lambda values: sums.append(values.shape) or values
    micro_batch = MicroBatch(packed, (0, 1, 2), torch.ones(3), torch.zeros(3, dtype=torch.long))
    log_probs = torch.zeros(packed.labels.numel() // 2, requires_grad=True)
    config_type, loss = LOSSES[name]
    loss(config_type(), sequence_batch(micro_batch, log_probs, torch.zeros_like(packed.labels).float(), context))
    assert len(sums) == 1 and sums[0][0] == 3
