"""Scores responses in processes of their own, each killable: a reward can hang or crash and the run goes on."""

import math
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from gspo_megatron.config import ConfigError, RewardConfig

if TYPE_CHECKING:
    from gspo_megatron.types import Completion, Prompt

START_TIMEOUT_S = 180.0
"""Bound on the start of a scoring process, imports of the reward's library included, in seconds."""


class RewardError(ConfigError):
    """The reward raised, or gave what is no finite number."""

    def __init__(self, name: str, prompt_index: int, reason: str):
        super().__init__(f"reward.name: {name!r} failed on prompt {prompt_index}: {' '.join(reason.split())}")


class Scorer:
    """Context manager around `reward.workers` persistent scoring processes; `score` may be called from many threads.

    `tokenizer` needs `decode(token_ids, skip_special_tokens=True)`; decoding happens here, in the calling process.
    `num_timeouts` and `num_crashes` count responses that got reward 0 because their process hung or died.
    """

    def __init__(self, config: RewardConfig, tokenizer: Any):
        self.config, self.tokenizer = config, tokenizer
        self.num_timeouts, self.num_crashes = 0, 0
        self._lock = threading.Lock()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Scorer":
        """Starts the processes. Raises ConfigError where the reward can't be loaded."""
        self._threads = ThreadPoolExecutor(self.config.workers, thread_name_prefix="score")
        self._workers = [_Worker(self.config) for _ in range(self.config.workers)]
        try:
            for worker in self._workers:
                worker.wait_ready()
                self._idle.put(worker)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; what is being scored is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill(for_good=True)
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.disconnect()

    def check(self, prompt: "Prompt") -> None:
        """Scores an empty response once, so that a reward that can't work is found before expensive work.

        Raises RewardError where it raises, hangs or crashes.
        """
        kind, answer = self._ask("", prompt.record)
        if kind != "reward":
            raise RewardError(self.config.name, prompt.index, f"an empty response: {answer}")
        _finite(self.config.name, prompt.index, answer)

    def score(self, prompts: Sequence["Prompt"], completions: Sequence["Completion"]) -> list[float]:
        """One reward a completion, `prompts[i]` being that of `completions[i]`.

        A response whose scoring takes more than `reward.timeout_s`, or kills its process, gets 0.0 and is counted.
        Raises RewardError where the reward raises.
        """
        with self._lock:  # tokenizers are not all safe to share between threads
            texts = [self.tokenizer.decode(list(c.token_ids), skip_special_tokens=True) for c in completions]
        return list(self._threads.map(self._score_one, prompts, texts))

    def _score_one(self, prompt: "Prompt", text: str) -> float:
        kind, answer = self._ask(text, prompt.record)
        if kind == "reward":
            return _finite(self.config.name, prompt.index, answer)
        if kind == "error":
            raise RewardError(self.config.name, prompt.index, answer)
        with self._lock:
            self.num_timeouts += kind == "timeout"
            self.num_crashes += kind == "crash"
        return 0.0

    def _ask(self, text: str, record: dict[str, Any]) -> tuple[str, Any]:
        worker = self._idle.get()
        try:
            return worker.ask(text, record)
        finally:
            self._idle.put(worker)


def _finite(name: str, prompt_index: int, reward: float) -> float:
    if not math.isfinite(reward):
        raise RewardError(name, prompt_index, f"the reward is {reward}; it must be a finite number")
    return reward


class _Worker:
    """One scoring process and the connection to it; a new process takes the place of one that hung or died."""

    def __init__(self, config: RewardConfig):
        self.config = config
        self._state_lock = threading.Lock()
        self._closed = False
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "gspo_megatron.rewards.worker"]
        command += [str(theirs.fileno()), self.config.name, str(self.config.timeout_s)]
        # What can be imported here can be imported there; a reward never sees the trainer's GPUs.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        self._connection, self._ready = Connection(ours.detach()), False

    def wait_ready(self) -> None:
        """Raises ConfigError where the process can't load the reward or does not come up."""
        if self._ready:
            return
        kind, answer = self._receive(START_TIMEOUT_S)
        if kind != "ready":
            reason = (
                answer if kind == "fault" else f"reward.name: {self.config.name!r}: its process {answer} at the start"
            )
            raise ConfigError(reason)
        self._ready = True

    def ask(self, text: str, record: dict[str, Any]) -> tuple[str, Any]:
        """("reward", number), ("error", text), ("timeout", text) or ("crash", text)."""
        self.wait_ready()
        try:
            self._connection.send((text, record))
            kind, answer = self._receive(self.config.timeout_s)
        except BrokenPipeError:
            kind, answer = "crash", "ended"
        if kind in ("timeout", "crash"):
            self.kill()
        return kind, answer

    def _receive(self, timeout_s: float) -> tuple[str, Any]:
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv()
        except (EOFError, ConnectionResetError):
            return "crash", f"ended with exit status {self._process.wait()}"
        return "timeout", f"took more than {timeout_s:g} s"

    def kill(self, for_good: bool = False) -> None:
        """Ends the process, and starts another unless `for_good`."""
        with self._state_lock:
            self._closed |= for_good
            self._process.kill()
            self._process.wait()
            if not self._closed:
                self.disconnect()
                self._start()

    def disconnect(self) -> None:
        self._connection.close()
