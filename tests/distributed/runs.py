"""Runs of cases on real ranks: a four-layer model, two saved steps, and the trace of one rank to compare with."""

import random
import socket
from pathlib import Path

import torch
from make_tiny_model import make_tiny_model

from tests.distributed.cases import Case, case
from tests.distributed.compare import Differences
from tests.distributed.rollout import save_rollouts
from tests.distributed.training import Trace, train_cases
from tests.ranks import run_ranks


def free_ports(number: int) -> list[int]:
    """Below the range from which the system takes ports for connections, which the ranks of an earlier case hold."""
    ports: set[int] = set()
    while len(ports) < number:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                ports.add(port)
    return sorted(ports)


class Runs:
    """Trains cases and compares them with one rank in fp32."""

    def __init__(self, directory: Path):
        self.model, self.rollouts = directory / "model", directory / "rollouts"
        self.reference = directory / "one_rank.pt"
        make_tiny_model("qwen3_moe", self.model, seed=1, overrides={"num_hidden_layers": 4})
        save_rollouts(self.rollouts)
        (self.trace,) = self.traces([case(1)])
        torch.save(self.trace, self.reference)

    def traces(self, cases: list[Case], dtype: str = "fp32") -> list[Trace]:
        return self._run(cases, None, dtype)

    def differences(self, cases: list[Case]) -> list[Differences]:
        return self._run(cases, self.reference, "fp32")

    def _run(self, cases: list[Case], reference: Path | None, dtype: str) -> list:
        """All cases must have one world size. Bounded by 40 s a case, of which a free machine needs 3."""
        (world,) = {one.world for one in cases}
        arguments = (self.model, self.rollouts, cases, free_ports(len(cases)), reference, dtype)
        return run_ranks(train_cases, world, *arguments, timeout_s=60 + 40 * len(cases))[0]
