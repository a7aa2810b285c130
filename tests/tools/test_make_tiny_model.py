"""The tiny checkpoint: reproducible, loadable, with the names that published checkpoints have."""

import filecmp
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from gspo_megatron.config import ConfigError
from make_tiny_model import main, make_tiny_model, parse_settings

TOOL = Path(__file__).parents[2] / "tools" / "make_tiny_model.py"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_same_seed_gives_bit_identical_files_in_another_process(tmp_path, family):
    here = make_tiny_model(family, tmp_path / "here", seed=3)
    command = [sys.executable, str(TOOL), "--family", family, "--out", str(tmp_path / "there"), "--seed", "3"]
    subprocess.run(command, check=True, timeout=120, cwd=TOOL.parents[1])
    names = sorted(path.name for path in here.iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    assert "tokenizer_config.json" in names
    assert filecmp.cmpfiles(here, tmp_path / "there", names, shallow=False) == (names, [], [])


def test_another_seed_changes_every_tensor_and_not_the_tokenizer(tmp_path):
    first, second = (make_tiny_model("qwen3_moe", tmp_path / str(seed), seed) for seed in (1, 2))
    a, b = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert a.keys() == b.keys() and not [name for name in a if torch.equal(a[name], b[name])]
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()


def test_moe_names_are_per_expert_and_the_model_loads(tiny_qwen3_moe):
    tensors = load_file(tiny_qwen3_moe / "model.safetensors")
    assert tensors["model.layers.0.mlp.experts.3.gate_proj.weight"].shape == (32, 64)
    assert tensors["lm_head.weight"].shape == (512, 64)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert not [name for name in tensors if "gate_up_proj" in name]
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    logits = model(torch.arange(40)[None]).logits
    assert 0.3 < logits.std() < 3
    config = json.loads((tiny_qwen3_moe / "config.json").read_text())
    assert config["num_experts"] == 8 and config["rope_theta"] == 10000.0 and config["eos_token_id"] == 2


def test_tokenizer_is_loaded_as_written(tiny_qwen3_moe):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_qwen3_moe)
    text = "Calculate 5 - 30 * 12.\n-4 é <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert ids == Tokenizer.from_file(str(tiny_qwen3_moe / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(ids) == text and ids[-1] == tokenizer.eos_token_id
    assert len(tokenizer) == 512 and tokenizer.pad_token == "<|endoftext|>"
    assert not [token for token in tokenizer.get_vocab() if sum(letter.isdigit() for letter in token) > 1]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "2"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"


def test_set_changes_the_architecture(tmp_path):
    settings = parse_settings(["num_experts=4", "mlp_only_layers=[0]", "tie_word_embeddings=true", "rope_theta=5e4"])
    out = make_tiny_model("qwen3_moe", tmp_path, overrides=settings)
    names = load_file(out / "model.safetensors").keys()
    assert "model.layers.0.mlp.gate_proj.weight" in names and "lm_head.weight" not in names
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    assert "model.layers.1.mlp.experts.4.up_proj.weight" not in names
    assert json.loads((out / "config.json").read_text())["rope_theta"] == 50000.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--family", "qwen9"], "qwen3, qwen3_moe"),
        (["--family", "qwen3", "--set", "hiden_size=3"], "did you mean hidden_size"),
        (["--family", "qwen3", "--set", "hidden_size=wide"], "positive integer"),
        (["--family", "qwen3", "--set", "num_attention_heads=many"], "num_attention_heads"),
        (["--family", "qwen3", "--set", "vocab_size=100"], "at least 512"),
        (["--family", "qwen3", "--set", "hidden_size"], "not key=value"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_why(tmp_path, capsys, arguments, message):
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_unknown_family_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="qwen9"):
        make_tiny_model("qwen9", tmp_path)
