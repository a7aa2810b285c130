"""Megatron's layouts written out with numpy, and the places of ranks as Megatron-Core counts them."""

import random

import numpy as np

from gspo_megatron.weights.plan import Place
from gspo_megatron.weights.rules import Block, ModelShape

TINY = ModelShape(
    hidden=8, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, ffn=16, moe_ffn=8, num_experts=4, vocab=13,
    tied_embeddings=False,
)  # fmt: skip

QWEN3_30B_A3B = ModelShape(
    hidden=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, ffn=6144, moe_ffn=768, num_experts=128,
    vocab=151936, tied_embeddings=False,
)  # fmt: skip
QWEN3_235B_A22B = ModelShape(
    hidden=4096, num_layers=94, num_heads=64, num_kv_heads=4, head_dim=128, ffn=12288, moe_ffn=1536, num_experts=128,
    vocab=151936, tied_embeddings=False,
)  # fmt: skip


def numbered(shape: tuple[int, ...], first: int = 0) -> np.ndarray:
    """No two elements are equal, so that a misplaced one shows."""
    return np.arange(first, first + int(np.prod(shape)), dtype=np.int64).reshape(shape)


def shard_from_blocks(blocks: list[Block], hf: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """A rank's shard filled block by block; -1 where no block reaches, 0 at padding."""
    shard = np.full(shape, -1, dtype=np.int64)
    for block in blocks:
        where = block.param_slices
        assert (shard[where] == -1).all(), f"{block} overlaps another block"
        shard[where] = 0 if block.hf is None else block.of_hf(hf[block.hf])
    return shard


def qkv_of_megatron(query: np.ndarray, key: np.ndarray, value: np.ndarray, shape: ModelShape) -> np.ndarray:
    """linear_qkv of an unsplit model: by query group, its query heads, its key head, its value head."""
    hidden, head = query.shape[1], shape.head_dim
    grouped = [
        query.reshape(shape.num_kv_heads, -1, hidden),
        key.reshape(shape.num_kv_heads, head, hidden),
        value.reshape(shape.num_kv_heads, head, hidden),
    ]
    return np.concatenate(grouped, axis=1).reshape(-1, hidden)


def places(
    shape: ModelShape, world: int, tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1, stages=None
) -> list[Place]:
    """All ranks' places in Megatron-Core's order: tensor fastest, then context, data, pipeline slowest; for experts
    expert_tensor fastest, then expert, expert-data, pipeline. `stages`: number of layers on each pipeline stage."""
    stages = stages or [shape.num_layers // pipeline] * pipeline
    assert sum(stages) == shape.num_layers and len(stages) == pipeline
    per_stage, found = world // pipeline, []
    for rank in range(world):
        stage, inner = divmod(rank, per_stage)
        expert_rank, per_expert = inner // expert_tensor % expert, shape.num_experts // expert
        first = sum(stages[:stage])
        found.append(
            Place(
                rank=rank,
                tensor_rank=inner % tensor,
                tensor_size=tensor,
                expert_tensor_rank=inner % expert_tensor,
                expert_tensor_size=expert_tensor,
                layers=tuple(range(first, first + stages[stage])),
                experts=tuple(range(expert_rank * per_expert, (expert_rank + 1) * per_expert)),
                has_embedding=stage == 0,
                has_output=stage == pipeline - 1,
                dense_replica=inner // tensor,
                expert_replica=inner // (expert_tensor * expert),
            )
        )
    return found


def random_case(seed: int) -> tuple[ModelShape, list[Place]]:
    """A small model and a layout on which it fits, tensor > KV heads and uneven stages among them."""
    generator = random.Random(seed)
    tensor, pipeline, context = (generator.choice([1, 2, 4]) for _ in range(3))
    expert, expert_tensor = generator.choice([1, 2, 4]), generator.choice([1, 2])
    dense = generator.random() < 0.3
    stages = [generator.randint(1, 3) for _ in range(pipeline)]
    if dense:
        expert = expert_tensor = 1
    kv_heads = generator.choice([1, 2, 4])
    shape = ModelShape(
        hidden=generator.choice([8, 12]),
        num_layers=sum(stages),
        num_heads=kv_heads * generator.choice([1, 2, 6]),
        num_kv_heads=kv_heads,
        head_dim=generator.choice([4, 8]),
        ffn=generator.choice([8, 16]),
        moe_ffn=generator.choice([4, 8]),
        num_experts=0 if dense else expert * generator.choice([1, 2]),
        vocab=generator.randint(16, 40),
        tied_embeddings=generator.random() < 0.5,
    )
    per_stage = np.lcm(tensor * context, expert * expert_tensor) * generator.choice([1, 2, 3])
    world = int(per_stage) * pipeline
    return shape, places(shape, world, tensor, pipeline, context, expert, expert_tensor, stages)
