"""What a user gets wrong ends in one clear line and exit status 2, before expensive work, with no process left."""

import json
import socket
from pathlib import Path

import psutil
import pytest

from tests.training.runs import from_servers, overrides, train_alone


@pytest.fixture
def refused(tiny_qwen3_moe, tmp_path):
    """Runs with one more override; its message, after the checks that hold for all bad input."""

    def run(*settings: str, model: Path = tiny_qwen3_moe, key: str) -> str:
        run_dir = tmp_path / "run"
        finished = train_alone(overrides(model, run_dir, "parallel.expert=1", *settings))
        assert finished.returncode == 2, finished.stdout[-4000:]
        assert not [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in " ".join(p.info["cmdline"] or ())]
        assert not (run_dir / "metrics.jsonl").exists()
        lines = [line for line in finished.stdout.splitlines() if line.startswith(f"{key}:")]
        assert len(lines) == 1, finished.stdout[-4000:]
        assert "Traceback" not in finished.stdout
        return lines[0]

    return run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_mistyped_key(refused):
    message = refused("rollout.temprature=0.7", key="rollout.temprature")
    assert "temperature" in message and "0.7" in message


def test_wrong_type(refused):
    assert "many" in refused("train.steps=many", key="train.steps")


def test_tensor_size_that_does_not_divide_the_heads(refused):
    message = refused("parallel.tensor=3", key="parallel.tensor")
    assert "3" in message and "4" in message


def test_world_size_that_the_layout_does_not_divide(refused):
    assert "2" in refused("parallel.pipeline=2", key="world size")


def test_model_directory_without_config(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(model=tmp_path / "empty", key="model.hf")


def test_missing_shard(refused, tiny_qwen3_moe, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_qwen3_moe.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).symlink_to(file)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00001.safetensors" in refused(model=broken, key="model.hf")


def test_unsupported_architecture(refused, tiny_qwen3_moe, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_qwen3_moe.iterdir():
        if file.name != "config.json":
            (other / file.name).symlink_to(file)
    config = json.loads((tiny_qwen3_moe / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (other / "config.json").write_text(json.dumps(config))
    message = refused(model=other, key="model.hf")
    assert "MambaForCausalLM" in message and "Qwen3MoeForCausalLM" in message


def test_dead_server(refused):
    url = f"http://127.0.0.1:{free_port()}"
    assert url in refused(*from_servers(url), key="rollout.servers")


def test_port_in_use(refused):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(f"rollout.launch.port={port}", key="rollout.launch.port")


def test_empty_data_file(refused, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    path = str(tmp_path / "empty.jsonl")
    assert path in refused(f"data.train={path}", "data.options={}", key="data.train")


def test_reward_that_raises(refused):
    message = refused("reward.name=tests.training.rewards_for_training:raises", key="reward.name")
    assert "no such reward" in message


def test_reward_that_raises_names_itself_before_a_server_starts(refused, tmp_path):
    refused("reward.name=tests.training.rewards_for_training:raises", key="reward.name")
    assert not (tmp_path / "run" / "servers").exists()


def test_replay_directory_without_rollouts(refused, tmp_path):
    assert "step_*.jsonl" in refused(
        "rollout.launch=null", f"rollout.replay={tmp_path}", key="rollout.replay"
    )  # fmt: skip
