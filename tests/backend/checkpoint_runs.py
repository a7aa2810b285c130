"""What trainer ranks run in test_checkpoint.py: policies that save, load, and go on."""

import random
from pathlib import Path

import torch

from gspo_megatron.algorithm.losses import LossOutput
from gspo_megatron.algorithm.packing import PackedTokens, pack
from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.policy import Policy
from gspo_megatron.config import Config, MegatronConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig

VOCABULARY = 513
OPTIMIZER = OptimizerConfig(lr=3e-3, clip_grad=1.0, weight_decay=0.1, schedule="cosine", min_lr=1e-3, warmup_steps=1)


def micro_batches(seed: int, alignment: int) -> list[PackedTokens]:
    """Three of two sequences each."""
    generator = random.Random(seed)

    def ids() -> list[int]:
        return [generator.randrange(VOCABULARY) for _ in range(generator.randrange(2, 12))]

    return [pack([(ids(), ids()) for _ in range(2)], alignment=alignment) for _ in range(3)]


def go_on(policy: Policy, mesh: Mesh, seeds: list[int]) -> dict:
    """An update on the micro-batches of each seed, the same on all data-parallel ranks; what came of them, on every
    rank, and on rank 0 the weights by HF names."""
    results = []
    for seed in seeds:
        batches = micro_batches(seed, mesh.parallel.tensor)

        def loss(index: int, log_probs: torch.Tensor) -> LossOutput:
            return LossOutput(log_probs.sum(), torch.tensor(2.0), {})

        results.append(policy.update(batches, loss))
    return {
        "grad_norms": [result.grad_norm for result in results],
        "learning_rates": [result.learning_rate for result in results],
        "weights": {name: tensor.clone().float().numpy() for name, tensor in policy.hf_tensors()},
        "generator": torch.rand(4).tolist(),
    }


def open_policy(layout: dict, model: str, dtype: str, ddp: dict | None = None) -> tuple[Policy, Mesh]:
    mesh = Mesh.create(ParallelConfig(**layout), seed=1, timeout_s=60)
    return make_policy(mesh, model, dtype, ddp), mesh


def make_policy(mesh: Mesh, model: str, dtype: str, ddp: dict | None = None) -> Policy:
    """`ddp`: settings of Megatron's DistributedDataParallel."""
    train = TrainConfig(dtype=dtype, steps=10, updates_per_rollout=1)
    config = Config(
        model=ModelConfig(model), parallel=mesh.parallel, train=train, optimizer=OPTIMIZER,
        megatron=MegatronConfig(ddp=ddp or {}),
    )  # fmt: skip
    return Policy(config, mesh)


def move_expert_biases(policy: Policy, by: float) -> None:
    """Buffers, which no optimizer update moves."""
    with torch.no_grad():
        for name, value in policy.params.items():
            if name.endswith("expert_bias"):
                value.add_(by)


def save_and_go_on(layout: dict, model: str, directory: str, dtype: str, in_background: bool) -> dict:
    policy, mesh = open_policy(layout, model, dtype)
    go_on(policy, mesh, [1, 2])
    if mesh.rank == 0:
        Path(directory).mkdir()
    mesh.barrier("the directory")
    move_expert_biases(policy, 0.5)  # else they would be those of the model that the other run starts from
    if in_background:
        pending = policy.begin_save(Path(directory))
    else:
        policy.save(Path(directory))
    result = go_on(policy, mesh, [3, 4])
    if in_background:  # only now: what is written must be what was there when it was saved
        move_expert_biases(policy, 0.25)
        pending.start()
        pending.finish(60)
    mesh.close()
    return result


def load_and_go_on(layout: dict, model: str, directory: str, dtype: str, same_layout: bool) -> dict:
    policy, mesh = open_policy(layout, model, dtype)
    go_on(policy, mesh, [7])  # what is loaded replaces what was there
    policy.load(Path(directory), same_layout)
    result = go_on(policy, mesh, [3, 4])
    mesh.close()
    return result
