"""metrics.jsonl, its optional writers, and the progress line."""

import json
import math
import re
import sys
import types

import pytest
import torch

from gspo_megatron.config import ConfigError, MetricsConfig
from gspo_megatron.metrics import WRITERS, MetricsWriter, Progress, read_metrics


def test_one_line_a_step_and_at_once(tmp_path):
    with MetricsWriter(MetricsConfig(), tmp_path / "new" / "run", {}) as writer:
        writer.write(0, {"reward/mean": 0.5, "rollout/weight_version": 3})
        assert read_metrics(writer.path) == [{"step": 0, "reward/mean": 0.5, "rollout/weight_version": 3}]
        writer.write(1, {"reward/mean": torch.tensor(0.25)})
    lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {"step": 1, "reward/mean": 0.25}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused_by_name(tmp_path, value):
    with MetricsWriter(MetricsConfig(), tmp_path, {}) as writer:
        with pytest.raises(ValueError, match=f"metric grad_norm of step 7 is {value}"):
            writer.write(7, {"loss": 1.0, "grad_norm": value})
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_cut_last_line_is_left_out_and_others_are_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(path)] == [0, 1]
    path.write_text('{"step": 0}\n{"step": 1, "lo\n{"step": 2}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:2 is not JSON"):
        read_metrics(path)
    with pytest.raises(ConfigError, match="run.dir: .*metrics.jsonl:2 is not JSON.*; repair or remove that line"):
        MetricsWriter(MetricsConfig(), tmp_path, {}, first_step=2)
    assert path.read_text().startswith('{"step": 0}\n{"step": 1, "lo\n')


def test_a_resumed_run_makes_its_steps_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    with MetricsWriter(MetricsConfig(), tmp_path, {}, first_step=2) as writer:
        writer.write(2, {"loss": 1.0})
    assert read_metrics(path) == [{"step": 0}, {"step": 1}, {"step": 2, "loss": 1.0}]
    with MetricsWriter(MetricsConfig(), tmp_path, {}) as writer:
        writer.write(3, {})
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 3]


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(MetricsConfig(writers=("tensorboard",)), tmp_path, {"run": {"seed": 1}}) as writer:
        writer.write(0, {"reward/mean": 0.5})
        writer.write(1, {"reward/mean": 0.75})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.5), (1, 0.75)]


@pytest.mark.parametrize("name, start, log, end", [
    ("wandb", "init", "log", "finish"),
    ("trackio", "init", "log", "finish"),
    ("mlflow", "start_run", "log_metrics", "end_run"),
])  # fmt: skip
def test_other_writers_get_the_same_numbers(tmp_path, monkeypatch, name, start, log, end):
    calls = []
    library = types.ModuleType(name)
    library.__getattr__ = lambda function: lambda *a, **k: calls.append((function, a, k))
    monkeypatch.setitem(sys.modules, name, library)
    with MetricsWriter(MetricsConfig(writers=(name,), project="p"), tmp_path / "run7", {"a": {"b": 1}}) as writer:
        writer.write(4, {"loss": 0.5})
    assert [call[0] for call in calls][-2:] == [log, end]
    assert calls[-2] == (log, ({"loss": 0.5},), {"step": 4})
    (start_call,) = [call for call in calls if call[0] == start]
    assert "run7" in start_call[2].values()
    assert any("p" in (*a, *k.values()) for _, a, k in calls)
    assert any({"a": {"b": 1}} in (*a, *k.values()) for _, a, k in calls)


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_missing_package_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ConfigError, match=f"metrics.writers: '{name}' is not installed.*pip install {name}"):
        MetricsWriter(MetricsConfig(writers=(name,)), tmp_path, {})


def test_progress_line(capsys):
    metrics = {"reward/mean": 0.4123, "loss": -3.14159e-4, "tokens/per_s": 12345.6, "rollout/logprob_gap_mean": 1.2e-6}
    progress = Progress(total_steps=100)
    progress._durations.extend([2.0, 4.0])
    assert progress.line(89, metrics) == (
        "step  90/100  reward 0.412  loss -0.000314  tokens/s 12,346  log-prob gap 1.2e-06  remaining 0:00:30"
    )
    progress.step(99, {"loss": 1.0})
    assert capsys.readouterr().out == "step 100/100  loss 1  remaining 0:00:00\n"
    Progress(total_steps=100, enabled=False).step(0, metrics)
    assert capsys.readouterr().out == ""


def test_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Progress(total_steps=2).step(0, {"loss": 0.5})
    assert re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out) == "step 1/2  loss 0.5  remaining 0:00:00\n"
