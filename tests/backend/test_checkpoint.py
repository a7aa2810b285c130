"""A policy that is loaded goes on as the one that was saved, on the same layout bit for bit."""

import numpy as np
import pytest

from make_tiny_model import make_tiny_model
from tests.backend.checkpoint_runs import load_and_go_on, save_and_go_on
from tests.ranks import run_ranks

SETTINGS = {"vocab_size": 513, "num_hidden_layers": 4}
"""An odd vocabulary, which tensor ranks pad; layers for two pipeline stages of two chunks."""
SAME, ONE_RANK = None, ({}, 1)
CASES = {
    "fp32, tensor": ("qwen3_moe", "fp32", {"tensor": 2}, [SAME, ({"pipeline": 2, "virtual_pipeline": 2}, 2)]),
    "bf16, expert": ("qwen3_moe", "bf16", {"expert": 2}, [SAME, ({"tensor": 2, "expert": 2}, 2)]),
    "tied, pipeline": ("qwen3", "fp32", {"pipeline": 2}, [SAME, ONE_RANK]),
    "bf16, expert bias": ("glm4_moe", "bf16", {"pipeline": 2, "virtual_pipeline": 2}, [SAME, ({"expert": 2}, 2)]),
    "one rank": ("qwen3_moe", "fp32", {}, [({"tensor": 2, "expert_tensor": 2}, 2)]),
}
IN_BACKGROUND = ("bf16, expert", "bf16, expert bias", "tied, pipeline")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_save_and_load(case, tmp_path):
    """Some of the cases train on before the files are written, as asynchronous saves do."""
    family, dtype, layout, others = CASES[case]
    settings = SETTINGS | ({"tie_word_embeddings": True} if case.startswith("tied") else {})
    model = str(make_tiny_model(family, tmp_path / "model", 3, settings))
    directory = str(tmp_path / "checkpoint")
    world = 1 if not layout else 2
    saved = run_ranks(save_and_go_on, world, layout, model, directory, dtype, case in IN_BACKGROUND)
    for other, num_ranks in (to or (layout, world) for to in others):
        same = other == layout
        loaded = run_ranks(load_and_go_on, num_ranks, other, model, directory, dtype, same)
        assert loaded[0]["learning_rates"] == saved[0]["learning_rates"]
        ours, theirs = loaded[0]["weights"], saved[0]["weights"]
        assert ours.keys() == theirs.keys()
        if same:
            assert [rank["grad_norms"] for rank in loaded] == [rank["grad_norms"] for rank in saved]
            assert [rank["generator"] for rank in loaded] == [rank["generator"] for rank in saved]
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
        else:
            rounding, moved = (1e-4, 1e-4) if dtype == "fp32" else (2e-2, 8e-3)
            assert loaded[0]["grad_norms"] == pytest.approx(saved[0]["grad_norms"], rel=rounding)
            for name in ours:  # two updates of at most about the learning rate lie between
                np.testing.assert_allclose(ours[name], theirs[name], atol=moved, err_msg=name)
