"""Weights through a real Megatron model on several ranks and out again, bit for bit."""

import numpy as np
import pytest
import torch
from export_runs import bits, export_without, load_and_export
from safetensors.torch import load_file

from make_tiny_model import make_tiny_model
from tests.ranks import run_ranks

LAYOUTS = [
    (2, {"expert": 2}),
    (2, {"pipeline": 2}),
    (4, {"tensor": 2, "pipeline": 2}),
    (4, {"tensor": 2, "expert": 2}),
    (4, {"tensor": 4, "sequence_parallel": False}),
]
"""Ranks and layout; the last has more tensor ranks than the model has KV heads."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list:
    """Untied and tied Qwen3-MoE with a vocabulary that needs padding, 4 layers for the stages."""
    root, settings = tmp_path_factory.mktemp("models"), {"vocab_size": 513, "num_hidden_layers": 4, "num_experts": 4}
    return [
        make_tiny_model("qwen3_moe", root / str(tied), 3, settings | {"tie_word_embeddings": tied})
        for tied in (False, True)
    ]


@pytest.mark.parametrize("world, layout", LAYOUTS, ids=str)
def test_export_is_what_was_loaded_bit_for_bit(checkpoints, world, layout):
    results = run_ranks(load_and_export, world, layout, [str(path) for path in checkpoints])
    cases = [(path, dtype) for path in checkpoints for dtype in (torch.float32, torch.bfloat16)]
    for number, (path, dtype) in enumerate(cases):
        expected = {name: bits(-tensor.to(dtype)) for name, tensor in load_file(path / "model.safetensors").items()}
        for senders in ("first", "stages", "all"):
            by_rank = [result[number][senders] for result in results]
            names = [name for got in by_rank for name, _ in got]
            assert len(names) == len(set(names)) and set(names) == set(expected)
            for name, found in (item for got in by_rank for item in got):
                assert found.dtype == expected[name].dtype
                np.testing.assert_array_equal(found, expected[name], err_msg=f"{name} {dtype} {senders}")
            counts = {"first": 1, "stages": layout.get("pipeline", 1), "all": world}
            assert sum(map(bool, by_rank)) == counts[senders]


@pytest.mark.parametrize("absent, says", [(1, "what rank 1 holds of "), (0, "rank 0 to take ")])
def test_a_rank_that_takes_no_part_is_named(checkpoints, absent, says):
    results = run_ranks(export_without, 2, absent, str(checkpoints[0]))
    assert f"rank {1 - absent} (" in results[1 - absent]
    assert f"weights of other ranks: {says}model." in results[1 - absent]
