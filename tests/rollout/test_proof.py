"""Expected checksums while tensors go by, in any order; which parameters are proven; what a server is told to skip."""

import hashlib

import pytest
import torch

from gspo_megatron.rollout.proof import Expected, Rotation, skipped
from gspo_megatron.weights.engine_layout import Piece

TENSORS = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(24.0, 48.0).view(4, 6)}
DTYPES = dict.fromkeys(TENSORS, torch.float32)
LAYOUT = {
    "ab": [
        [Piece("a", (0, 0), (2, 6)), Piece("b", (0, 0), (2, 6))],
        [Piece("a", (2, 0), (2, 6)), Piece("b", (2, 0), (2, 6))],
    ],
    "b": [
        [Piece("b", (0, 0), (4, 3)), Piece("", (0,), (2,))],
        [Piece("b", (0, 3), (4, 3), (5, 4)), Piece("", (0,), (2,))],
    ],
}


def checksum(*blocks):
    return hashlib.sha256(b"".join(block.contiguous().numpy().tobytes() for block in blocks)).digest()[:8].hex()


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_checksums_do_not_depend_on_the_order_in_which_tensors_come(order):
    expected = Expected(LAYOUT, LAYOUT, DTYPES, on_gpu=False)
    for name in order:
        buffer = TENSORS[name].clone()
        expected.add([(name, buffer)])
        buffer.fill_(-1)  # the next bucket lies in the same memory
    a, b = TENSORS["a"], TENSORS["b"]
    padded = torch.zeros(5, 4)
    padded[:4, :3] = b[:, 3:]
    assert expected.checksums() == [
        {"ab": (checksum(a[:2], b[:2]),), "b": (checksum(b[:, :3], torch.zeros(2)),)},
        {"ab": (checksum(a[2:], b[2:]),), "b": (checksum(padded, torch.zeros(2)),)},
    ]
    assert not expected.needed and not expected._held


def test_a_parameter_whose_tensors_did_not_all_come_has_no_checksum():
    expected = Expected(LAYOUT, LAYOUT, DTYPES, on_gpu=False)
    expected.add([("b", TENSORS["b"])])
    assert [set(rank) for rank in expected.checksums()] == [{"b"}, {"b"}]


def test_an_engine_may_hold_in_fp32_what_was_sent_in_bf16_and_not_the_other_way_round():
    layout = {"router": [[Piece("router", (0, 0), (4, 6))]]}
    sent = TENSORS["a"].bfloat16() / 3
    narrow = Expected(layout, layout, {"router": torch.bfloat16}, on_gpu=False)
    narrow.add([("router", sent)])
    assert narrow.checksums() == [{"router": (checksum(sent.view(torch.int16)), checksum(sent.float()))}]
    wide = Expected(layout, layout, {"router": torch.float32}, on_gpu=False)
    wide.add([("router", TENSORS["a"] / 3)])
    assert wide.checksums() == [{"router": (checksum(TENSORS["a"] / 3),)}]


def test_all_parameters_have_their_turn():
    sizes = {f"p{index}": 10 + index for index in range(10)}
    rotation, seen = Rotation(0.25), []
    while len(seen) < 10:
        taken = rotation.take(sizes)
        assert sum(sizes[name] for name in taken) >= 0.25 * sum(sizes.values()) and len(taken) < 5
        seen += taken
    assert set(seen) == set(sizes)
    assert Rotation(0.0).take(sizes) == [] and len(Rotation(1.0).take(sizes)) == 10
    assert len(Rotation(1e-9).take(sizes)) == 1


def test_whole_layers_are_skipped_by_their_prefix_and_no_sampled_name_with_them():
    parameters = [f"model.layers.{layer}.{name}" for layer in (0, 1, 11) for name in ("w", "w_scale")] + ["norm"]
    sample = ["model.layers.1.w_scale"]
    entries = skipped(parameters, sample)
    assert "model.layers.11." in entries and "model.layers.0." in entries and "norm" in entries
    hashed = [name for name in parameters if not any(entry in name for entry in entries)]
    # "…1.w" is a part of the sampled name, so that it is hashed as well
    assert hashed == ["model.layers.1.w", "model.layers.1.w_scale"]
