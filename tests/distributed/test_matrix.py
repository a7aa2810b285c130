"""Every layout and every micro-batch split gives the log-likelihoods, losses, gradients and parameters of one rank."""

from pathlib import Path

import pytest

from tests.distributed.cases import CASES, FAMILY_CASES
from tests.distributed.compare import Differences

LOG_PROBS = 1e-5
"""Nats, absolute."""
LOG_PROBS_OF = {"deepseek_v2": 2e-5}
"""Its routed experts' outputs, and their rounding with them, are scaled by 2.5: 4e-6 to 9.5e-6 over four random
models."""
RELATIVE = 1e-5
"""Of losses and gradients."""
PARAMETERS = 1e-3
"""Of the change over two steps. A parameter is kept in fp32 and moves by about 1e-5 of its size in an update, so that
rounding alone (6e-8 of its size) is up to 1e-3 of the change; a gradient that is wrong shows as a fraction of 1."""


def faults(found: Differences) -> list[str]:
    """What of one case is beyond its bound."""
    log_probs = LOG_PROBS_OF.get(found.case.family, LOG_PROBS)
    bounds = {
        "log_probs": log_probs, "loss": RELATIVE, "gradient": RELATIVE, "grad_norm": RELATIVE, "parameters": PARAMETERS,
        "metrics": 1e-4, "replicas": 0.0,
    }  # fmt: skip
    return [
        f"{found.case.name}: {name} {getattr(found, name):.2e} is above {bound:g} "
        f"({found.gradient_name}, {found.metrics_name})"
        for name, bound in bounds.items()
        if not getattr(found, name) <= bound
    ]


WORLDS = [
    pytest.param(world, marks=[pytest.mark.slow] if world > 1 else [])
    for world in sorted({case.world for case in CASES})
]


@pytest.mark.parametrize("world", WORLDS)
def test_a_layout_equals_one_rank(runs, world):
    cases = [case for case in CASES if case.world == world]
    assert [fault for found in differences_of(runs, cases) for fault in faults(found)] == []


@pytest.mark.slow
@pytest.mark.parametrize("world", sorted({case.world for case in FAMILY_CASES}))
def test_a_layout_of_another_family_equals_one_rank(runs, world):
    cases = [case for case in FAMILY_CASES if case.world == world]
    assert [fault for found in differences_of(runs, cases) for fault in faults(found)] == []


def differences_of(runs, cases) -> list[Differences]:
    differences = runs.differences(cases)
    assert len(differences) == len(cases)
    return differences


def test_the_matrix_is_as_wide_as_it_says():
    layouts = {(case.world, *sorted(case.parallel.items())) for case in CASES}
    assert len(layouts) >= 24
    for axis in ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor"):
        assert any(case.parallel.get(axis, 1) > 1 for case in CASES)


def test_the_comparison_is_about_something(runs):
    """Sequences are clipped and not clipped, on both sides, none of them at an edge; every gradient is there."""
    trace = runs.trace
    clipped = sum(metrics["num_clipped_sequences"] for metrics in trace.metrics)
    assert 0 < clipped < sum(metrics["num_trained_sequences"] for metrics in trace.metrics) / 2
    assert min(metrics["ratio_min"] for metrics in trace.metrics) < 1 - 3e-4
    assert max(metrics["ratio_max"] for metrics in trace.metrics) > 1 + 4e-4
    assert min(trace.grad_norms) > 0.1
    for name in trace.initial:
        assert any(float(gradients[name].norm()) > 0 for gradients in trace.gradients), name
    assert [metrics["loss_count"] for metrics in trace.metrics] == [8] * 8


def test_the_table_shows_every_case():
    table = (Path(__file__).parents[2] / "docs" / "equivalence.md").read_text()
    table = table.replace("\\|", "|")
    rows = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")}
    assert {case.name for case in CASES + FAMILY_CASES} <= rows
