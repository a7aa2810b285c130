"""How far two traces are apart, each quantity in the measure in which it is judged."""

import math
from dataclasses import dataclass

from torch import Tensor

from tests.distributed.cases import Case

GRADIENT_FLOOR = 1e-3
"""A gradient's difference is taken relative to the norm of the same tensor's gradient, but at least to this fraction of
the whole gradient's norm: below that a tensor's gradient is a sum of cancelling terms, whose rounding is that of the
terms and not of their sum."""


@dataclass(frozen=True)
class Differences:
    case: Case
    log_probs: float
    """Largest difference of a token's log-likelihood, nats."""
    loss: float
    """Largest difference of an update's loss, relative to the largest loss."""
    gradient: float
    """Largest |difference| / |gradient| over updates and tensors, with GRADIENT_FLOOR."""
    gradient_name: str
    grad_norm: float
    """Largest relative difference of the norm that Megatron clips by."""
    parameters: float
    """Largest |difference| / |change over the two steps| over tensors."""
    metrics: float
    """Largest difference of a metric, relative to it where it is above 1."""
    metrics_name: str
    replicas: float
    """Largest spread of a parameter's copies."""
    seconds: float


def norm(tensors: dict[str, Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors.values()) ** 0.5


def ratio(difference: Tensor, change: Tensor) -> float:
    """Of their norms; of a tensor that does not change, which must not differ, 0 or infinity."""
    distance, size = float(difference.norm()), float(change.norm())
    return distance / size if size else (math.inf if distance else 0.0)


def compare(case: Case, trace, expected) -> Differences:
    gradients = []
    for found, wanted in zip(trace.gradients, expected.gradients, strict=True):
        assert found.keys() == wanted.keys()
        floor = GRADIENT_FLOOR * norm(wanted)
        for name, tensor in wanted.items():
            distance = float((found[name].double() - tensor.double()).norm())
            gradients.append((distance / max(float(tensor.double().norm()), floor), name))
    worst_gradient = max(gradients)
    parameters = max(
        ratio(trace.final[name].double() - tensor.double(), tensor.double() - expected.initial[name].double())
        for name, tensor in expected.final.items()
    )
    metrics = max(
        (abs(found[name] - value) / max(abs(value), 1.0), name)
        for found, wanted in zip(trace.metrics, expected.metrics, strict=True)
        for name, value in wanted.items()
        if not name.startswith("log_ratio_bin_")  # rounding moves a sequence at an edge to the next bin
    )
    return Differences(
        case=case,
        log_probs=max(
            float((found[sample] - values).abs().amax()) if values.numel() else 0.0
            for found, wanted in zip(trace.log_probs, expected.log_probs, strict=True)
            for sample, values in wanted.items()
        ),
        loss=max(abs(a - b) for a, b in zip(trace.losses, expected.losses, strict=True))
        / max(abs(loss) for loss in expected.losses),
        gradient=worst_gradient[0],
        gradient_name=worst_gradient[1],
        grad_norm=max(abs(a - b) / b for a, b in zip(trace.grad_norms, expected.grad_norms, strict=True)),
        parameters=parameters,
        metrics=metrics[0],
        metrics_name=metrics[1],
        replicas=max(trace.replicas.values()),
        seconds=trace.seconds,
    )
