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

from gspo_megatron.rollout.torchvision_operators import ensure_torchvision_operators  # noqa: E402

ensure_torchvision_operators()


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory) -> Path:
    """Directory of a tiny random Qwen3-MoE checkpoint, fp32, seed 1. Tests must not write into it."""
    return make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny_qwen3_moe", seed=1)
