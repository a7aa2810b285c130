"""Scoring processes that hang, crash, raise, and outlive nobody."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gspo_megatron.config import ConfigError, RewardConfig
from gspo_megatron.rewards.scorer import RewardError, Scorer
from gspo_megatron.types import Completion, Prompt

HERE = Path(__file__).parent


class Characters:
    """A tokenizer whose token ids are code points; 0 is its only special token."""

    def decode(self, token_ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(token) for token in token_ids if token)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def scorer(function, timeout_s=10.0, workers=1):
    return Scorer(
        RewardConfig(name=f"rewards_for_tests:{function}", timeout_s=timeout_s, workers=workers), Characters()
    )


def score(running, *texts, record=None):
    prompts = [Prompt(index=40 + k, token_ids=(1,), record=record or {}) for k in range(len(texts))]
    completions = [Completion((*map(ord, text), 0), (0.0,) * (len(text) + 1), "stop", 0) for text in texts]
    return running.score(prompts, completions)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid, seconds):
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_scores_keep_their_order_and_see_the_record():
    with scorer("length", workers=2) as running:
        assert score(running, "a", "bcd", "", "ef", record={"bonus": 10}) == [11.0, 13.0, 10.0, 12.0]
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda n: score(running, "x" * n, "y" * (n + 1)), range(20)))
    assert results == [[n, n + 1] for n in range(20)]


def test_processes_have_neither_torch_nor_a_gpu_and_persist():
    with scorer("environment") as running:
        assert score(running, "a") == [0.0]
    with scorer("process_id") as running:
        first, second = score(running, "a", "b")
        assert first == second != os.getpid()
    wait_until_gone(int(first), 5)


@pytest.mark.parametrize("text", ["hang", "hang holding the interpreter"])
def test_a_hanging_reward_is_killed_and_counted(text):
    with scorer("by_text", timeout_s=1.0) as running:
        start = time.monotonic()
        assert score(running, "fine", text, "fine", "print") == [1.0, 0.0, 1.0, 1.0]
        assert time.monotonic() - start < 30
        assert (running.num_timeouts, running.num_crashes) == (1, 0)


def test_a_crashing_reward_is_replaced_and_counted():
    with scorer("by_text") as running:
        assert score(running, "exit", "fine", "kill", "fine") == [0.0, 1.0, 0.0, 1.0]
        assert (running.num_timeouts, running.num_crashes) == (0, 2)


def test_a_raising_reward_stops_the_run_in_one_line():
    with scorer("by_text") as running:
        with pytest.raises(RewardError) as error:
            score(running, "fine", "raise")
        assert error.value.faults == [
            "reward.name: 'rewards_for_tests:by_text' failed on prompt 41: KeyError: 'no\\nsuch key'"
        ]
        with pytest.raises(RewardError, match="prompt 40: the reward is nan"):
            score(running, "nan")
        assert score(running, "fine") == [1.0]


@pytest.mark.parametrize(
    "function, reason", [("always_raises", "RuntimeError: broken"), ("always_hangs", "more than 1 s")]
)
def test_the_first_check_finds_a_reward_that_never_works(function, reason):
    with scorer(function, timeout_s=1.0) as running:
        with pytest.raises(ConfigError, match=f"prompt 7: an empty response: .*{reason}"):
            running.check(Prompt(7, (1,)))


def test_the_first_check_passes_a_working_reward():
    with scorer("length") as running:
        assert running.check(Prompt(7, (1,))) is None


@pytest.mark.parametrize("name, message", [
    ("exact_mach", "not one of .*perhaps 'exact_match'"),
    ("no_such_module:f", "can't be imported .*PYTHONPATH"),
    ("rewards_for_tests:nothing", "no function 'nothing'"),
])  # fmt: skip
def test_a_reward_that_cannot_be_loaded_is_found_at_the_start(name, message):
    with pytest.raises(ConfigError, match=message):
        with Scorer(RewardConfig(name=name), Characters()):
            pass


def test_leaving_gives_up_what_is_being_scored():
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool, scorer("by_text", timeout_s=600.0) as running:
        future = pool.submit(score, running, "hang")
        time.sleep(0.5)
        running.close()
        assert future.result(timeout=20) == [0.0]
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("function", ["process_id", "always_hangs"])
def test_processes_end_with_a_killed_parent(function):
    """The parent is killed, with the process idle or stuck in a reward (whose time limit still holds)."""
    program = textwrap.dedent(f"""
        import sys, threading, time
        sys.path[:0] = [{str(HERE)!r}]
        from test_scorer import score, scorer
        with scorer({function!r}, timeout_s=1.0) as running:
            print(running._workers[0]._process.pid, flush=True)
            if {function!r} == "always_hangs":
                running._workers[0]._connection.send(("x", {{}}))
            time.sleep(60)
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    time.sleep(0.3)
    assert is_alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until_gone(pid, 15)
