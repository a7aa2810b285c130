"""Blocking calls to several servers at once, with a bound."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def run_all(tasks: Mapping[str, Callable[[], T]], timeout_s: float, what: str) -> dict[str, T]:
    """Run all tasks in threads; gives their results by name.

    The first exception is raised at once, without waiting for the others: a collective that one party has left would
    block them for long. Raises TimeoutError naming `what` and the tasks that are not done after `timeout_s` seconds.
    """
    answers: queue.SimpleQueue[tuple[str, T | None, BaseException | None]] = queue.SimpleQueue()

    def run(name: str, task: Callable[[], T]) -> None:
        try:
            answers.put((name, task(), None))
        except BaseException as error:
            answers.put((name, None, error))

    for name, task in tasks.items():
        # daemon threads: a call that hangs must not keep the trainer from ending
        threading.Thread(target=run, args=(name, task), name=f"{what}: {name}", daemon=True).start()
    results: dict[str, T] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(tasks):
        try:
            name, result, error = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            missing = ", ".join(name for name in tasks if name not in results)
            raise TimeoutError(f"{what}: no answer within {timeout_s:g} s from {missing}") from None
        if error is not None:
            raise error
        results[name] = result
    return results
