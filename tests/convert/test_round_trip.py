"""There and back: every tensor of every family bit for bit, by one process and by two, and from a run's checkpoint."""

import json
import re
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo_megatron import convert_to_megatron
from gspo_megatron.config import ConfigError
from gspo_megatron.weights.hf_files import HFReader
from make_tiny_model import FAMILIES as TINY
from make_tiny_model import make_tiny_model
from tests.convert.conversions import has_experts, hashes, leftovers, to_hf, to_megatron, to_megatron_late, tool
from tests.convert.megatron_loads import save_policies
from tests.ranks import run_ranks


def test_every_family_comes_back_bit_for_bit(conversions, tmp_path):
    assert len(conversions) > 20
    for number, (hf, megatron) in enumerate(conversions):
        said = to_hf(Path(megatron), tmp_path / str(number), shard_bytes=200_000, verify=True)
        found, source = hashes(tmp_path / str(number)), hashes(hf)
        assert found == source, (megatron, said)
        assert f"{len(source)} tensors verified" in said


def test_transformers_loads_what_came_back(conversions, tmp_path):
    hf, megatron = next(case for case in conversions if "qwen3_moe" in case[1])
    to_hf(Path(megatron), tmp_path / "back", shard_bytes=200_000)
    ids = torch.arange(12)[None]
    logits = [AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32)(ids).logits for d in (hf, tmp_path / "back")]
    assert torch.equal(*logits)
    tokenizers = [AutoTokenizer.from_pretrained(directory) for directory in (hf, tmp_path / "back")]
    chat = [{"role": "user", "content": "1 + 2"}]
    assert len({str(each.apply_chat_template(chat, tokenize=False)) for each in tokenizers}) == 1
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (Path(hf) / name).read_bytes()


@pytest.mark.slow
def test_under_torchrun_ranks_share_the_files(tmp_path):
    hf = make_tiny_model("qwen3_moe", tmp_path / "hf", overrides={"num_hidden_layers": 4})
    there = tool(
        "convert_hf_to_megatron", "--hf", hf, "--megatron", tmp_path / "mg", "--pp", 2, "--verify", num_ranks=2
    )
    assert there.returncode == 0, there.stderr
    assert "tensors verified" in there.stdout
    back = ("--megatron", tmp_path / "mg", "--hf", tmp_path / "back", "--shard-gb", 2e-4, "--verify")
    again = tool("convert_megatron_to_hf", *back, num_ranks=2)
    assert again.returncode == 0, again.stderr
    assert hashes(tmp_path / "back") == hashes(hf)
    assert leftovers(tmp_path, "hf", "mg", "back") == []


def test_a_rank_that_is_late_is_waited_for(tmp_path, tiny_qwen3_moe):
    options = convert_to_megatron.Options(tiny_qwen3_moe, tmp_path / "mg", pipeline=2, verify=True)
    run_ranks(to_megatron_late, 2, options, 2.0)
    to_hf(tmp_path / "mg", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(tiny_qwen3_moe)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_s_checkpoint_becomes_a_hugging_face_one(tmp_path, dtype):
    hf = make_tiny_model("qwen3_moe", tmp_path / "hf", overrides={"vocab_size": 513})
    layout = {"tensor": 2, "pipeline": 2, "expert": 2}
    (policy,) = run_ranks(save_policies, 4, [(str(hf), str(tmp_path / "step_3"))], layout, dtype)[0]
    (tmp_path / "step_3" / "run.json").write_text(json.dumps({"config": {"model": {"hf": str(hf)}}}))
    to_hf(tmp_path / "step_3", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == policy.keys()
    kept = [name for name, tensor in found.items() if tensor.dtype != getattr(torch, DTYPES[dtype])]
    assert kept == [] and all((found[name].float().numpy() == value).all() for name, value in policy.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == DTYPES[dtype]


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_runs_checkpoints_of_all_families_become_hugging_face_ones(tmp_path, kind):
    """In bf16, so that what a family keeps in fp32 has to stay so."""
    models = [make_tiny_model(family, tmp_path / family, overrides={"vocab_size": 513}) for family in TINY]
    cases = [(str(hf), f"{hf}_step") for hf in models if has_experts(hf) == (kind == "experts")]
    assert len(cases) >= 3
    layout = {"tensor": 2, "pipeline": 2} | ({"expert": 2} if kind == "experts" else {})
    policies = run_ranks(save_policies, 4, cases, layout, "bf16")[0]
    for (hf, directory), policy in zip(cases, policies, strict=True):
        (Path(directory) / "run.json").write_text(json.dumps({"config": {"model": {"hf": hf}}}))
        to_hf(directory, f"{hf}_back", verify=True)
        found, source = load_file(Path(f"{hf}_back") / "model.safetensors"), HFReader(hf)
        assert found.keys() == policy.keys() == source.names, hf
        for name, value in policy.items():
            assert found[name].shape == source.shape(name)
            assert (found[name].float().numpy() == value).all(), (hf, name)
        kept = {name.rpartition(".")[2] for name, tensor in found.items() if tensor.dtype != torch.bfloat16}
        assert kept <= {"e_score_correction_bias"}, (hf, kept)


def test_a_reference_of_another_model_is_not_taken_without_a_word(tmp_path, conversions):
    """Of the same names and shapes: a given one is taken and named, that of a run must be what the run trained."""
    hf, megatron = next(case for case in conversions if case[1].endswith("qwen3_moe-one"))
    other = Path(shutil.copytree(hf, tmp_path / "other"))
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(values | {"rms_norm_eps": 0.5}))
    assert "note" not in to_hf(megatron, tmp_path / "a", reference=Path(hf))
    said = to_hf(megatron, tmp_path / "b", reference=other)
    assert f"note: config.json is as --hf-reference {other} has rms_norm_eps = 0.5 where the checkpoint's model" in said
    step = Path(shutil.copytree(megatron, tmp_path / "step_3"))
    shutil.rmtree(step / "hf")
    (step / "run.json").write_text(json.dumps({"config": {"model": {"hf": str(other)}}, "model": values}))
    with pytest.raises(ConfigError, match=f"--hf-reference: the run's model.hf {other} has rms_norm_eps = 0.5 where"):
        to_hf(step, tmp_path / "c")
    assert hashes(tmp_path / "a") == hashes(hf) and not (tmp_path / "c").exists()


DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def test_a_cast_leaves_what_the_model_keeps_in_fp32(tmp_path):
    """GLM's selection bias is fp32 in its bf16 checkpoints; so is here one norm of layer 1, to which layer 0's is
    raised."""
    hf = make_tiny_model("glm4_moe", tmp_path / "hf")
    source = load_file(hf / "model.safetensors")
    bias = [name for name in source if name.endswith("e_score_correction_bias")]
    assert bias
    save_file({n: t if n in bias else t.bfloat16() for n, t in source.items()}, hf / "model.safetensors")
    to_megatron([convert_to_megatron.Options(hf, tmp_path / "mg", verify=True)])
    to_hf(tmp_path / "mg", tmp_path / "back", verify=True)
    assert hashes(tmp_path / "back") == hashes(hf)
    to_hf(tmp_path / "mg", tmp_path / "half", dtype="fp16", verify=True)
    half = load_file(tmp_path / "half" / "model.safetensors")
    for name, tensor in half.items():
        assert tensor.dtype == (torch.float32 if name in bias else torch.float16)
        assert torch.equal(tensor, source[name].bfloat16().half() if name not in bias else source[name])


def test_prediction_layers_come_along(tmp_path):
    """Of the published checkpoints' form: layers behind the last, with copies of the embedding and the output layer."""
    hf = make_tiny_model("glm4_moe", tmp_path / "hf")
    tensors, config = load_file(hf / "model.safetensors"), json.loads((hf / "config.json").read_text())
    last = f"model.layers.{config['num_hidden_layers']}"
    copies = {".embed_tokens.weight": "model.embed_tokens.weight", ".shared_head.head.weight": "lm_head.weight"}
    tensors |= {f"{last}{ending}": tensors[source].clone() for ending, source in copies.items()}
    tensors |= {f"{last}.eh_proj.weight": torch.randn(64, 128), f"{last}.enorm.weight": torch.randn(64)}
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    (hf / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    to_megatron([convert_to_megatron.Options(hf, tmp_path / "mg")])
    to_hf(tmp_path / "mg", tmp_path / "back", shard_bytes=200_000, verify=True)
    assert hashes(tmp_path / "back") == hashes(hf)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.slow
def test_a_dry_run_says_what_would_be_written_and_writes_nothing(tmp_path, tiny_qwen3_moe):
    arguments = ("--hf", tiny_qwen3_moe, "--megatron", tmp_path / "mg", "--pp", 2, "--ep", 2)
    planned = tool("convert_hf_to_megatron", *arguments, "--dry-run")
    assert planned.returncode == 0 and leftovers(tmp_path) == []
    assert tool("convert_hf_to_megatron", *arguments).returncode == 0
    source = hashes(tiny_qwen3_moe)
    num_bytes = sum(t.nbytes for t in load_file(tiny_qwen3_moe / "model.safetensors").values())
    assert f"tensors: {len(source)} " in planned.stdout and f"bytes:   {num_bytes} " in planned.stdout
    files = len([file for file in (tmp_path / "mg").glob("__[0-9]*.distcp")])
    assert re.search(rf"files: +{files},", planned.stdout) and "layers:  2" in planned.stdout
    back = tool("convert_megatron_to_hf", "--megatron", tmp_path / "mg", "--hf", tmp_path / "hf", "--dry-run")
    assert back.returncode == 0 and f"bytes:   {num_bytes} " in back.stdout and leftovers(tmp_path, "mg") == []


def test_sglang_loads_what_came_back(fresh_sglang_server, tmp_path):
    url, _ = fresh_sglang_server
    hf = make_tiny_model("qwen3_moe", tmp_path / "hf", seed=2)
    to_megatron([convert_to_megatron.Options(hf, tmp_path / "mg", tensor=2)])
    to_hf(tmp_path / "mg", tmp_path / "back", shard_bytes=200_000)
    sums = []
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        for number, directory in enumerate((None, tmp_path / "back", hf)):
            if directory is not None:
                body = {"model_path": str(directory), "weight_version": str(number)}
                answer = client.post("/update_weights_from_disk", json=body)
                assert answer.status_code == 200, answer.text
            sums.append(json.dumps(client.post("/weights_checker", json={"action": "checksum"}).json(), sort_keys=True))
    assert "checksum" in sums[0] and sums[0] != sums[1] == sums[2]
