"""Checkpoint directories without weights: real headers over sparse files."""

import json
import struct
from pathlib import Path

import yaml

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


def write_shard(path: Path, tensors: dict[str, int]) -> None:
    """A complete safetensors file of bf16 vectors of the given sizes in bytes; its content is a hole."""
    header, end = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_checkpoint(directory: Path, config: dict, num_shards: int = 2, shard_bytes: int = 1 << 20) -> Path:
    """config.json, a tokenizer file, and `num_shards` shards of one tensor each with their index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    weight_map = {}
    for number in range(1, num_shards + 1):
        name = f"model-{number:05}-of-{num_shards:05}.safetensors"
        write_shard(directory / name, {f"tensor.{number}": shard_bytes})
        weight_map[f"tensor.{number}"] = name
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
