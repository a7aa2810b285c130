"""Runs a function on several trainer ranks over gloo: real processes, real Megatron-Core.

Ranks are forked from a server process that has imported torch and Megatron once, so that a run starts in a moment.
"""

import multiprocessing
import os
import pickle
import queue
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "tests.preload"])


def run_ranks(function: Callable, world_size: int, *args, timeout_s: float = 180.0) -> list:
    """`function(*args)` on `world_size` ranks with torchrun's environment; its results by rank.

    `function` must be importable. Raises RuntimeError with a rank's traceback when one fails, or when the bound passes;
    no process is left behind.
    """
    results = _context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        _context.Process(target=_rank_main, args=(function, rank, world_size, port, results, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(results, processes, world_size, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def _collect(results, processes, world_size: int, deadline: float) -> list:
    answers: dict[int, object] = {}
    while len(answers) < world_size:
        try:
            rank, failure, answer = results.get(timeout=1)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0) and r not in answers]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(
                    f"ranks {dead or 'all alive, but out of time'}; answered: {sorted(answers)}"
                ) from None
            continue
        if failure:
            raise RuntimeError(f"rank {rank} failed:\n{failure}")
        answers[rank] = pickle.loads(answer)
    return [answers[rank] for rank in range(world_size)]


def _rank_main(function, rank: int, world_size: int, port: int, results, args) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    import torch

    torch.set_num_threads(1)
    try:
        results.put((rank, None, pickle.dumps(function(*args))))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    results.close()
    results.join_thread()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


REPOSITORY = Path(__file__).resolve().parent.parent
