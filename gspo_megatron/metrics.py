"""metrics.jsonl, the optional writers beside it, and the line a step on the terminal."""

import importlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from gspo_megatron.config import ConfigError, MetricsConfig


class Writer(Protocol):
    def write(self, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorboardWriter:
    """Scalars in run.dir/tensorboard."""

    def __init__(self, config: MetricsConfig, run_dir: Path, resolved_config: dict[str, Any]):
        self._writer = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run_dir / "tensorboard"))
        self._writer.add_text("config", f"```json\n{json.dumps(resolved_config, indent=2, default=str)}\n```")

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A run of wandb, or of trackio, which has the same interface; named as the run's directory."""

    library = "wandb"

    def __init__(self, config: MetricsConfig, run_dir: Path, resolved_config: dict[str, Any]):
        self._library = _library(self.library, self.library)
        self._library.init(project=config.project, name=run_dir.name, config=resolved_config)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._library.log(values, step=step)

    def close(self) -> None:
        self._library.finish()


class TrackioWriter(WandbWriter):
    library = "trackio"


class MlflowWriter:
    """A run of the experiment `metrics.project`."""

    def __init__(self, config: MetricsConfig, run_dir: Path, resolved_config: dict[str, Any]):
        self._library = _library("mlflow", "mlflow")
        self._library.set_experiment(config.project)
        self._library.start_run(run_name=run_dir.name)
        self._library.log_dict(resolved_config, "config.json")

    def write(self, step: int, values: dict[str, float]) -> None:
        self._library.log_metrics(values, step=step)

    def close(self) -> None:
        self._library.end_run()


WRITERS: dict[str, type[Writer]] = {
    "tensorboard": TensorboardWriter,
    "wandb": WandbWriter,
    "trackio": TrackioWriter,
    "mlflow": MlflowWriter,
}


def _library(module: str, pip_name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"metrics.writers: {pip_name!r} is not installed ({error}): pip install {pip_name}, or leave it out"
        ) from error


class MetricsWriter:
    """Context manager that appends one JSON object a step to run_dir/metrics.jsonl, and feeds `metrics.writers`.

    A resumed run gives `first_step`: lines of that step and later, which it is about to make again, are dropped, as is
    a last line that was cut off. Raises ConfigError for a writer whose package is missing, and for another line that
    can't be read.
    """

    def __init__(
        self, config: MetricsConfig, run_dir: str | Path, resolved_config: dict[str, Any], first_step: int | None = None
    ):
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        if self.path.exists():
            try:
                lines = read_metrics(self.path)
            except ValueError as error:
                raise ConfigError(f"run.dir: {error}; repair or remove that line") from error
            kept = [line for line in lines if first_step is None or line["step"] < first_step]
            partial = self.path.with_suffix(".jsonl.partial")
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
            partial.replace(self.path)
        self._writers = [WRITERS[name](config, run_dir, resolved_config) for name in config.writers]
        self._file = self.path.open("a")

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        for writer in self._writers:
            writer.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line, on disk when this returns. Raises ValueError naming a metric that is NaN or infinite.

        JSON has no NaN, and a metric that is none says that the step before it went wrong.
        """
        numbers = {name: _number(name, value, step) for name, value in values.items() if name != "step"}
        self._file.write(json.dumps({"step": step, **numbers}, allow_nan=False) + "\n")
        self._file.flush()
        for writer in self._writers:
            writer.write(step, numbers)


def _number(name: str, value: Any, step: int) -> float | int:
    number = value if isinstance(value, int) else float(value)
    if not math.isfinite(number):
        raise ValueError(
            f"metric {name} of step {step} is {number}; look at the samples and the gradients of this step"
        )
    return number


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line without its end (a run killed while writing) is left out.

    Raises ValueError for any other line that is no JSON object.
    """
    text = Path(path).read_text()
    lines = text.split("\n")[:-1]  # what follows the last newline is empty or cut off
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(entry, dict) or "step" not in entry:
            raise ValueError(f"{path}:{number} is no JSON object with a `step`")
        entries.append(entry)
    return entries


class Progress:
    """One line a step on stdout, with colour where that is a terminal; silent unless `enabled` (rank 0)."""

    def __init__(self, total_steps: int, enabled: bool = True):
        self.total_steps, self.enabled = total_steps, enabled
        self._durations: deque[float] = deque(maxlen=20)
        self._last = time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print that `step` (from 0) is done; the remaining time comes from the last 20 steps."""
        now = time.monotonic()
        self._durations.append(now - self._last)
        self._last = now
        if self.enabled:
            self._print(self.line(step, metrics))

    def line(self, step: int, metrics: Mapping[str, float]) -> str:
        """`step 3/100  reward 0.412  loss -0.0003  tokens/s 1,234  log-prob gap 0.0012  remaining 0:12:34`"""
        remaining = sum(self._durations) / max(len(self._durations), 1) * max(self.total_steps - step - 1, 0)
        width = len(str(self.total_steps))
        parts = [f"step {step + 1:>{width}}/{self.total_steps}"]
        for label, name, form in (
            ("reward", "reward/mean", ".3f"),
            ("loss", "loss", ".3g"),
            ("tokens/s", "tokens/per_s", ",.0f"),
            ("log-prob gap", "rollout/logprob_gap_mean", ".2g"),
        ):
            if name in metrics:
                parts.append(f"{label} {metrics[name]:{form}}")
        return "  ".join([*parts, f"remaining {timedelta(seconds=round(remaining))}"])

    def _print(self, line: str) -> None:
        if not sys.stdout.isatty():
            print(line, flush=True)
            return
        from rich.console import Console

        Console(soft_wrap=True).print(line)
