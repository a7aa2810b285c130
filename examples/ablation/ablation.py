"""GSPO against GSPO-token, and against GRPO without and with routing replay, on the quickstart's tiny MoE, 5 seeds.

    python examples/ablation/ablation.py [--out runs/ablation] [--steps 60] [--seeds 1,2,3,4,5] [--arms gspo,grpo]
    [a.b=c ...]

Runs are made one after the other against one SGLang server on this machine's CPU; a run that is finished is not made
again, so that the same command goes on after an interruption. Overrides go to ablation.yaml of every run. Each seed has
a model of its own, warm-started as in the quickstart, and its arms see the same problems in the same order. GSPO-token
trains from the rollouts that GSPO saved, because sampling does not repeat: only so can the two be identical.

For a quick look: `--model DIR` takes one model for all seeds instead of warm starts, and `--rollouts DIR` makes all
arms train from saved rollouts, without a server.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from results import ARMS, write_results

from gspo_megatron.config import LaunchConfig
from gspo_megatron.metrics import read_metrics
from gspo_megatron.rollout.launcher import launch_servers

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "ablation" / "ablation.yaml"
sys.path.append(str(ROOT / "examples" / "quickstart"))

from quickstart import Interrupted, run_step  # noqa: E402

SETTINGS = {
    "gspo": ["loss={name: gspo, clip_low: 3.0e-4, clip_high: 4.0e-4}", "rollout.save=true"],
    "gspo_token": ["loss={name: gspo_token, clip_low: 3.0e-4, clip_high: 4.0e-4}"],
    "grpo": ["loss={name: grpo, clip_low: 0.2, clip_high: 0.27}"],
    "grpo_replay": ["loss={name: grpo, clip_low: 0.2, clip_high: 0.27}", "train.routing_replay=true"],
}
"""Clip ranges are the paper's (arXiv 2507.18071, section 5.1)."""


def run_dir(options: argparse.Namespace, arm: str, seed: int) -> Path:
    return options.out / arm / f"seed_{seed}"


def is_finished(options: argparse.Namespace, arm: str, seed: int) -> bool:
    path = run_dir(options, arm, seed) / "metrics.jsonl"
    return path.exists() and len(read_metrics(path)) == options.steps and (path.parent / "hf" / "config.json").exists()


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", *arguments]


def model_of(options: argparse.Namespace, seed: int) -> Path:
    """The warm-started model of a seed; made where it is missing."""
    if options.model:
        return options.model
    random_model, model = options.out / "models" / f"random_{seed}", options.out / "models" / f"seed_{seed}"
    if not (model / "config.json").exists():
        make = ["tools/make_tiny_model.py", "--family", "qwen3_moe", "--out", str(random_model), "--seed", str(seed)]
        run_step(f"seed {seed}: a random model", [sys.executable, *make])
        warm = ["examples/quickstart/warm_start.py", str(CONFIG), "--model", str(random_model), "--out", str(model)]
        run_step(f"seed {seed}: warm start", torchrun(*warm, f"run.seed={seed}", *options.overrides))
    return model


def train(options: argparse.Namespace, arm: str, seed: int, model: Path, server: str | None) -> None:
    source = [f"rollout.servers=[{server}]"]
    if options.rollouts:
        source = [f"rollout.replay={options.rollouts}"]
    elif arm == "gspo_token":
        source = [f"rollout.replay={run_dir(options, 'gspo', seed) / 'rollouts'}"]
    overrides = [
        f"model.hf={model}", f"run.dir={run_dir(options, arm, seed)}", f"run.seed={seed}",
        f"train.steps={options.steps}", *SETTINGS[arm], *source, *options.overrides,
    ]  # fmt: skip
    command = [sys.executable, "-m", "gspo_megatron", "train", str(CONFIG), *overrides]
    run_step(f"seed {seed}: {ARMS[arm]}", command)


@contextlib.contextmanager
def server(options: argparse.Namespace, model: Path, needed: bool) -> Iterator[str | None]:
    """One server for all runs; each sends it its own weights first. All models have the same shapes."""
    if not needed:
        yield None
        return
    with launch_servers(LaunchConfig(device="cpu"), model, "fp32", options.out / "server", seed=1) as servers:
        yield servers.urls[0]


def ablation(options: argparse.Namespace) -> None:
    missing = [(seed, arm) for seed in options.seeds for arm in options.arms if not is_finished(options, arm, seed)]
    models = {seed: model_of(options, seed) for seed in sorted({seed for seed, _ in missing})}
    live = not options.rollouts and any(arm != "gspo_token" for _, arm in missing)
    if missing:
        with server(options, models[missing[0][0]], live) as url:
            for seed, arm in missing:
                train(options, arm, seed, models[seed], url)
    dirs = {arm: {seed: run_dir(options, arm, seed) for seed in options.seeds} for arm in options.arms}
    print(write_results(dirs, options.results or options.out))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="directory of models and runs")
    parser.add_argument("--results", type=Path, help="directory of table, numbers and pictures; default --out")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--arms", default=",".join(ARMS), help="of the four; default all")
    parser.add_argument("--model", type=Path, help="one model for all seeds, instead of warm starts")
    parser.add_argument("--rollouts", type=Path, help="saved rollouts that all arms train from, without a server")
    options, overrides = parser.parse_known_args(arguments)
    wrong = [text for text in overrides if "=" not in text]
    if wrong:
        parser.error(f"not understood: {' '.join(wrong)}")
    options.arms = options.arms.split(",")
    if set(options.arms) - set(ARMS):
        parser.error(f"--arms {','.join(options.arms)}: choose from {','.join(ARMS)}")
    try:
        options.seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds {options.seeds}: give whole numbers, 1,2,3")
    if "gspo_token" in options.arms and "gspo" not in options.arms and not options.rollouts:
        parser.error("--arms gspo_token needs gspo too, whose rollouts it trains from")
    options.overrides = overrides
    for name in ("out", "results", "model", "rollouts"):  # runs start in the repository's root
        path = getattr(options, name)
        setattr(options, name, path.absolute() if path else None)
    return options


def main() -> int:
    def interrupt(number, frame):
        raise Interrupted(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        ablation(parse(sys.argv[1:]))
    except Interrupted as error:
        print(f"ablation: stopped by {error}; the same command goes on", file=sys.stderr)
        return 128 + signal.Signals[str(error)].value
    return 0


if __name__ == "__main__":
    sys.exit(main())
