"""A scoring process: `python -m gspo_megatron.rewards.worker FD REWARD TIMEOUT_S`, started by `Scorer`.

Answers ("reward", number) or ("error", text) to every (response_text, record) that comes over the connection FD, after
a first ("ready", "") or ("fault", text). Ends when the other side closes, so it does not outlive its parent.
"""

import signal
import sys
from multiprocessing.connection import Connection

from gspo_megatron.config import ConfigError
from gspo_megatron.rewards import load_reward

GRACE_S = 5.0
"""How long past the time limit a process whose parent is gone may still hang in a reward, in seconds."""


def main(fd: int, name: str, timeout_s: float) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    connection = Connection(fd)
    try:
        function = load_reward(name)
    except ConfigError as error:
        connection.send(("fault", str(error)))
        return 2
    connection.send(("ready", ""))
    while True:
        try:
            text, record = connection.recv()
        except EOFError:
            return 0
        # The kernel's timer ends this process even where the reward holds the interpreter and the parent is gone.
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)
        try:
            answer = ("reward", float(function(text, record)))
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send(answer)
        except BrokenPipeError:
            return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
