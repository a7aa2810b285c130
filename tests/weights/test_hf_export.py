"""A policy written by all ranks of a layout at once is the one that one rank writes, and transformers loads it."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from gspo_megatron.weights.hf_files import read_hf_config
from make_tiny_model import make_tiny_model
from tests.ranks import run_ranks
from tests.weights.hf_directories import all_tensors, same
from tests.weights.hf_export_runs import load_and_write

LAYOUT = {"tensor": 2, "pipeline": 2, "expert": 2}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_all_ranks_write_what_one_rank_writes(tmp_path, tied, dtype):
    settings = {"vocab_size": 513, "num_hidden_layers": 4, "tie_word_embeddings": tied}
    model = make_tiny_model("qwen3_moe", tmp_path / "model", 3, settings)
    one, four = tmp_path / "one", tmp_path / "four"
    run_ranks(load_and_write, 1, {}, str(model), str(one), dtype)
    by_rank = run_ranks(load_and_write, 4, LAYOUT, str(model), str(four), dtype)
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    expected = {name: -tensor.to(torch_dtype) for name, tensor in load_file(model / "model.safetensors").items()}
    assert same(all_tensors(one), expected) and same(all_tensors(four), expected)
    assert all(by_rank) and sorted(name for names in by_rank for name in names) == sorted(expected)
    assert read_hf_config(four) == read_hf_config(one)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(four, dtype="auto")
    found = {name: tensor for name, tensor in loaded.state_dict().items() if name in expected}
    assert {tensor.dtype for tensor in found.values()} == {torch_dtype}
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.3.self_attn.q_proj.weight"):
        assert torch.equal(found[name], expected[name]), name
    assert transformers.AutoTokenizer.from_pretrained(four).vocab_size
