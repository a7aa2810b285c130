"""Saved rollouts as a source: what they were when a checkpoint was written must be there when a run goes on from it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_megatron.checkpoints import SavedRun
from gspo_megatron.config import Config, ConfigError, ModelConfig, RolloutConfig, RunConfig
from gspo_megatron.sources import ReplaySource, load_tokenizer
from tests.training.replayed import write_rollouts


@pytest.fixture
def config(tmp_path):
    return Config(rollout=RolloutConfig(replay=str(write_rollouts(tmp_path / "rollouts"))))


@pytest.fixture
def saved(config):
    source = ReplaySource(config)
    assert source.position() is None
    for step in range(3):
        source.collect(step, lambda: None)
    return SavedRun(3, 3, source.position(), 1, {}, {}, Path("c/step_3"))


def test_the_same_rollouts_elsewhere_are_gone_on_with(config, saved, tmp_path):
    moved = shutil.copytree(config.rollout.replay, tmp_path / "moved")
    source = ReplaySource(replace(config, rollout=RolloutConfig(replay=str(moved))))
    source.restore(saved)
    assert source.position() == saved.data
    source.collect(3, lambda: None)
    assert source.position() != saved.data


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(path.read_bytes() + b"\n")])
def test_other_rollouts_are_refused_unless_allowed(config, saved, spoil):
    path = Path(config.rollout.replay) / "step_2.jsonl"
    spoil(path)
    with pytest.raises(
        ConfigError, match=f"rollout.replay: {path} is not what the run of the checkpoint c/step_3 trained"
    ):
        ReplaySource(config).restore(saved)
    for allowed in ("rollout", "rollout.replay"):
        ReplaySource(replace(config, run=RunConfig(allow_changed=(allowed,)))).restore(saved)


def test_a_checkpoint_that_says_nothing_of_them(config, saved):
    """Of a run with servers, whose rollouts are replayed from now on, or of an earlier version."""
    for data in (None, {"epoch": 0, "position": 8, "fingerprint": "f"}):
        source = ReplaySource(config)
        source.restore(replace(saved, data=data))
        assert source.position() == saved.data  # takes those that are there for what was trained on


def test_a_tokenizer_that_is_code_runs_when_it_is_allowed(tmp_path, tiny_qwen3_moe):
    directory = Path(shutil.copytree(tiny_qwen3_moe, tmp_path / "model"))
    ran = tmp_path / "ran"
    (directory / "tokenization_own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast\n"
        f"Path({str(ran)!r}).touch()\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n"
        "    pass\n"
    )
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    values = json.loads((directory / "config.json").read_text())  # of a type that transformers has no tokenizer for
    (directory / "config.json").write_text(json.dumps(values | {"model_type": "own"}))
    with pytest.raises(ConfigError, match="model.trust_remote_code=true"):
        load_tokenizer(ModelConfig(hf=str(directory)))
    assert not ran.exists()
    own = load_tokenizer(ModelConfig(hf=str(directory), trust_remote_code=True))
    assert ran.exists() and type(own).__name__ == "OwnTokenizer"
    assert own("1+2").input_ids == load_tokenizer(ModelConfig(hf=str(tiny_qwen3_moe)))("1+2").input_ids
