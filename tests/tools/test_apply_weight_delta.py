"""The applier beside engines on another machine: follows what is published, tells the trainer, survives its absence."""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import apply_weight_delta
import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_megatron.config import WeightsConfig
from gspo_megatron.rollout.transports.base import Setting
from gspo_megatron.rollout.transports.delta import DeltaTransport
from gspo_megatron.rollout.transports.disk import write_version
from gspo_megatron.weights.delta import DeltaError
from tests.ranks import REPOSITORY

SHAPES = {"w": (64, 64)}


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_file({"w": torch.zeros(64, 64)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def transport(tmp_path, model_dir):
    """No engine: what they would load is looked at here."""
    config = WeightsConfig(transport="delta", engine_dir=str(tmp_path / "local"), appliers=1, timeout_s=20.0)
    return DeltaTransport(Setting([], config, "gloo", tmp_path / "weights", model_dir))


@contextlib.contextmanager
def applier(tmp_path: Path):
    """The tool's loop in a thread."""
    stop, last = threading.Event(), [None]

    def run():
        while not stop.wait(0.02):
            last[0] = apply_weight_delta.apply_published(tmp_path / "weights", tmp_path / "local", last[0])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def publish(transport, model_dir, version, value):
    w = torch.zeros(64, 64)
    w[0, 0] = value
    directory = write_version([("w", w)], transport.directory, version, model_dir, SHAPES)
    transport.load(directory, version)
    return w


def test_versions_come_out_bit_for_bit_and_only_changes_are_moved(tmp_path, transport, model_dir):
    with applier(tmp_path):
        publish(transport, model_dir, 0, 1.0)
        in_full = transport.moved_bytes
        sent = publish(transport, model_dir, 1, 2.0)
    found = load_file(tmp_path / "local" / "version_1" / "model.safetensors")["w"]
    assert torch.equal(found, sent) and in_full > 16_000 and transport.moved_bytes < 600
    assert {path.name for path in (tmp_path / "local").iterdir()} == {"version_1"}
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"version_1", "published.json", "applied"}


def test_an_applier_without_the_base_takes_the_version_in_full(tmp_path, transport, model_dir):
    import shutil

    with applier(tmp_path):
        publish(transport, model_dir, 0, 1.0)
        shutil.rmtree(tmp_path / "local")
        sent = publish(transport, model_dir, 1, 2.0)
    assert torch.equal(load_file(tmp_path / "local" / "version_1" / "model.safetensors")["w"], sent)


def test_a_base_that_somebody_changed_is_an_error_and_the_next_version_goes_in_full(tmp_path, transport, model_dir):
    with applier(tmp_path):
        publish(transport, model_dir, 0, 1.0)
        save_file({"w": torch.ones(64, 64)}, tmp_path / "local" / "version_0" / "model.safetensors")
        with pytest.raises(DeltaError, match="the applier on .*: version 1 can't be put together .*w in .*is not what"):
            publish(transport, model_dir, 1, 2.0)
        assert not (tmp_path / "local" / "version_1").exists()
        sent = publish(transport, model_dir, 2, 3.0)
    assert torch.equal(load_file(tmp_path / "local" / "version_2" / "model.safetensors")["w"], sent)


def test_a_trainer_waits_for_its_appliers_for_a_bounded_time(tmp_path, transport, model_dir):
    transport._timeout_s = 0.5
    with pytest.raises(TimeoutError, match=r"0 of weights.appliers = 1 have it after 0.5 s .*apply_weight_delta.py"):
        publish(transport, model_dir, 0, 1.0)


def run_tool(*arguments):
    command = [sys.executable, str(REPOSITORY / "tools" / "apply_weight_delta.py"), *map(str, arguments)]
    return subprocess.run(command, text=True, capture_output=True, timeout=60)


def test_the_command(tmp_path, transport, model_dir):
    weights, local = tmp_path / "weights", tmp_path / "local"
    missing = run_tool("--weights", tmp_path / "nowhere", "--local", local)
    assert missing.returncode == 2 and "nowhere is no directory; give the trainer's weights.dir" in missing.stderr
    weights.mkdir()
    empty = run_tool("--weights", weights, "--local", local, "--once")
    assert empty.returncode == 2 and "no version is published there" in empty.stderr
    with applier(tmp_path):
        publish(transport, model_dir, 0, 1.0)
    done = run_tool("--weights", weights, "--local", tmp_path / "second", "--once")
    assert done.returncode == 0 and "version 0 in full" in done.stdout
    assert (tmp_path / "second" / "version_0" / "model.safetensors").exists()
    (tmp_path / "file").touch()
    failed = run_tool("--weights", weights, "--local", tmp_path / "file", "--once")
    assert failed.returncode == 1 and "version 0 can't be put together in" in failed.stderr
