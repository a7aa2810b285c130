"""Checkpoint directories without weights: real headers over sparse files."""

import json
import struct
from math import prod
from pathlib import Path

import yaml

from gspo_megatron.weights.families import FAMILIES
from gspo_megatron.weights.plan import hf_shapes
from gspo_megatron.weights.rules import ModelShape

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Sizes of the published Qwen3-30B-A3B."""

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}

TINY = QWEN3_30B_A3B | {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 512,
}


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """A complete safetensors file of bf16 tensors of the given shapes; its content is a hole."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_checkpoint(directory: Path, config: dict, num_shards: int = 2) -> Path:
    """config.json, a tokenizer file, and all tensors of the model in `num_shards` shards with their index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    shapes = hf_shapes(FAMILIES[config["architectures"][0]], ModelShape.from_hf(config))
    names, weight_map = list(shapes), {}
    for number in range(num_shards):
        file = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        held = names[number::num_shards]
        write_shard(directory / file, {name: shapes[name] for name in held})
        weight_map |= dict.fromkeys(held, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def write_config(directory: Path, model: Path, **sections) -> Path:
    """A configuration of `model` that passes every check, with `sections` merged in."""
    data = directory / "train.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    values = {
        "run": {"dir": str(directory / "run")},
        "model": {"hf": str(model)},
        "train": {"tokens_per_micro_batch": 4096},
        "rollout": {"servers": ["http://localhost:30000"]},
        "data": {"train": str(data)},
        "reward": {"name": "exact_match"},
    }
    for section, keys in sections.items():
        values[section] = values.get(section, {}) | keys
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
