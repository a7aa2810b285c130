"""Packed arrays against a loop over single sequences, position by position."""

import math
import random

import pytest
import torch

from gspo_megatron.algorithm.packing import pack


def random_sequences(generator, count):
    ids = lambda low, high: [generator.randint(1, 99) for _ in range(generator.randint(low, high))]  # noqa: E731
    return [(ids(1, 6), ids(0, 7)) for _ in range(count)]


def padded(length, multiple):
    return -(-length // multiple) * multiple


@pytest.mark.parametrize("seed", range(60))
def test_every_position(seed):
    generator = random.Random(seed)
    sequences = random_sequences(generator, generator.randint(0, 6))
    alignment, multiple = generator.choice([1, 4, 8, 16]), generator.choice([1, 2, 4])
    old = [[-generator.random() for _ in response] for _, response in sequences]
    packed = pack(sequences, {"old": old}, alignment=alignment, sequence_multiple=multiple)

    start = 0
    for i, (prompt, response) in enumerate(sequences):
        tokens = prompt + response
        size = padded(len(tokens), multiple)
        assert packed.cu_seqlens[i : i + 2].tolist() == [start, start + size]
        for t in range(size):
            at = start + t
            assert int(packed.position_ids[at]) == t
            assert int(packed.input_ids[at]) == (tokens[t] if t < len(tokens) else 0)
            assert int(packed.labels[at]) == (tokens[t + 1] if t + 1 < len(tokens) else 0)
            predicted = t + 1 - len(prompt)  # index in the response of the token that t predicts
            trained = 0 <= predicted < len(response)
            assert bool(packed.loss_mask[at]) == trained
            assert float(packed.values["old"][at]) == pytest.approx(old[i][predicted] if trained else 0.0)
        start += size
    assert packed.num_sequences == len(sequences) and packed.num_tokens == start
    assert not packed.loss_mask[start:].any() and not packed.input_ids[start:].any()
    total = len(packed.input_ids)
    assert total == padded(start or 2, math.lcm(alignment, multiple))
    assert packed.cu_seqlens.tolist()[-1] == total
    assert len(packed.cu_seqlens) == len(sequences) + 1 + (total > start)
    assert packed.position_ids[start:].tolist() == list(range(total - start))
    assert packed.max_seqlen == int(packed.cu_seqlens.diff().max())
    for values, expected in zip(packed.split(packed.values["old"]), old, strict=True):
        torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float32))


def test_labels_of_the_response_are_the_response():
    packed = pack([([1, 2, 3], [4, 5]), ([6], [])])
    assert packed.labels[packed.loss_mask].tolist() == [4, 5]
    assert [part.tolist() for part in packed.split(packed.labels)] == [[4, 5], []]


@pytest.mark.parametrize("alignment, expected", [(1, 2), (8, 8)])
def test_without_sequences_only_a_dummy(alignment, expected):
    packed = pack([], {"old": []}, alignment=alignment)
    assert packed.cu_seqlens.tolist() == [0, expected] and packed.num_sequences == 0 and packed.num_tokens == 0
    assert not packed.loss_mask.any() and packed.split(packed.input_ids) == []


def test_faults_name_the_sequence():
    with pytest.raises(ValueError, match="sequence 1 has an empty prompt"):
        pack([([1], [2]), ([], [2])])
    with pytest.raises(ValueError, match="old of sequence 0 has 1 values, response 2"):
        pack([([1], [2, 3])], {"old": [[-1.0]]})
