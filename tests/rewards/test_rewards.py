"""The registered rewards, and how little importing them costs."""

import subprocess
import sys
import types

import pytest

from gspo_megatron.config import ConfigError, DataConfig
from gspo_megatron.data import load_dataset
from gspo_megatron.rewards import REWARDS, load_reward


class Words:
    def __call__(self, texts, add_special_tokens):
        return {"input_ids": [[1] * len(text.split()) for text in texts]}


def test_importing_the_package_is_light():
    code = "import sys, gspo_megatron.rewards; print([m for m in ('torch', 'numpy', 'sympy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_exact_match():
    reward = load_reward("exact_match")
    assert reward(" 42\n", {"answer": "42"}) == 1.0
    assert reward("42", {"answer": 42}) == 1.0
    assert reward("43", {"answer": "42"}) == 0.0
    with pytest.raises(ValueError, match="no `answer`"):
        reward("42", {"solution": "42"})


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", "decimal_arithmetic", "n_queens"])
def test_reasoning_gym_knows_its_own_answers(task):
    source = load_dataset(DataConfig(train=f"reasoning_gym:{task}", options={"size": 4}), Words(), seed=1)
    reward = load_reward("reasoning_gym")
    for prompt in source.prompts:
        assert reward(f"  {prompt.record['answer']}\n", prompt.record) == 1.0
        assert reward("certainly not", prompt.record) < 0.1


def test_reasoning_gym_scores_what_its_task_cannot_parse_as_zero():
    source = load_dataset(DataConfig(train="reasoning_gym:prime_factorization", options={"size": 1}), Words(), seed=1)
    record = source.prompts[0].record
    assert load_reward("reasoning_gym")("foo bar", record) == 0.0
    with pytest.raises(ValueError, match="no `task`"):
        load_reward("reasoning_gym")("2", {"answer": "2"})


def test_a_task_that_cannot_score_its_own_answer_is_an_error(monkeypatch):
    reward = load_reward("reasoning_gym")

    class Broken:
        def score_answer(self, answer, entry):
            raise RuntimeError(f"broken for {answer!r}")

    monkeypatch.setattr(sys.modules[reward.__module__], "_dataset", lambda task, options: Broken())
    with pytest.raises(RuntimeError, match="broken for '4'"):
        reward("foo", {"task": "any", "answer": "4"})


def test_a_missing_library_names_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "gspo_megatron.rewards.math_verify", raising=False)
    with pytest.raises(ConfigError, match="pip install math-verify"):
        load_reward("math_verify")


def test_math_verify_compares_parsed_expressions(monkeypatch):
    """With a stand-in for the library: how it is called, and what happens to an answer that it can't read."""
    library = types.ModuleType("math_verify")
    library.parse = lambda text: [number] if (number := text.strip("$ ")).isdigit() else []
    library.verify = lambda gold, given: gold == given
    monkeypatch.setitem(sys.modules, "math_verify", library)
    monkeypatch.delitem(sys.modules, "gspo_megatron.rewards.math_verify", raising=False)
    reward = load_reward("math_verify")
    assert reward("$12$", {"answer": "12"}) == 1.0
    assert reward("13", {"answer": "$12$"}) == 0.0
    with pytest.raises(ValueError, match="can't read the answer 'x y'"):
        reward("13", {"answer": "x y"})
    monkeypatch.delitem(sys.modules, "gspo_megatron.rewards.math_verify")


def test_every_registered_name_points_into_the_package():
    assert all(where.startswith("gspo_megatron.rewards.") for where in REWARDS.values())
    with pytest.raises(ConfigError, match="perhaps 'reasoning_gym'"):
        load_reward("reasoning-gym")
