"""What all tests share: the tiny model and one real SGLang server for the whole run."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
# processes that tests start run this checkout too
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from make_tiny_model import make_tiny_model  # noqa: E402

from gspo_megatron.config import LaunchConfig  # noqa: E402
from gspo_megatron.rollout.launcher import launch_servers  # noqa: E402
from gspo_megatron.rollout.torchvision_operators import ensure_torchvision_operators  # noqa: E402

ensure_torchvision_operators()


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory) -> Path:
    """Directory of a tiny random Qwen3-MoE checkpoint, fp32, seed 1. Tests must not write into it."""
    return make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny_qwen3_moe", seed=1)


@pytest.fixture(scope="session")
def sglang_server(tiny_qwen3_moe, tmp_path_factory):
    """(url, model directory) of one real server on the CPU, fp32, for the whole run. Tests must not crash it."""
    launch = LaunchConfig(device="cpu")
    log_dir = tmp_path_factory.mktemp("sglang")
    with launch_servers(launch, tiny_qwen3_moe, "fp32", log_dir, seed=1, stop_grace_s=5.0) as servers:
        yield servers.urls[0], tiny_qwen3_moe
