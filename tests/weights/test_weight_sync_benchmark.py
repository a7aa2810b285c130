"""The benchmark's ways of bringing weights together give the tensors that they must, and ours its few messages."""

import sys
from dataclasses import replace

import pytest
from naive_layouts import TINY

from tests.ranks import REPOSITORY, run_ranks

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from weight_sync_cases import export_every_way  # noqa: E402

SHAPE = replace(TINY, num_layers=4, num_experts=8, vocab=16)


@pytest.mark.parametrize("layout", [{"tensor": 2, "pipeline": 2, "expert": 2}, {"expert": 4}], ids=str)
def test_every_way_gives_every_tensor(layout):
    found = run_ranks(export_every_way, 4, layout, SHAPE, 10_000)[0]
    messages, moved = found["ours"]
    others, moved_by_others = found["per-tensor gather"]
    assert messages < others / 10 and moved < moved_by_others / 3


def test_messages_do_not_grow_with_experts():
    layout = {"tensor": 2, "pipeline": 2, "expert": 2}
    few, many = (
        run_ranks(export_every_way, 4, layout, replace(SHAPE, num_experts=number), 10**6)[0] for number in (8, 32)
    )
    assert few["ours"][0] == many["ours"][0]
    assert few["per-tensor gather"][0] < many["per-tensor gather"][0]
