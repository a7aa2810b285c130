"""Saved rollouts: the same bits back, no half file taken for a whole one, faults with file and line."""

import json
import random
import struct

import pytest

from gspo_megatron.config import ConfigError
from gspo_megatron.rollout import records
from gspo_megatron.rollout.records import load_rollout, save_rollout, step_file
from gspo_megatron.types import Rollout, Sample


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def random_sample(generator: random.Random) -> Sample:
    length = generator.randrange(6)
    return Sample(
        group=generator.randrange(10),
        prompt_ids=tuple(generator.randrange(152_000) for _ in range(generator.randint(1, 5))),
        response_ids=tuple(generator.randrange(152_000) for _ in range(length)),
        # what a server's float32 becomes in JSON, and what needs all 17 digits
        rollout_log_probs=tuple(
            generator.choice([float32, float])(-generator.random()) for _ in range(length)
        ),  # fmt: skip
        reward=generator.choice([0.0, 1.0, 0.1 + 0.2, -1 / 3, 5e-324]),
        finish_reason=generator.choice(["stop", "length", "abort"]),
        weight_version=generator.randrange(100),
    )


def bits(rollout: Rollout) -> list:
    return [
        (s.group, s.prompt_ids, s.response_ids, s.finish_reason, s.weight_version)
        + tuple(struct.pack("d", value) for value in (*s.rollout_log_probs, s.reward))
        for s in rollout.samples
    ]


@pytest.mark.parametrize("seed", range(10))
def test_round_trip_is_bit_for_bit(tmp_path, seed):
    generator = random.Random(seed)
    rollout = Rollout(tuple(random_sample(generator) for _ in range(generator.randint(1, 20))))
    path = save_rollout(rollout, tmp_path / "rollouts", seed)
    assert path == tmp_path / "rollouts" / f"step_{seed}.jsonl" == step_file(tmp_path / "rollouts", seed)
    found = load_rollout(tmp_path / "rollouts", seed)
    assert bits(found) == bits(rollout) and found == rollout
    save_rollout(found, tmp_path / "again", seed)
    assert step_file(tmp_path / "again", seed).read_bytes() == path.read_bytes()


def test_one_object_a_line_with_the_documented_keys(tmp_path):
    rollout = Rollout(tuple(random_sample(random.Random(seed)) for seed in range(3)))
    lines = save_rollout(rollout, tmp_path, 0).read_text().splitlines()
    assert len(lines) == 3
    for line, sample in zip(lines, rollout.samples, strict=True):
        values = json.loads(line)
        assert {
            "group", "prompt_ids", "response_ids", "rollout_log_probs", "reward", "finish_reason", "weight_version",
        } <= values.keys()  # fmt: skip
        assert values["response_ids"] == list(sample.response_ids) and values["reward"] == sample.reward


def test_a_file_that_was_not_finished_is_not_taken(tmp_path, monkeypatch):
    rollout = Rollout((random_sample(random.Random(1)),))

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save_rollout(rollout, tmp_path, 3)
    with pytest.raises(ConfigError, match=r"rollout.replay: .*step_3.jsonl is missing; lower train.steps"):
        load_rollout(tmp_path, 3)
    save_rollout(rollout, tmp_path, 3)
    assert load_rollout(tmp_path, 3) == rollout
    assert [path.name for path in tmp_path.iterdir()] == ["step_3.jsonl"]


def test_an_interrupted_save_keeps_the_earlier_file(tmp_path, monkeypatch):
    first, second = (Rollout((random_sample(random.Random(seed)),)) for seed in (1, 2))
    save_rollout(first, tmp_path, 0)
    monkeypatch.setattr(records.json, "dumps", lambda _: (_ for _ in ()).throw(RuntimeError("killed")))
    with pytest.raises(RuntimeError, match="killed"):
        save_rollout(second, tmp_path, 0)
    assert load_rollout(tmp_path, 0) == first


GOOD = {
    "group": 0, "prompt_ids": [1, 2], "response_ids": [3], "rollout_log_probs": [-0.5], "reward": 1.0,
    "finish_reason": "stop", "weight_version": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "line, reason",
    [
        ('{"group": 0, "prompt_ids": [1', "Expecting|delimiter"),
        ("", "Expecting value"),
        ("[]", "no group, prompt_ids"),
        ("3", "not iterable|no group"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "reward"}), "no reward"),
        (json.dumps(GOOD | {"rollout_log_probs": [-0.5, -0.5]}), "2 log-probs for 1 response tokens"),
        (json.dumps(GOOD | {"prompt_ids": []}), "prompt_ids is empty"),
        (json.dumps(GOOD | {"prompt_ids": "12"}), "prompt_ids has '1', which is no int"),
        (json.dumps(GOOD | {"prompt_ids": 12}), "not iterable"),
        (json.dumps(GOOD | {"response_ids": [3.0]}), "response_ids has 3.0, which is no int"),
        (json.dumps(GOOD | {"response_ids": [True]}), "response_ids has True"),
        (json.dumps(GOOD | {"rollout_log_probs": [None]}), "rollout_log_probs has None, which is no float or int"),
        (json.dumps(GOOD | {"reward": "1"}), "reward has '1'"),
        (json.dumps(GOOD | {"weight_version": None}), "weight_version has None"),
    ],
)
def test_faults_name_file_and_line(tmp_path, line, reason):
    step_file(tmp_path, 7).write_text("\n".join([json.dumps(GOOD), line, json.dumps(GOOD)]))
    with pytest.raises(ConfigError, match=f"step_7.jsonl:2: not a sample \\(.*({reason}).*save the rollout again"):
        load_rollout(tmp_path, 7)


def test_integers_are_log_probs_and_rewards_too(tmp_path):
    step_file(tmp_path, 0).write_text(json.dumps(GOOD | {"rollout_log_probs": [0], "reward": 1, "comment": "kept out"}))
    (sample,) = load_rollout(tmp_path, 0).samples
    assert sample.rollout_log_probs == (0,) and sample.reward == 1


def test_unreadable_and_empty_files_are_refused(tmp_path):
    step_file(tmp_path, 0).write_text("")
    with pytest.raises(ConfigError, match="step_0.jsonl is empty"):
        load_rollout(tmp_path, 0)
    step_file(tmp_path, 1).write_bytes(b'{"group": "\xff"}')
    with pytest.raises(ConfigError, match="step_1.jsonl can't be read"):
        load_rollout(tmp_path, 1)
    step_file(tmp_path, 2).mkdir()
    with pytest.raises(ConfigError, match="step_2.jsonl can't be read"):
        load_rollout(tmp_path, 2)
