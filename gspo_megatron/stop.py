"""SIGTERM and SIGUSR1 as a request to save and end: what schedulers send before they kill a job."""

import os
import signal
import time

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_REQUEST_S = 5.0
"""Launchers pass a signal on that the ranks got as well; what comes this soon after the first is no second request."""


class StopRequest:
    """Context manager; `requested` becomes true with the first signal, and a second one ends the process at once.

    With `active` False signals keep their effect.
    """

    def __init__(self, active: bool):
        self.requested = False
        self._active, self._first, self._before = active, 0.0, {}

    def __enter__(self) -> "StopRequest":
        if self._active:
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first = True, now
        elif now - self._first > SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
