"""In bf16 a layout is as near to fp32 as one rank in bf16 is.

bf16 keeps 8 bits: sums in another order differ by 4e-3 of their size, and a token whose two best experts are as near as
that is sent elsewhere, so that single tokens differ by tenths of a nat on a random model. What can be asked is that no
layout adds an error of its own: its distance to the fp32 run, over all tokens and over the whole gradient, is at most
FACTOR of one rank's distance. Both are root mean squares of many rounding errors of the same size; what a layout loses,
counts twice or mixes up adds an error of the size of the gradient itself, a hundred times more. Compared before the
first update, whose step would amplify what is there.
"""

import pytest

from tests.distributed.cases import CP, EP, ETP, PP, TP, VPP, Case, case
from tests.distributed.compare import norm

FACTOR = 1.5
CASES = [
    case(2), case(2, **TP), case(2, **PP), case(2, **VPP), case(2, **CP), case(2, **EP), case(2, **ETP),
    case(8, **TP, **PP, **CP), case(8, **TP, **CP, **EP),
]  # fmt: skip


def errors(trace, exact) -> tuple[float, float]:
    """Root mean square of the log-probs' error in nats, and relative error of the first gradient."""
    squares, count = 0.0, 0
    for sample, values in exact.log_probs[0].items():
        squares += float((trace.log_probs[0][sample].double() - values.double()).square().sum())
        count += values.numel()
    found, wanted = trace.gradients[0], exact.gradients[0]
    distance = norm({name: found[name].double() - tensor.double() for name, tensor in wanted.items()})
    return (squares / count) ** 0.5, distance / norm(wanted)


@pytest.fixture(scope="session")
def one_rank(runs) -> tuple[float, float]:
    (trace,) = runs.traces([case(1)], "bf16")
    log_probs, gradient = errors(trace, runs.trace)
    assert 0 < log_probs < 0.1 and 0 < gradient < 0.2
    return log_probs, gradient


@pytest.mark.slow
@pytest.mark.parametrize("world", sorted({layout.world for layout in CASES}))
def test_no_layout_adds_an_error_of_its_own(runs, one_rank, world):
    layouts: list[Case] = [layout for layout in CASES if layout.world == world]
    found = {
        layout.name: errors(trace, runs.trace)
        for layout, trace in zip(layouts, runs.traces(layouts, "bf16"), strict=True)
    }
    for name, pair in found.items():
        assert all(error <= FACTOR * own for error, own in zip(pair, one_rank, strict=True)), (name, found, one_rank)
