"""A Qwen3-MoE checkpoint of any size, written in seconds: one block of noise, rotated by another step for every
tensor."""

import json
from pathlib import Path

import torch

from gspo_megatron.weights.families import FAMILIES
from gspo_megatron.weights.plan import hf_shapes
from gspo_megatron.weights.rules import ModelShape
from gspo_megatron.weights.safetensors_files import write_pieces, write_safetensors_header

SIZES = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_attention_heads": 16, "head_dim": 64,
    "num_key_value_heads": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}  # fmt: skip


def write_large_model(directory: Path, shard_bytes: int = 500 << 20, **sizes) -> dict[str, int]:
    """Writes config.json and bf16 shards; bytes of the whole and of the largest layer."""
    config = SIZES | sizes
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    shapes = hf_shapes(FAMILIES[config["architectures"][0]], ModelShape.from_hf(config))
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    shards: list[list[str]] = [[]]
    held, layers = 0, {}
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
        layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else name
        layers[layer] = layers.get(layer, 0) + size
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        with (directory / file).open("wb") as output:
            write_safetensors_header(output, {name: (torch.bfloat16, shapes[name]) for name in names})
            for name in names:
                weight_map[name] = file
                step, left = hash_of(name), torch.Size(shapes[name]).numel()
                while left:
                    piece = noise[step % (1 << 19) :][:left]
                    write_pieces(output, [piece])
                    left -= piece.numel()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return {"total": sum(layers.values()), "layer": max(layers.values())}


def hash_of(name: str) -> int:
    return sum(ord(letter) * 131**place for place, letter in enumerate(name)) % 1_000_003
