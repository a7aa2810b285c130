"""What `check` reads of a Hugging Face checkpoint directory: sizes from config.json, and whether its files are whole.

No weight is read, only the headers of the safetensors files, so that a checkpoint of hundreds of GB takes milliseconds.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.config import ConfigError
from gspo_megatron.resume import model_differences, model_of_checkpoint
from gspo_megatron.weights.families import FAMILIES, Family, unsupported
from gspo_megatron.weights.plan import tensor_faults
from gspo_megatron.weights.rules import ModelShape
from gspo_megatron.weights.safetensors_header import read_header

_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""What a kind of rotary embedding can't be computed without (`backend/rope.py`)."""


@dataclass(frozen=True)
class ModelInfo:
    """What preflight needs of config.json."""

    architecture: str
    shape: ModelShape
    experts_per_token: int
    """0 for a dense model."""
    max_positions: int
    """Longest sequence, in tokens."""


def read_model(directory: Path) -> tuple[ModelInfo | None, list[str]]:
    """The sizes in `directory`/config.json, or None and the faults, one line each."""
    place = f"model.hf: {str(directory)!r}"
    if not directory.is_dir():
        return None, [f"{place} is not a directory; give the directory of a Hugging Face checkpoint"]
    try:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, [f"{place} has no config.json; give the directory of a Hugging Face checkpoint"]
    except (OSError, ValueError) as error:
        return None, [f"{place}: config.json cannot be read as JSON ({error}); copy it again"]
    if not isinstance(values, dict):
        return None, [f"{place}: config.json holds no JSON object; copy it again"]
    architectures = values.get("architectures") or ["none named"]
    if architectures[0] not in FAMILIES:
        return None, [f"{place}: {unsupported(architectures[0])}"]
    try:
        info = _info(architectures[0], values)
    except (KeyError, TypeError, ValueError) as error:
        return None, [f"{place}: config.json lacks or misspells the size {error}; copy it from the model's source"]
    return info, [f"{place}: {fault}" for fault in _unsupported(values, FAMILIES[architectures[0]])]


def _info(architecture: str, values: dict[str, Any]) -> ModelInfo:
    """Raises ValueError with the name of a size that is missing or not a positive integer."""

    def size(*names: str) -> int:
        value = next((values[name] for name in names if values.get(name) is not None), None)
        if type(value) is not int or value < 1:
            raise ValueError(f"{names[0]} ({value!r})")
        return value

    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        size(name)
    moe = FAMILIES[architecture].is_moe
    if moe:
        size("num_experts", "num_local_experts", "n_routed_experts")
        size("moe_intermediate_size", "intermediate_size")
    else:
        size("intermediate_size")
        values = values | {"num_experts": 0}
    return ModelInfo(
        architecture=architecture,
        shape=ModelShape.from_hf(values),
        experts_per_token=size("num_experts_per_tok") if moe else 0,
        max_positions=size("max_position_embeddings"),
    )


def _unsupported(values: dict[str, Any], family: Family) -> list[str]:
    """Settings of config.json that change the computation in a way that the family's model here does not have."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope_key = "rope_parameters" if "rope_parameters" in values else "rope_scaling"
    kind = rope.get("rope_type", rope.get("type", "default"))
    wrong = {
        "hidden_act": values.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(values.get("attention_bias")),
        "mlp_bias": bool(values.get("mlp_bias")),
        "use_sliding_window": bool(values.get("use_sliding_window")),
        "quantization_config": values.get("quantization_config") is not None,
        rope_key: kind not in family.rope_types,
        "partial_rotary_factor": values.get("partial_rotary_factor", 1.0) != 1.0,
    }
    faults = [
        f"config.json has {name}: {json.dumps(values.get(name))}, which is not supported; use a checkpoint without it"
        for name, is_wrong in wrong.items()
        if is_wrong and name not in family.models
    ]
    lacking = [name for name in _ROPE_NUMBERS.get(kind, ()) if type(rope.get(name)) not in (int, float)]
    if lacking:
        faults.append(
            f"config.json has {rope_key} of type {kind} without the number {', '.join(lacking)}; copy it again"
        )
    return faults + family.faults(values)


def tokenizer_faults(directory: Path) -> list[str]:
    if any(all((directory / name).is_file() for name in group) for group in _TOKENIZER_FILES):
        return []
    wanted = ", or ".join(" with ".join(group) for group in _TOKENIZER_FILES)
    return [f"model.hf: {str(directory)!r} has no tokenizer files; copy {wanted} into it"]


def megatron_faults(directory: Path, info: ModelInfo | None, hf: Path | None) -> list[str]:
    """What is wrong with a `torch_dist` checkpoint: no such, damaged, or of another model than `info`, with `hf` also
    than its config.json."""
    if info is None:
        return []
    from gspo_megatron.weights.megatron_files import MegatronReader  # here, because it needs torch

    try:
        MegatronReader(directory, FAMILIES[info.architecture], info.shape)
    except ConfigError as error:
        return error.faults
    own = model_of_checkpoint(directory)
    if own is None or hf is None:
        return []
    path = hf / "config.json"
    return [  # what neither names nor shapes show, and training would be silently wrong with
        f"model.hf: {path} has {name} = {new}, but model.megatron: {directory} is of a model with {old}; give that model, "
        "or add model.hf to run.allow_changed to take the new value"
        for name, old, new in model_differences(own, json.loads(path.read_text(encoding="utf-8")))
    ]


def weight_faults(directory: Path, info: ModelInfo | None = None) -> list[str]:
    """Missing, truncated or unreadable safetensors files, and tensors that the index lists but no file holds; with
    `info` also tensors that are not the model's, by name and shape."""
    place = f"model.hf: {str(directory)!r}"
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        single = directory / "model.safetensors"
        if single.is_file():
            header, found = _file_fault(single)
            return [f"{place}: {fault}" for fault in found or _tensor_faults(header, info)]
        pickles = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        if pickles:
            return [f"{place} holds pickles ({pickles[0]}), which are refused; convert them to safetensors"]
        return [f"{place} has neither model.safetensors nor model.safetensors.index.json; copy the weights into it"]
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(files.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return [f"{place}: {index.name} cannot be read ({error!r}); copy it again"]
    faults, held = [], {}
    for shard in shards:
        if Path(shard).name != shard:
            faults.append(f"{index.name} names {shard!r}, which lies outside the directory; write a plain file name")
            continue
        held[shard], found = _file_fault(directory / shard)
        faults += found
    for shard in shards:
        missing = [name for name, file in files.items() if file == shard and name not in held.get(shard, {})]
        if missing and held.get(shard):
            faults.append(
                f"{shard} does not hold {len(missing)} tensors of the index, first {missing[0]!r}; copy it again"
            )
    faults = faults or _tensor_faults({name: held[file][name] for name, file in files.items()}, info)
    return [f"{place}: {fault}" for fault in faults]


def _tensor_faults(header: dict[str, Any], info: ModelInfo | None) -> list[str]:
    if info is None:
        return []
    shapes = {name: tuple(tensor["shape"]) for name, tensor in header.items()}
    return tensor_faults(shapes, FAMILIES[info.architecture], info.shape)


def _file_fault(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The tensors in a safetensors file's header, and at most one fault."""
    if not path.is_file():
        return {}, [f"{path.name} is missing; copy it again"]
    try:
        return read_header(path)[0], []
    except (ValueError, OSError) as error:
        return {}, [f"{path.name}: {error}; copy it again"]
