"""What all tests share: the tiny model and one real SGLang server for the whole run."""

import os
import sys
from pathlib import Path

import httpx
import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
# processes that tests start run this checkout too
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from make_tiny_model import make_tiny_model  # noqa: E402

from gspo_megatron.config import LaunchConfig  # noqa: E402
from gspo_megatron.rollout.launcher import launch_servers  # noqa: E402
from gspo_megatron.rollout.torchvision_operators import ensure_torchvision_operators  # noqa: E402

ensure_torchvision_operators()
# the server and the trainer's ranks of a test share the machine's few cores
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--without-server",
        action="store_true",
        help="leave out what asks the shared SGLang server: it is not installed",
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("--without-server"):
        left_out = [item for item in items if "sglang_server" in item.fixturenames]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory) -> Path:
    """Directory of a tiny random Qwen3-MoE checkpoint, fp32, seed 1. Tests must not write into it."""
    return make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny_qwen3_moe", seed=1)


@pytest.fixture(scope="session")
def sglang_server(tiny_qwen3_moe, tmp_path_factory):
    """(url, model directory) of one real server on the CPU, fp32, for the whole run. Tests must not crash it."""
    launch = LaunchConfig(device="cpu")
    log_dir = tmp_path_factory.mktemp("sglang")
    with launch_servers(launch, tiny_qwen3_moe, "fp32", log_dir, seed=1, stop_grace_s=1.0) as servers:
        yield servers.urls[0], tiny_qwen3_moe


@pytest.fixture
def fresh_sglang_server(sglang_server):
    """The shared server with the tiny model's own weights as version 0, running, whatever an earlier test did to it."""
    url, model_dir = sglang_server
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        client.post("/end_weight_update", json={})
        answer = client.post("/update_weights_from_disk", json={"model_path": str(model_dir), "weight_version": "0"})
        assert answer.status_code == 200, answer.text
        client.post("/continue_generation", json={}).raise_for_status()
    return url, model_dir
