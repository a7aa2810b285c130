"""Runs one server process and ends all of its process group when the trainer is gone.

python -m gspo_megatron.rollout.supervise --parent PID --grace SECONDS -- COMMAND...

A trainer that is killed with SIGKILL can't stop anything, and a server's own processes don't end with their parent.
This process leads the group, looks twice a second whether its parent is still the trainer, and takes the group down
(itself last) when it is not, on SIGTERM, and when the server ends by itself.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time

POLL_S = 0.5
_PR_SET_PDEATHSIG = 1


def _die_with_supervisor() -> None:
    """Runs in the server before its program starts: the kernel kills it should this supervisor be killed first."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def supervise(command: list[str], parent: int, grace_s: float) -> None:
    """Run `command` until it ends, `parent` is gone or SIGTERM comes; then kill the group. Does not return.

    On the way out the server has `grace_s` seconds to end by itself.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    reasons: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: reasons.append("the trainer asked for it"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = subprocess.Popen(command, preexec_fn=_die_with_supervisor)
    while not reasons:
        if os.getppid() != parent:
            reasons.append(f"the trainer, process {parent}, is gone")
        elif server.poll() is not None:
            reasons.append(f"it ended with status {server.returncode}")
        else:
            time.sleep(POLL_S)
    print(f"supervisor: stopping the server: {reasons[0]}", file=sys.stderr, flush=True)
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(grace_s)
        except subprocess.TimeoutExpired:
            print(f"supervisor: the server did not end within {grace_s:g} s, killing it", file=sys.stderr, flush=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parent", type=int, required=True, help="process id of the trainer")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds the server has to end by itself")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    supervise(options.command, options.parent, options.grace)


if __name__ == "__main__":
    main(sys.argv[1:])
