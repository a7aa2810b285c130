"""`make quickstart`: a tiny Qwen3-MoE, a real SGLang server and GSPO on two ranks, all on this machine's CPU.

    python examples/quickstart/quickstart.py [a.b=c ...]

Overrides go to examples/quickstart.yaml (`run.seed=2`, `train.steps=5`, `run.dir=...`). Steps: make a random
checkpoint, warm it up on worked examples (warm_start.py says why), train, draw the report. Whatever this starts it
stops, also when it fails or is interrupted.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from gspo_megatron.config import Config, ConfigError
from gspo_megatron.config_loader import load_config
from gspo_megatron.report import summary_table, write_report

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "quickstart.yaml"
NUM_RANKS = 2
STOP_GRACE_S = 30.0
"""How long a step may take to end after a signal; the servers' supervisors need less."""


class Interrupted(Exception):
    pass


def run_step(title: str, command: list[str]) -> float:
    """Run one command to its end; seconds. On a signal or a failure it is ended with all its ranks.

    Raises SystemExit with its status when it fails.
    """
    print(f"\n== {title}", flush=True)
    started = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait()
    except BaseException:
        stop(process)
        raise
    if status != 0:
        print(f"quickstart: {title} failed with exit status {status}", file=sys.stderr)
        raise SystemExit(status)
    return time.monotonic() - started


def stop(process: subprocess.Popen) -> None:
    """SIGTERM, which torchrun passes on to its ranks, then SIGKILL to what is left of the process group."""
    process.terminate()
    try:
        process.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        print("quickstart: a step does not end, killing it", file=sys.stderr)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def torchrun(*arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(NUM_RANKS),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", *arguments,
    ]  # fmt: skip


def quickstart(overrides: list[str]) -> None:
    config = load_config(CONFIG, overrides)
    run_dir = Path(config.run.dir)
    random_model, model = run_dir / "model_random", run_dir / "model"
    overrides = [*overrides, f"model.hf={model}"]
    shutil.rmtree(model, ignore_errors=True)
    seconds = {}
    seconds["random model"] = run_step("a tiny random Qwen3-MoE checkpoint", make_model_command(config, random_model))
    seconds["warm start"] = run_step(
        "warm start on worked examples, through the same Megatron policy",
        torchrun(
            "examples/quickstart/warm_start.py",
            str(CONFIG),
            "--model",
            str(random_model),
            "--out",
            str(model),
            *overrides,
        ),
    )
    seconds["GSPO"] = run_step(
        f"GSPO on {NUM_RANKS} ranks, with a real SGLang server",
        torchrun("-m", "gspo_megatron", "train", str(CONFIG), *overrides),
    )
    print(f"\n{summary_table(run_dir)}")
    print("seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    print(f"results: {run_dir}/ (metrics.jsonl, config.yaml, hf/, servers/), picture: {write_report(run_dir)}")


def make_model_command(config: Config, out: Path) -> list[str]:
    return [
        sys.executable, "tools/make_tiny_model.py", "--family", "qwen3_moe", "--out", str(out), "--seed", str(config.run.seed)
    ]  # fmt: skip


def main() -> int:
    def interrupt(number, frame):
        raise Interrupted(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        quickstart(sys.argv[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except Interrupted as error:
        print(f"quickstart: stopped by {error}", file=sys.stderr)
        return 128 + signal.Signals[str(error)].value
    return 0


if __name__ == "__main__":
    sys.exit(main())
