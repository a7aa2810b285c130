"""What watching the routers costs: time of a step's passes with the routing metrics over the same without.

    python benchmarks/moe_health.py [--tokens 2048] [--layers 4] [--experts 64] [--topk 4] [--rounds 9]

A step is as in training: a pass for log pi_old over all micro-batches, then updates on mini-batches, and the metrics.
Two policies of the same random weights, one with `health.routing` and one without, make the same steps in turn, so that
a drift of the machine's speed hits both alike; each round gives a ratio, and their median is the result. On a CPU
seconds are those of this process, so that other programs on the machine do not count. Beside it, `counted`: the seconds
spent inside the monitor itself over those of the steps, which noise hardly moves.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from gspo_megatron.notices import hide_known_notices

hide_known_notices(on_gpu=torch.cuda.is_available())

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import numpy as np  # noqa: E402
from make_tiny_model import make_tiny_model  # noqa: E402

from gspo_megatron.algorithm.losses import gspo  # noqa: E402
from gspo_megatron.algorithm.packing import pack  # noqa: E402
from gspo_megatron.backend.mesh import Mesh  # noqa: E402
from gspo_megatron.backend.moe_health import RoutingMonitor  # noqa: E402
from gspo_megatron.backend.policy import Policy  # noqa: E402
from gspo_megatron.batches import MicroBatch, mini_batch_loss  # noqa: E402
from gspo_megatron.config import (  # noqa: E402
    Config,
    GSPOConfig,
    HealthConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)

NUM_SEQUENCES, NUM_MINI_BATCHES, PROMPT_SHARE = 4, 4, 4


def make_model(directory: Path, options: argparse.Namespace) -> Path:
    sizes = {
        "num_hidden_layers": options.layers, "num_experts": options.experts, "num_experts_per_tok": options.topk,
        "hidden_size": options.hidden, "moe_intermediate_size": options.hidden // 2,
    }  # fmt: skip
    return make_tiny_model("qwen3_moe", directory, seed=1, overrides=sizes)


def make_micro_batch(tokens: int, seed: int) -> MicroBatch:
    generator = np.random.default_rng(seed)
    length = tokens // NUM_SEQUENCES
    prompt = length // PROMPT_SHARE
    sizes = [(prompt, length - prompt)] * NUM_SEQUENCES
    pairs = [tuple(generator.integers(3, 500, size) for size in pair) for pair in sizes]
    packed = pack(pairs, {"rollout_log_probs": [[-6.0] * (length - prompt)] * NUM_SEQUENCES})
    return MicroBatch(
        packed, tuple(range(NUM_SEQUENCES)), torch.linspace(-1, 1, NUM_SEQUENCES), torch.zeros(NUM_SEQUENCES).long()
    )


def step(policy: Policy, mesh: Mesh, mini_batches: list[list[MicroBatch]]) -> dict[str, float]:
    packed = [micro_batch.packed for mini_batch in mini_batches for micro_batch in mini_batch]
    old = iter(policy.log_likelihoods(packed, record_routing=True))
    for mini_batch in mini_batches:
        loss = mini_batch_loss(gspo, GSPOConfig(), mini_batch, [next(old) for _ in mini_batch], mesh.describe())
        policy.update([micro_batch.packed for micro_batch in mini_batch], loss)
    return policy.routing_metrics()


def time_inside_monitor() -> list[float]:
    """Wraps the monitor's entries from the forward pass; one number of seconds a call is appended to the list."""
    spent: list[float] = []

    def timed(function):
        def call(*args, **kwargs):
            started = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent.append(clock() - started)

        return call

    for name in ("_after_router", "_find", "metrics"):
        setattr(RoutingMonitor, name, timed(getattr(RoutingMonitor, name)))
    return spent


def clock() -> float:
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def seconds_of(action) -> float:
    started = clock()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started


def measure(options: argparse.Namespace) -> dict[str, float]:
    spent = time_inside_monitor()  # before hooks are made
    with contextlib.ExitStack() as stack:
        model = make_model(Path(stack.enter_context(tempfile.TemporaryDirectory())), options)
        config = Config(
            model=ModelConfig(hf=str(model)), optimizer=OptimizerConfig(lr=1e-4),
            train=TrainConfig(dtype="bf16" if torch.cuda.is_available() else "fp32"),
        )  # fmt: skip
        mesh = Mesh.create(config.parallel, seed=1, timeout_s=600)
        stack.callback(mesh.close)
        off = dataclasses.replace(config, health=HealthConfig(routing=False))
        policies = {"with": Policy(config, mesh), "without": Policy(off, mesh)}
        mini_batches = [[make_micro_batch(options.tokens, seed)] for seed in range(NUM_MINI_BATCHES)]
        for policy in policies.values():
            step(policy, mesh, mini_batches)
        ratios, counted, seconds = [], [], []
        for number in range(options.rounds):
            found = {}
            # the order alternates, so that what the second gains or loses by its place cancels
            for name in sorted(policies, reverse=bool(number % 2)):
                spent.clear()
                found[name] = seconds_of(lambda policy=policies[name]: step(policy, mesh, mini_batches))
                if name == "with":
                    counted.append(sum(spent) / found[name])
            ratios.append(found["with"] / found["without"])
            seconds.append(found["without"])
    return {
        "ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
        "counted": statistics.median(counted), "seconds_without": statistics.median(seconds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of a micro-batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    print(json.dumps({**vars(options), **measure(options)}))


if __name__ == "__main__":
    main()
