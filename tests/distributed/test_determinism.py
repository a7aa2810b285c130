"""The same layout and seed give the same bits twice."""

import pytest
import torch

from tests.distributed.cases import CP, EP, ETP, TP, VPP, case


LAYOUTS = [case(4, **TP, **CP), case(4, **VPP, **EP), case(4, **EP, **ETP)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_twice_the_same_bits(runs, layout):
    first, second = runs.traces([layout, layout])
    assert first.losses == second.losses and first.grad_norms == second.grad_norms
    assert first.metrics == second.metrics
    for one, other in zip(first.log_probs, second.log_probs, strict=True):
        assert all(torch.equal(one[sample], other[sample]) for sample in one)
    for one, other in zip([*first.gradients, first.final], [*second.gradients, second.final], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
