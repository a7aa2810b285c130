"""Write a tiny random Hugging Face checkpoint with a tokenizer, for tests and the quickstart.

python tools/make_tiny_model.py --family qwen3_moe --out DIR [--seed N] [--set key=value ...]

Keys of --set are the fields of the family's config.json. The same family, seed and keys give bit-identical files.
"""

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gspo_megatron.config import ConfigError
from gspo_megatron.rollout.torchvision_operators import ensure_torchvision_operators
from tiny_families import FAMILIES

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 512
TASKS = (
    "chain_sum", "basic_arithmetic", "products", "gcd", "simple_equations", "letter_counting", "number_sorting",
    "fraction_simplification", "spell_backward", "word_sorting",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(family: str, out: str | Path, seed: int = 1, overrides: Mapping[str, Any] | None = None) -> Path:
    """Write config.json, model.safetensors (fp32), generation_config.json and the tokenizer's files into `out`.

    The tokenizer does not depend on the seed. Raises ConfigError for an unknown family, key or value.
    """
    if family not in FAMILIES:
        raise ConfigError(f"--family {family!r} is not known; choose one of {', '.join(sorted(FAMILIES))}")
    out = Path(out)
    tokenizer = make_tokenizer()
    config = make_config(family, dict(overrides or {}), tokenizer)
    ensure_torchvision_operators()
    model_class = getattr(transformers, FAMILIES[family].model_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float()
        kept = model.state_dict()
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                # norms are made as ones and biases as zeros: two of them that got swapped would not be noticed
                if name in kept and (tensor.dim() == 1 or name.endswith("bias")):
                    tensor.add_(0.1 * torch.randn_like(tensor))
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    tokenizer.model_max_length = config.max_position_embeddings
    transformers.utils.logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod((out / "config.json").stat().st_mode)
    tokenizer.save_pretrained(out)
    _publish_spelling(out / "config.json", FAMILIES[family].spelling, FAMILIES[family].published)
    for layer in range(getattr(config, "num_nextn_predict_layers", 0)):
        _add_prediction_layer(out / "model.safetensors", config.num_hidden_layers, layer, seed)
    return out


def _add_prediction_layer(path: Path, num_layers: int, layer: int, seed: int) -> None:
    """A random multi-token-prediction layer by the published names, which transformers' models don't have."""
    tensors, source, target = load_file(path), f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers + layer}."
    generator = torch.Generator().manual_seed(seed + layer + 1)
    hidden, names = tensors["model.norm.weight"].numel(), [name for name in tensors if name.startswith(source)]
    added = {target + name.removeprefix(source): tensors[name].shape for name in names}
    added |= {f"{target}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    added[f"{target}eh_proj.weight"] = (hidden, 2 * hidden)
    tensors |= {name: torch.randn(shape, generator=generator) / hidden**0.5 for name, shape in added.items()}
    tensors[f"{target}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{target}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})


def make_config(family: str, overrides: dict[str, Any], tokenizer) -> transformers.PretrainedConfig:
    """The family's configuration: tiny sizes, then `overrides`. Raises ConfigError naming the key of --set."""
    class_name = FAMILIES[family].config_class
    config_class = getattr(transformers, class_name)
    settings = dict(FAMILIES[family].sizes)
    settings["vocab_size"] = len(tokenizer)
    allowed = sorted({field.name for field in dataclasses.fields(config_class)} | set(settings))
    for key in overrides:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(allowed)}"
            raise ConfigError(f"--set {key}={overrides[key]}: {class_name} has no such key; {hint}")
    settings.update(overrides)
    hidden_size = settings["hidden_size"]
    if not isinstance(hidden_size, int) or hidden_size < 1:
        raise ConfigError(f"--set hidden_size={hidden_size}: give a positive integer")
    # logits of standard deviation about 1: neither a uniform policy nor a deterministic one
    settings.setdefault("initializer_range", hidden_size**-0.5)
    theta = settings.pop("rope_theta")
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": theta} | settings.get("rope_parameters", {})
    settings.setdefault("pad_token_id", tokenizer.pad_token_id)
    settings.setdefault("eos_token_id", tokenizer.eos_token_id)
    if not isinstance(settings["vocab_size"], int) or settings["vocab_size"] < len(tokenizer):
        raise ConfigError(f"--set vocab_size={settings['vocab_size']}: the tokenizer needs at least {len(tokenizer)}")
    try:
        return config_class(**settings)
    except Exception as error:
        # transformers' validators raise classes of several libraries; the message names the field
        raise ConfigError(f"--set: {class_name} refuses the settings: {error}") from error


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 512 entries that splits numbers into digits, with a ChatML template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(training_texts(), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def training_texts(problems_per_task: int = 100) -> Iterator[str]:
    """Questions and answers of a few reasoning-gym tasks, always the same ones."""
    import reasoning_gym

    for task in TASKS:
        for problem in reasoning_gym.create_dataset(task, size=problems_per_task, seed=1):
            yield f"user\n{problem['question']}\nassistant\n{problem['answer']}"


def _publish_spelling(path: Path, spelling: Mapping[str, str], published: Mapping[str, Any]) -> None:
    """Rename what transformers 5 calls otherwise than the published checkpoints (which it reads as well)."""
    config = json.loads(path.read_text())
    config = {spelling.get(name, name): value for name, value in config.items()}
    rope = config.pop("rope_parameters", None) or {}
    for name in {"rope_theta", "partial_rotary_factor"} & rope.keys():
        config[name] = rope.pop(name)
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    config = {name: value for name, value in (config | published).items() if value is not None or name not in published}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def parse_settings(items: list[str]) -> dict[str, Any]:
    """`key=value` items to a dict; values are read as JSON, else as text. Raises ConfigError without a `=`."""
    settings = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator:
            raise ConfigError(f"--set {item!r} is not key=value")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", required=True, help=", ".join(sorted(FAMILIES)))
    parser.add_argument("--out", required=True, help="directory to write; made when missing")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="key=value", dest="settings")
    options = parser.parse_args(arguments)
    try:
        out = make_tiny_model(options.family, options.out, options.seed, parse_settings(options.settings))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
