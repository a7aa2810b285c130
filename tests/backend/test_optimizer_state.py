"""Adam's state goes to files and back as Megatron's own gather takes it, bit for bit, in a fraction of the memory."""

from math import prod

import numpy as np
import pytest
import torch

from gspo_megatron.backend.optimizer_state import _Rounds
from gspo_megatron.backend.stored_state import rectangles
from gspo_megatron.weights.torch_dist_files import TorchDistReader
from make_tiny_model import make_tiny_model
from tests.backend.checkpoint_runs import save_and_go_on
from tests.backend.state_runs import fail_to_read, load_and_save, save_both_ways
from tests.ranks import run_ranks

SIZES = {"vocab_size": 2053, "num_hidden_layers": 4, "hidden_size": 96}
"""Odd sizes, so that the borders of ranks fall within parameters, and the vocabulary has padding."""
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 60_000}
CASES = {
    "data 4": ("qwen3_moe", "fp32", {}, 4, {}, ({"tensor": 2}, 2)),
    "experts held by all": ("qwen3_moe", "bf16", {"tensor": 2}, 4, {}, ({"expert": 2}, 2)),
    "expert replicas": ("qwen3_moe", "bf16", {"expert": 2}, 4, {}, ({"pipeline": 2, "virtual_pipeline": 2}, 2)),
    "expert tensor": ("qwen3_moe", "fp32", {"tensor": 2, "expert_tensor": 2}, 4, BUCKETS, ({}, 1)),
    "tied on two stages": ("qwen3", "bf16", {"pipeline": 2}, 4, {}, ({"tensor": 2}, 2)),
    "virtual stages": ("glm4_moe", "bf16", {"pipeline": 2, "virtual_pipeline": 2}, 4, BUCKETS, ({}, 2)),
    "one rank": ("qwen3_moe", "fp32", {}, 1, BUCKETS, ({}, 3)),
}
EXCHANGE_BYTES = 40_000
"""So that there are many rounds, with borders within a piece."""
ALLOWANCE = 100_000
"""Bytes of what is no parameter: generators' states, and what describes the tensors."""


def model_of(case, directory):
    tied = {"tie_word_embeddings": True} if case.startswith("tied") else {}
    return str(make_tiny_model(CASES[case][0], directory, 3, SIZES | tied))


def read_all(reader):
    tensors = {}
    for key, stored in reader.tensors.items():
        tensors[key] = torch.empty(stored.shape, dtype=stored.dtype)
        reader.read_into(key, (0,) * len(stored.shape), tensors[key])
    return tensors


def chunks_of(reader):
    """Key -> where its chunks begin and how large they are; and bytes of chunks by the rank that wrote them."""
    places, written = {}, {}
    for key, stored in reader.tensors.items():
        chunks = [chunk for some in stored._chunks.values() for chunk in some]
        places[key] = sorted((chunk.start, chunk.shape) for chunk in chunks)
        for chunk in chunks:
            rank = int(chunk.file.removeprefix("__").split("_")[0])
            written[rank] = written.get(rank, 0) + prod(chunk.shape) * stored.dtype.itemsize
    return places, written


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_as_megatron_gathers_it(case, tmp_path):
    _, dtype, layout, world, ddp, (other, num_ranks) = CASES[case]
    model = model_of(case, tmp_path / "model")
    ours, megatrons, again = (str(tmp_path / name) for name in ("ours", "megatrons", "again"))
    ranks = run_ranks(save_both_ways, world, layout, model, ours, megatrons, dtype, ddp, EXCHANGE_BYTES)
    reader, reference = TorchDistReader(ours), TorchDistReader(megatrons)
    places, written = chunks_of(reader)
    assert places == chunks_of(reference)[0]
    tensors, expected = read_all(reader), read_all(reference)
    assert len({key for key in tensors if key.startswith("optimizer.state.exp_avg_sq.")}) > 20
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    assert all(tensors[key].any() for key in expected if key.startswith("optimizer.state.exp_avg."))
    assert (sum(rank["cut"] for rank in ranks) > 0) == (world > 1)

    for number, rank in enumerate(ranks):
        assert rank["ours"] < written[number] + 2 * EXCHANGE_BYTES + ALLOWANCE
    of_stage = world // layout.get("pipeline", 1)
    for first in range(0, world, of_stage):  # the ranks of a stage share what they hold together
        shares = [written[number] for number in range(first, first + of_stage)]
        assert max(shares) < 1.1 * min(shares)
    assert max(rank["megatrons"] for rank in ranks) > 1.5 * max(rank["ours"] for rank in ranks)

    loaded = run_ranks(load_and_save, num_ranks, other, model, ours, again, dtype)
    for rank in loaded:
        assert rank["equal"] and all(rank["equal"])
        assert rank["most"] < rank["weights"] + ALLOWANCE
    for key, tensor in read_all(TorchDistReader(again)).items():
        inside = tuple(slice(0, min(a, b)) for a, b in zip(tensor.shape, tensors[key].shape, strict=True))
        assert torch.equal(tensor[inside], tensors[key][inside]), key


def test_a_rank_that_can_not_read(tmp_path):
    model = str(make_tiny_model("qwen3_moe", tmp_path / "model", 3, {"vocab_size": 513, "num_hidden_layers": 1}))
    run_ranks(save_and_go_on, 2, {}, model, str(tmp_path / "checkpoint"), "fp32", False)
    said = run_ranks(fail_to_read, 2, {}, model, str(tmp_path / "checkpoint"), "fp32")
    assert said == ["rank 1: the disk is gone"] * 2


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (4, 1, 3), (2, 3, 4, 5)])
def test_rectangles_make_up_the_range_in_its_order(shape):
    whole = np.arange(prod(shape)).reshape(shape)
    for start in range(whole.size + 1):
        for stop in range(start, whole.size + 1):
            found = list(rectangles(shape, start, stop))
            pieces = [
                whole[tuple(slice(low, low + size) for low, size in zip(offset, sizes, strict=True))].reshape(-1)
                for offset, sizes in found
            ]
            assert np.concatenate([*pieces, np.empty(0)]).tolist() == list(range(start, stop))
            assert len(found) <= max(1, 2 * len(shape) - 1)


def test_rounds_are_cut_alike_by_who_sends_and_who_gets():
    """Whatever pieces the two have, they exchange as much in a round."""
    generator = np.random.default_rng(1)
    for quota in (1, 3, 10, 1000):
        lengths = [generator.integers(1, 12, size=number).tolist() for number in (0, 1, 5, 9)]
        rounds = _Rounds(lengths, quota)
        pieces = [piece for number in range(200) for piece in rounds.pieces(number)]
        for rank, expected in enumerate(lengths):
            for index, length in enumerate(expected):
                parts = [(low, high) for r, i, low, high in pieces if (r, i) == (rank, index)]
                assert [low for low, _ in parts] == [0, *(high for _, high in parts[:-1])] and parts[-1][1] == length
            alone = [rounds.sizes(number)[rank] for number in range(200)]
            assert alone == [
                sum(high - low for r, _, low, high in rounds.pieces(number) if r == rank) for number in range(200)
            ]
            full, rest = divmod(sum(expected), quota)
            assert [size for size in alone if size] == [quota] * full + [rest] * (rest > 0)
        assert rounds.largest == max(sum(rounds.sizes(number)) for number in range(200))
