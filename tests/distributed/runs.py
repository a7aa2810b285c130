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
        self._directory, self.rollouts = directory, directory / "rollouts"
        self.model = self._made("qwen3_moe")
        save_rollouts(self.rollouts)
        (self.trace,) = self.traces([case(1)])
        torch.save(self.trace, self._reference("qwen3_moe"))

    def _made(self, family: str) -> Path:
        model = self._directory / family
        if not model.exists():
            make_tiny_model(family, model, seed=1, overrides={"num_hidden_layers": 4})
        return model

    def _reference(self, family: str) -> Path:
        return self._directory / f"one_rank_{family}.pt"

    def traces(self, cases: list[Case], dtype: str = "fp32") -> list[Trace]:
        return self._run(cases, {}, dtype)

    def differences(self, cases: list[Case]) -> list[Differences]:
        families = list(dict.fromkeys(one.family for one in cases))
        new = [family for family in families if not self._reference(family).exists()]
        if new:
            for family, trace in zip(new, self.traces([case(1, family=family) for family in new]), strict=True):
                torch.save(trace, self._reference(family))
        return self._run(cases, {family: self._reference(family) for family in families}, "fp32")

    def _run(self, cases: list[Case], references: dict[str, Path], dtype: str) -> list:
        """All cases must have one world size. Bounded by 40 s a case, of which a free machine needs 3."""
        (world,) = {one.world for one in cases}
        models = {family: self._made(family) for family in {one.family for one in cases}}
        arguments = (models, self.rollouts, cases, free_ports(len(cases)), references, dtype)
        return run_ranks(train_cases, world, *arguments, timeout_s=60 + 40 * len(cases))[0]
