"""Supervised warm start of the quickstart's random model, through the same Megatron policy that GSPO trains.

A model that never answers right gets no reward, and GSPO learns from differences of rewards. So the quickstart first
shows the tiny model problems with their answers until it would sample a right one about three times in ten: with fresh
problems in every batch, mean exp(log pi(answer)) is the exact success rate of sampling, before the update on them.

    torchrun --nproc-per-node 2 examples/quickstart/warm_start.py CONFIG --model DIR --out DIR [a.b=c ...]
"""

import argparse
import dataclasses
import os
import time
from collections import deque
from pathlib import Path

import torch

from gspo_megatron.notices import hide_known_notices

hide_known_notices(on_gpu=torch.cuda.is_available())  # before the imports that bring Megatron

from gspo_megatron.algorithm.losses import LossOutput  # noqa: E402
from gspo_megatron.algorithm.packing import PackedTokens, pack, plan_micro_batches  # noqa: E402
from gspo_megatron.backend.mesh import Mesh  # noqa: E402
from gspo_megatron.backend.policy import Policy  # noqa: E402
from gspo_megatron.config import Config, OptimizerConfig  # noqa: E402
from gspo_megatron.config_loader import load_config  # noqa: E402
from gspo_megatron.data import load_dataset  # noqa: E402
from gspo_megatron.saving import export_policy  # noqa: E402
from gspo_megatron.sources import load_tokenizer, stop_token_ids  # noqa: E402

AVERAGED_BATCHES = 8


def supervised_loss(micro_batches: list[PackedTokens]):
    """Mean negative log-likelihood of the answers' tokens; metrics: probability of each whole answer."""

    def loss(index: int, log_probs: torch.Tensor) -> LossOutput:
        batch = micro_batches[index]
        responses = batch.split(log_probs)
        count = torch.tensor(sum(response.numel() for response in responses))
        right = sum((response.detach().sum().exp() for response in responses), torch.zeros(()))
        metrics = {"right": right.double(), "answers": torch.tensor(float(len(responses)), dtype=torch.float64)}
        return LossOutput(-log_probs.sum(), count, metrics)

    return loss


def answered_problems(config: Config, seed: int):
    """(prompt ids, answer ids with the stop token), endlessly; other problems than the ones GSPO trains on."""
    tokenizer = load_tokenizer(config.model)
    end = stop_token_ids(config)[0]
    data = dataclasses.replace(config.data, options={**config.data.options, "seed": seed})
    source = load_dataset(data, tokenizer, seed)
    while True:
        prompt = source.next(1)[0]
        yield prompt.token_ids, (*tokenizer(prompt.record["answer"], add_special_tokens=False)["input_ids"], end)


def warm_start(config: Config, mesh: Mesh, options: argparse.Namespace) -> None:
    policy = Policy(config, mesh)
    problems = answered_problems(config, seed=1000 + config.run.seed)
    recent: deque[float] = deque(maxlen=AVERAGED_BATCHES)
    started = time.monotonic()
    for update in range(options.max_updates):
        batch = [next(problems) for _ in range(options.problems)]
        lengths = [len(prompt) + len(answer) for prompt, answer in batch]
        plan = plan_micro_batches(lengths, mesh.data_size, config.train.tokens_per_micro_batch)[mesh.data_rank]
        micro_batches = [pack([batch[i] for i in chosen], alignment=config.parallel.tensor) for chosen in plan]
        metrics = policy.update(micro_batches, supervised_loss(micro_batches)).metrics
        recent.append(float(metrics["right"] / metrics["answers"]))
        rate = sum(recent) / len(recent)
        if mesh.rank == 0 and update % 25 == 0:
            nll = float(metrics["loss_sum"] / metrics["loss_count"])
            print(f"warm start: update {update}, nll {nll:.3f}, would answer right {rate:.3f}", flush=True)
        if len(recent) == recent.maxlen and rate >= options.target:
            break
    export_policy(policy, Path(options.out), options.model)
    if mesh.rank == 0:
        seconds = time.monotonic() - started
        print(f"warm start: {update + 1} updates, {seconds:.0f} s, would answer right {rate:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint to start from")
    parser.add_argument("--out", required=True, help="directory of the checkpoint to write")
    parser.add_argument("--target", type=float, default=0.3, help="stop at this expected success rate of sampling")
    parser.add_argument("--max-updates", type=int, default=2000)
    parser.add_argument("--problems", type=int, default=64, help="problems a batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    options, overrides = parser.parse_known_args()
    config = load_config(options.config, [*overrides, f"model.hf={options.model}"])
    # Problems are short: no need to cut them over ranks, and this loss looks at whole answers.
    parallel = dataclasses.replace(config.parallel, context=1)
    config = dataclasses.replace(config, optimizer=OptimizerConfig(lr=options.lr), parallel=parallel)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    mesh = Mesh.create(config.parallel, config.run.seed, config.train.timeout_s)
    try:
        warm_start(config, mesh, options)
    finally:
        mesh.close()


if __name__ == "__main__":
    main()
