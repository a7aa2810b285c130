"""What tests of checkpoint directories write and compare."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from gspo_megatron.weights.hf_files import INDEX


def make_reference(directory: Path) -> Path:
    """A checkpoint with every kind of file, among them old weights that must not be copied."""
    directory.mkdir()
    config = {"architectures": ["X"], "torch_dtype": "float32", "eos": "\N{LATIN SMALL LETTER E WITH ACUTE}"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    (directory / "tokenizer.json").write_text('{"model": 1}')
    (directory / "chat_template.jinja").write_text("{{ x }}")
    (directory / "merges.txt").write_text("a b")
    (directory / "tokenization_x.py").write_text("raise RuntimeError('this is copied, and not run')")
    (directory / "x.tiktoken").write_text("YQ== 0")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ y }}")
    (directory / INDEX).write_text('{"weight_map": {"stale": "model-00001-of-00009.safetensors"}}')
    (directory / "model-00001-of-00009.safetensors").write_bytes(b"stale")
    (directory / "pytorch_model.bin.index.json").write_text('{"weight_map": {"stale": "pytorch_model.bin"}}')
    (directory / "pytorch_model.bin").write_bytes(b"stale")
    return directory


def random_tensors(count: int = 7, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Of 32 elements each."""
    generator = torch.Generator().manual_seed(1)
    return {f"t{i}": torch.randn(4, 8, generator=generator).to(dtype) for i in range(count)}


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(
        a.dtype == second[name].dtype and a.shape == second[name].shape and torch.equal(a, second[name])
        for name, a in first.items()
    )


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        found = load_file(file)
        assert not tensors.keys() & found.keys()
        tensors |= found
    return tensors
