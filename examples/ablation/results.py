"""Table, numbers and pictures of an ablation, from its runs' metrics.jsonl and trained models."""

import csv
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gspo_megatron.compare import compare_runs
from gspo_megatron.metrics import read_metrics

ARMS = {
    "gspo": "GSPO",
    "gspo_token": "GSPO-token",
    "grpo": "GRPO",
    "grpo_replay": "GRPO with routing replay",
}
METRICS = {
    "reward/mean": "reward",
    "gspo/clip_fraction_tokens": "clipped tokens",
    "gspo/clip_fraction_sequences": "clipped sequences",
    "gspo/token_log_ratio_std": "std of log r (tokens, nats)",
    "gspo/log_ratio_std": "std of log s (sequences, nats per token)",
    "moe/expert_change_mean": "experts changed, mean of a step's updates",
    "moe/expert_change_last": "experts changed, last update",
    "moe/load_imbalance": "load imbalance",
    "grad_norm": "gradient norm",
}
"""Metric -> label."""
PICTURED = (
    "reward/mean", "gspo/clip_fraction_tokens", "gspo/token_log_ratio_std", "gspo/log_ratio_std",
    "moe/expert_change_mean", "grad_norm",
)  # fmt: skip
LAST_STEPS = 10
"""Steps at the end over which rewards are averaged."""

Runs = Mapping[str, Mapping[int, list[dict[str, Any]]]]
"""[arm][seed] lines of metrics.jsonl."""


def write_results(dirs: Mapping[str, Mapping[int, Path]], out: Path) -> str:
    """results.csv (arm, seed, step, metrics), results.json (summary), ablation.png in `out`; the table as text.

    `dirs`: [arm][seed] directory of a finished run.
    """
    runs = {
        arm: {seed: read_metrics(path / "metrics.jsonl") for seed, path in seeds.items()} for arm, seeds in dirs.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "seed", "step", *METRICS])
        for arm, seeds in runs.items():
            for seed, lines in seeds.items():
                for line in lines:
                    writer.writerow([arm, seed, line["step"], *(f"{line[name]:.6g}" for name in METRICS)])
    summary = {
        "seeds": sorted({seed for seeds in runs.values() for seed in seeds}),
        "steps": max(len(lines) for seeds in runs.values() for lines in seeds.values()),
        "arms": {arm: summarise(seeds) for arm, seeds in runs.items()},
        "reward_minus_grpo": {arm: paired(seeds, runs["grpo"]) for arm, seeds in runs.items() if "grpo" in runs},
        "gspo_token_against_gspo": identity(dirs),
    }
    (out / "results.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(runs, out / "ablation.png")
    return table(summary)


def summarise(seeds: Mapping[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Per metric the mean over steps, as mean and standard deviation over seeds; of the reward also at the ends."""

    def spread(values: list[float]) -> dict[str, float]:
        return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}

    rewards = [[line["reward/mean"] for line in lines] for lines in seeds.values()]
    return {
        "reward, first step": spread([values[0] for values in rewards]),
        "reward, last steps": {
            **spread([statistics.fmean(values[-LAST_STEPS:]) for values in rewards]),
            "by_seed": [statistics.fmean(values[-LAST_STEPS:]) for values in rewards],
        },
        **{
            label: spread([statistics.fmean(line[name] for line in lines) for lines in seeds.values()])
            for name, label in METRICS.items()
        },
    }


def paired(ours: Mapping[int, list[dict[str, Any]]], theirs: Mapping[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Difference of the mean reward of the last steps, seed by seed: same model, same problems in the same order."""

    def last(lines: list[dict[str, Any]]) -> float:
        return statistics.fmean(line["reward/mean"] for line in lines[-LAST_STEPS:])

    differences = [last(ours[seed]) - last(theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return {"mean": statistics.fmean(differences), "standard_error": error, "by_seed": differences}


def identity(dirs: Mapping[str, Mapping[int, Path]]) -> list[dict[str, Any]]:
    """Of every seed: the largest difference of a metric of GSPO-token's run and GSPO's on the same rollouts, and of a
    parameter after the last step."""
    found = []
    for seed in sorted(dirs.get("gspo", {}).keys() & dirs.get("gspo_token", {}).keys()):
        ours, theirs = dirs["gspo_token"][seed], dirs["gspo"][seed]
        largest = compare_runs(ours, theirs, tolerance=0).largest
        weights = [load_file(path / "hf" / "model.safetensors") for path in (ours, theirs)]
        found.append(
            {
                "seed": seed,
                "metric": largest.key if largest and largest.difference else None,
                "difference": largest.difference if largest else 0.0,
                "parameters_equal": all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items()),
            }
        )
    return found


def table(summary: Mapping[str, Any]) -> str:
    """Markdown: a row a quantity, a column an arm; mean ± standard deviation over seeds."""
    arms = summary["arms"]
    lines = [f"| {' | '.join(['', *(ARMS[arm] for arm in arms)])} |", f"| --- {'| --- ' * len(arms)}|"]
    labels = [label for label in next(iter(arms.values())) if label != METRICS["reward/mean"]]
    for label in labels:
        cells = [f"{arms[arm][label]['mean']:.4f} ± {arms[arm][label]['std']:.4f}" for arm in arms]
        lines.append(f"| {' | '.join([label, *cells])} |")
    if summary["reward_minus_grpo"]:
        found = [summary["reward_minus_grpo"][arm] for arm in arms]
        cells = [f"{one['mean']:+.4f}, standard error {one['standard_error']:.4f}" for one in found]
        lines.append(f"| {' | '.join(['reward, last steps, minus that of GRPO, paired by seed', *cells])} |")
    for row in summary["gspo_token_against_gspo"]:
        same = "bit for bit equal" if row["parameters_equal"] else "not equal"
        lines.append(
            f"\nGSPO-token against GSPO, seed {row['seed']}: largest difference of a metric {row['difference']:.2g} "
            f"({row['metric']}), trained parameters {same}"
        )
    return "\n".join(lines)


def draw(runs: Runs, path: Path) -> None:
    """One panel a metric: mean over seeds by step, shaded to the smallest and largest seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context("seaborn-v0_8-whitegrid"):
        figure, panels = pyplot.subplots(3, 2, figsize=(12, 12), sharex=True, layout="constrained")
        for panel, name in zip(panels.flat, PICTURED, strict=True):
            for arm, seeds in runs.items():
                by_step = list(zip(*([line[name] for line in lines] for lines in seeds.values()), strict=True))
                steps = range(len(by_step))
                # GSPO-token lies on GSPO: dashes show both
                style = "--" if arm == "gspo_token" else "-"
                panel.plot(steps, [statistics.fmean(values) for values in by_step], style, label=ARMS[arm])
                panel.fill_between(steps, [min(v) for v in by_step], [max(v) for v in by_step], alpha=0.12, linewidth=0)
            panel.set(title=METRICS[name].capitalize())
        for name in ("gspo/token_log_ratio_std", "gspo/log_ratio_std"):
            panels.flat[PICTURED.index(name)].set_yscale("log")
        for panel in panels[-1]:
            panel.set_xlabel("step")
        panels.flat[0].legend(loc="best")
        figure.suptitle("Mean over seeds, shaded from the smallest to the largest")
        figure.savefig(path, dpi=75)
        pyplot.close(figure)
