"""A picture and a table of a run, from its metrics.jsonl: `python -m gspo_megatron.report RUN_DIR`."""

import io
import sys
from pathlib import Path
from typing import Any

from gspo_megatron.metrics import read_metrics

PHASES = {
    "rollout": "time/rollout_s",
    "log-likelihoods": "time/log_likelihood_s",
    "updates": "time/train_s",
    "weight sync": "time/weight_sync_s",
    "whole step": "time/step_s",
}
"""Row label -> metric, seconds a step."""

Metrics = list[dict[str, Any]]


def write_report(run_dir: str | Path) -> Path:
    """Draws run_dir/report.png and returns its path. Raises ValueError where the run has no metrics yet."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    run_dir = Path(run_dir)
    metrics = _load(run_dir)
    with pyplot.style.context("seaborn-v0_8-whitegrid"):
        figure, (reward, clip, gap) = pyplot.subplots(3, 1, figsize=(9, 10), sharex=True, layout="constrained")
        figure.suptitle(f"{run_dir.name}: {len(metrics)} steps")
        _draw_reward(reward, metrics)
        _draw_lines(clip, metrics, {"sequences": "gspo/clip_fraction_sequences", "tokens": "gspo/clip_fraction_tokens"})
        clip.set(title="Clipped by the trust region", ylabel="fraction", ylim=(-0.02, 1.02))
        _draw_lines(gap, metrics, {"mean": "rollout/logprob_gap_mean", "max": "rollout/logprob_gap_max"})
        gap.set(title="|log-prob of SGLang - log-prob of Megatron|", ylabel="nats per token", xlabel="step")
        if any(
            line.get(name, 0) > 0
            for line in metrics
            for name in ("rollout/logprob_gap_mean", "rollout/logprob_gap_max")
        ):
            gap.set_yscale("log")
        gap.xaxis.get_major_locator().set_params(integer=True)
        path = run_dir / "report.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
    return path


def summary_table(run_dir: str | Path) -> str:
    """Reward of the first 3 and last 5 steps, log-prob gap, and seconds a step by phase, as text.

    Raises ValueError where the run has no metrics yet.
    """
    from rich.console import Console
    from rich.table import Table

    run_dir = Path(run_dir)
    metrics = _load(run_dir)
    table = Table(title=f"{run_dir.name}: {len(metrics)} steps", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")

    def row(label: str, value: float | None, form: str) -> None:
        if value is not None:
            table.add_row(label, f"{value:{form}}")

    row("mean reward, first 3 steps", _mean(metrics[:3], "reward/mean"), ".3f")
    row("mean reward, last 5 steps", _mean(metrics[-5:], "reward/mean"), ".3f")
    row("clipped sequences, last 5 steps", _mean(metrics[-5:], "gspo/clip_fraction_sequences"), ".1%")
    row("log-prob gap, mean (nats per token)", _mean(metrics, "rollout/logprob_gap_mean"), ".2e")
    row("log-prob gap, max (nats per token)", _max(metrics, "rollout/logprob_gap_max"), ".2e")
    table.add_section()
    for label, name in PHASES.items():
        row(f"{label} (s per step)", _mean(metrics, name), ".2f")
    row("tokens per second", _mean(metrics, "tokens/per_s"), ",.0f")
    text = io.StringIO()
    Console(file=text, width=80).print(table)
    return text.getvalue().rstrip() + "\n"


def _load(run_dir: Path) -> Metrics:
    path = run_dir / "metrics.jsonl"
    metrics = read_metrics(path) if path.exists() else []
    if not metrics:
        raise ValueError(f"{path} has no finished step: nothing to report")
    return metrics


def _series(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the steps that have the metric."""
    present = [line for line in metrics if name in line]
    return [line["step"] for line in present], [line[name] for line in present]


def _mean(metrics: Metrics, name: str) -> float | None:
    _, values = _series(metrics, name)
    return sum(values) / len(values) if values else None


def _max(metrics: Metrics, name: str) -> float | None:
    return max(_series(metrics, name)[1], default=None)


def _draw_reward(axes: Any, metrics: Metrics) -> None:
    steps, means = _series(metrics, "reward/mean")
    stds = [line.get("reward/std", 0.0) for line in metrics if "reward/mean" in line]
    low, high = ([m + sign * s for m, s in zip(means, stds, strict=True)] for sign in (-1, 1))
    axes.fill_between(steps, low, high, alpha=0.2, linewidth=0, label="± std of the samples")
    axes.plot(steps, means, marker="o", markersize=3, label="mean")
    axes.set(title="Reward", ylabel="reward")
    axes.legend(loc="best")


def _draw_lines(axes: Any, metrics: Metrics, names: dict[str, str]) -> None:
    for label, name in names.items():
        axes.plot(*_series(metrics, name), marker="o", markersize=3, label=label)
    axes.legend(loc="best")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m gspo_megatron.report RUN_DIR", file=sys.stderr)
        return 2
    try:
        path, table = write_report(arguments[0]), summary_table(arguments[0])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(table + f"picture: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
