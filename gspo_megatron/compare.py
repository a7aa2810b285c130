"""Where two runs part: `python -m gspo_megatron compare RUN_A RUN_B [--tolerance X]`, on their metrics.jsonl.

Times, speeds and other readings of the clock differ between any two runs and are left out, as are histograms and
alarms.
"""

from dataclasses import dataclass
from pathlib import Path

from gspo_megatron.metrics import read_metrics

CLOCK = ("time/", "tokens/per_s")
"""Prefixes of metrics that say how fast a run was, not what it computed."""
STEPPED = ("gspo/log_ratio_hist/", "health/")
"""Prefixes of metrics that jump where others differ by rounding, at the edge of a bin or a threshold."""
TOLERANCE = 1e-4
"""Default: what rounding in fp32 leaves between layouts over a few steps."""


@dataclass(frozen=True)
class Parting:
    """A metric that differs at a step."""

    step: int
    key: str
    a: float
    b: float

    @property
    def difference(self) -> float:
        """Relative to the larger value where that is above 1, absolute below."""
        return abs(self.a - self.b) / max(abs(self.a), abs(self.b), 1.0)


@dataclass(frozen=True)
class Comparison:
    steps: int
    """Steps that both runs have."""
    partings: tuple[Parting, ...]
    """Beyond the tolerance, in the order of steps, largest first in a step."""
    largest: Parting | None
    """Largest difference of all, within the tolerance or not."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    """Metrics that only one run has, at any common step."""
    extra_a: int
    extra_b: int
    """Steps that only one run has."""

    @property
    def equal(self) -> bool:
        return not (self.partings or self.only_a or self.only_b)


def compare_runs(run_a: str | Path, run_b: str | Path, tolerance: float = TOLERANCE) -> Comparison:
    """Raises ValueError where a run has no metrics, or both have no step in common."""
    a, b = _load(run_a), _load(run_b)
    common = sorted(a.keys() & b.keys())
    if not common:
        raise ValueError(f"{run_a} and {run_b} have no step in common: {_span(a)} and {_span(b)}")
    partings, only_a, only_b, largest = [], set(), set(), None
    for step in common:
        here = []
        only_a |= a[step].keys() - b[step].keys()
        only_b |= b[step].keys() - a[step].keys()
        for key in sorted(a[step].keys() & b[step].keys()):
            parting = Parting(step, key, a[step][key], b[step][key])
            if largest is None or parting.difference > largest.difference:
                largest = parting
            if not parting.difference <= tolerance:
                here.append(parting)
        partings += sorted(here, key=lambda parting: -parting.difference)
    return Comparison(
        steps=len(common), partings=tuple(partings), largest=largest, only_a=tuple(sorted(only_a)),
        only_b=tuple(sorted(only_b)), extra_a=len(a) - len(common), extra_b=len(b) - len(common),
    )  # fmt: skip


def comparison_text(found: Comparison, tolerance: float, limit: int = 10) -> str:
    """For people: the first step at which the runs part, with its keys, and the first step of every other key."""
    lines = [f"compared {found.steps} steps, tolerance {tolerance:g}"]
    for name, number in (("A", found.extra_a), ("B", found.extra_b)):
        if number:
            lines.append(f"only run {name} has {number} more steps")
    for name, keys in (("A", found.only_a), ("B", found.only_b)):
        lines += [f"only run {name} has {key}" for key in keys]
    if not found.partings:
        if found.largest is not None and found.largest.difference > 0:
            largest = found.largest
            lines.append(
                f"largest difference {largest.difference:.3g}: {largest.key} at step {largest.step}, "
                f"{largest.a!r} and {largest.b!r}"
            )
        lines.append("the runs agree" if found.equal else "the runs agree in what both have")
        return "\n".join(lines)
    first = found.partings[0].step
    lines.append(f"the runs part at step {first}:")
    seen = set()
    rows = [parting for parting in found.partings if not (parting.key in seen or seen.add(parting.key))]
    for row in rows[:limit]:
        lines.append(f"  step {row.step}  {row.key}: {row.a!r} and {row.b!r}, difference {row.difference:.3g}")
    if len(rows) > limit:
        lines.append(f"  and {len(rows) - limit} more metrics")
    return "\n".join(lines)


def _load(run: str | Path) -> dict[int, dict[str, float]]:
    """Step -> its numbers, those of the clock and steps left out. `run` is a directory, or a metrics.jsonl."""
    path = Path(run) / "metrics.jsonl" if Path(run).is_dir() else Path(run)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the directory of a run, or its metrics.jsonl")
    steps = {}
    for line in read_metrics(path):
        steps[line["step"]] = {
            key: float(value)
            for key, value in line.items()
            if key != "step" and not key.startswith(CLOCK + STEPPED) and isinstance(value, int | float)
        }
    if not steps:
        raise ValueError(f"{path} has no finished step: nothing to compare")
    return steps


def _span(steps: dict[int, dict[str, float]]) -> str:
    return f"steps {min(steps)} to {max(steps)}"
