"""Each rule of the preflight: what it refuses, and that the message names key, value and remedy."""

import json
from pathlib import Path

import pytest

from gspo_megatron.checks import GUARDS, RANGES, check_config
from gspo_megatron.config import Config
from gspo_megatron.config_loader import load_config
from tests.config.fakes import QWEN3_8B, TINY, write_checkpoint, write_config


@pytest.fixture
def model(tmp_path):
    return write_checkpoint(tmp_path / "model", TINY)


@pytest.fixture
def faults_of(tmp_path, model):
    """A function: overrides, world size -> faults of the good configuration with these overrides."""
    path = write_config(tmp_path, model)

    def faults(*overrides: str, world_size: int | None = None) -> list[str]:
        found = check_config(load_config(path, overrides), world_size)
        assert all("\n" not in fault for fault in found)
        return found

    return faults


def expect(faults: list[str], *parts: str) -> None:
    """Exactly one fault, holding all `parts`."""
    assert len(faults) == 1, faults
    for part in parts:
        assert part in faults[0], faults[0]


def test_the_good_configuration_passes(faults_of):
    assert faults_of() == []
    assert faults_of("parallel={tensor: 2, pipeline: 2, expert: 4}", world_size=8) == []


def test_required_keys_are_all_named_at_once():
    keys = {fault.split(":")[0] for fault in check_config(Config())}
    assert {"model.hf", "run.dir", "data.train", "reward.name", "rollout"} <= keys


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["parallel.tensor=3"], ["parallel.tensor: 3", "4 heads", "use 1, 2 or 4"]),
        (["parallel.pipeline=3"], ["parallel.pipeline: 3", "4 layers", "use 1, 2 or 4"]),
        (["parallel.expert=3"], ["parallel.expert: 3", "8 experts", "use 1, 2, 4 or 8"]),
        (["train.updates_per_rollout=3"], ["train.updates_per_rollout: 3", "(32)", "use 1, 2, 4, 8, 16 or 32"]),
        (["train.tokens_per_micro_batch=3071"], ["train.tokens_per_micro_batch: 3071", "3072", "use at least 3072"]),
        (["rollout.max_response_tokens=40000", "train.tokens_per_micro_batch=50000"], ["40960 positions", "lower one"]),
        (["rollout.samples_per_prompt=1"], ["rollout.samples_per_prompt: 1", "at least 2"]),
        (["rollout.temperature=0"], ["rollout.temperature: 0.0", "above 0"]),
        (["train.timeout_s=600"], ["train.timeout_s: 600.0", "rollout.request_timeout_s (600.0)", "raise it"]),
        (["rollout.stop_token_ids=[512]"], ["rollout.stop_token_ids: 512", "from 0 to 511"]),
        (["rollout.servers=[localhost:30000]"], ["'localhost:30000'", "http://host:port"]),
        (["rollout.servers=[http://h:99999]"], ["'http://h:99999'", "http://host:port"]),
        (["weights.transport=tensor", "rollout.servers=[http://h:1]"], ["weights.transport: tensor", "h:1 is not"]),
        (["weights.appliers=2"], ["weights.appliers", "weights.transport=delta only"]),
        (["weights.engine_dir=/w"], ["weights.engine_dir", "weights.transport=delta only"]),
        (["weights.transport=delta", "weights.appliers=1"], ["weights.engine_dir: required", "--local"]),
        (["rollout.servers=[http://h:1,http://h:1]"], ["names a server twice"]),
        (["rollout.launch.port=0"], ["rollout.servers and rollout.launch", "exactly one"]),
        (["rollout.servers=[]"], ["none of them is given", "exactly one"]),
        (["rollout.servers=[]", "rollout.launch={port: 80}"], ["rollout.launch.port: 80", "1024 to 65535"]),
        (["rollout.servers=[]", "rollout.launch={port: 65535, count: 2}"], ["rollout.launch.port: 65535", "2 servers"]),
        (["rollout.servers=[]", "rollout.launch.args={model_path: x}"], ["'model_path'", "model.hf"]),
        (["rollout.servers=[]", "rollout.replay=/nonexistent"], ["rollout.replay: '/nonexistent'", "step_*.jsonl"]),
        (["data.train=nowhere.jsonl"], ["data.train: 'nowhere.jsonl'", "does not exist"]),
        (["data.train=train.parquet"], ["data.train: 'train.parquet'", ".jsonl"]),
        (["data.train='reasoning_gym:'"], ["reasoning_gym:TASK"]),
        (["data.train="], ["data.train: required"]),
        (["reward.name="], ["reward.name: required"]),
        (["reward.name='a b'"], ["reward.name: 'a b'", "package.module:function"]),
        (["run.dir="], ["run.dir: required"]),
        (["optimizer.lr=0"], ["optimizer.lr: 0.0", "above 0"]),
        (["optimizer.min_lr=1"], ["optimizer.min_lr: 1.0", "above optimizer.lr", "lower it"]),
        (["loss.clip_low=0"], ["loss.clip_low: 0.0", "above 0"]),
        (["loss.name=grpo", "loss.clip_low=1.5"], ["loss.clip_low: 1.5", "below 1"]),
        (["loss.clip_high=0.2"], ["loss.clip_high: 0.2", "at most 0.05", "i_know_what_i_do=[wide_clip]"]),
        (["loss.name=gspo_token", "loss.clip_low=0.2"], ["loss.clip_low: 0.2", "gspo_token", "wide_clip"]),
        (["loss.i_know_what_i_do=[wideclip]"], ["'wideclip'", "allowed: wide_clip"]),
        (["loss.name=luspo", "loss.clip_high=0.2"], ["loss.clip_high: 0.2", "luspo", "wide_clip"]),
        (["loss.aggregation=token-mean"], ["loss.aggregation: token-mean", "makes the loss GSPO", "[token_mean]"]),
        (["loss.name=gspo_token", "loss.aggregation=token-mean"], ["gspo_token", "loss.name=grpo", "[token_mean]"]),
        (["regularizer.entropy=-0.01"], ["regularizer.entropy: -0.01", "at least 0"]),
        (["loss.log_ratio=sum"], ["loss.log_ratio: sum", "spreads with its length", "use mean", "[summed_ratio]"]),
        (["rollout.top_p=0.9"], ["rollout.top_p: 0.9", "does not model", "use 1.0", "[engine_filter]"]),
        (["rollout.top_k=50"], ["rollout.top_k: 50", "does not model", "use 0", "[engine_filter]"]),
        (
            ["regularizer={kl: 0.01, kl_estimator: k1}"],
            ["regularizer.kl_estimator: k1", "use k2 or k3", "[k1_in_loss]"],
        ),
        (
            ["loss.name=minirl", "correction.token=truncate"],
            ["correction.token: truncate", "corrected twice", "use none", "[double_correction]"],
        ),
        (
            ["loss={name: vespo, rollout_correction: true}", "correction.sequence=mask"],
            ["correction.sequence: mask", "vespo", "[double_correction]"],
        ),
        (
            ["loss.old_log_probs=rollout", "correction.token=mask"],
            ["correction.token: mask", "does nothing", "loss.old_log_probs=recompute", "[idle_correction]"],
        ),
        (["loss={name: sapo, tau_neg: 0}"], ["loss.tau_neg: 0.0", "above 0"]),
        (["loss={name: pspo, alpha: 1}"], ["loss.alpha: 1.0", "below 1"]),
        (["loss={name: cispo, is_low: 6}"], ["loss.is_low: 6.0", "above loss.is_high (5.0)", "lower it"]),
        (["correction.sequence_low=2"], ["correction.sequence_low: 2.0", "below correction.sequence_high (1.002)"]),
        (["loss.name=real"], ["train.tokens_per_micro_batch: 4096", "loss.name=real", "24576", "raise it"]),
        (["reward.soft_overlong={cache_tokens: 2000}"], ["cache_tokens: 2000", "(1024)", "lower it"]),
        (["advantage.per_token='json:dumps'"], ["advantage.per_token:", "loss.name=gspo", "gspo_token"]),
        (["loss.name=gspo_token", "advantage.per_token='json:x'"], ["advantage.per_token:", "no function 'x'"]),
        (["parallel.virtual_pipeline=2"], ["parallel.virtual_pipeline: 2", "parallel.pipeline to at least 2"]),
        (["parallel={pipeline: 2, virtual_pipeline: 4}"], ["parallel.virtual_pipeline: 4", "4 layers", "use 1 or 2"]),
        (["parallel.expert_tensor=3"], ["parallel.expert_tensor: 3", "feed-forward size 32", "1, 2, 4, 8, 16 or 32"]),
        (["parallel={tensor: 2, sequence_parallel: false}"], ["parallel.sequence_parallel: false", "set it to true"]),
        (
            ["parallel.context=5", "train.tokens_per_micro_batch=3072"],
            ["train.tokens_per_micro_batch: 3072", "padded to 3080", "parallel.context 5", "use at least 3080"],
        ),
    ],
)
def test_a_rule_refuses_with_key_value_and_remedy(faults_of, overrides, parts):
    expect(faults_of(*overrides), *parts)


def test_guards_and_choices_that_are_fine(faults_of):
    assert faults_of("loss.clip_high=0.2", "loss.i_know_what_i_do=[wide_clip]") == []
    assert faults_of("loss.name=grpo", "loss.clip_high=0.2") == []
    names = "[token_mean,summed_ratio,engine_filter,k1_in_loss,double_correction,idle_correction]"
    assert faults_of(
        "loss={old_log_probs: rollout, aggregation: token-mean, log_ratio: sum}", "correction.token=mask",
        "rollout={top_p: 0.9, top_k: 5}", "regularizer={kl: 1.0, kl_estimator: k1}", f"loss.i_know_what_i_do={names}",
    ) == []  # fmt: skip
    assert faults_of("loss.name=minirl", "correction.token=mask", f"loss.i_know_what_i_do={names}") == []
    assert faults_of("data.train=reasoning_gym:basic_arithmetic", "reward.name=my.rewards:score") == []
    assert faults_of("parallel.tensor=4") == []  # more ranks than key-value heads


def test_every_guard_has_a_test():
    tested = Path(__file__).read_text()
    assert [name for name in GUARDS if f"[{name}]" not in tested] == []


@pytest.mark.parametrize("path", sorted(RANGES))
def test_every_key_with_a_range_exists_and_refuses_a_negative_value(faults_of, path):
    launch = ["rollout.servers=[]", "rollout.launch={}"] if path.startswith("rollout.launch") else []
    overrides = [*launch, f"{path}=-1"]
    assert any(fault.startswith(f"{path}: -1") for fault in faults_of(*overrides, world_size=4))


def test_world_size(faults_of):
    parallel = "parallel={tensor: 2, pipeline: 2, expert: 4}"
    expect(faults_of(parallel, world_size=12), "world size: 12", "= 4", "= 8", "use 8 or 16 ranks")
    expect(faults_of(parallel, world_size=2), "world size: 2", "use 8 ranks")
    expect(
        faults_of("rollout.prompts_per_step=4", world_size=16), "rollout.prompts_per_step: 4", "8 sequences", "16 data"
    )


def test_a_dense_model_has_no_experts(tmp_path, faults_of):
    dense = write_checkpoint(tmp_path / "dense", QWEN3_8B)
    assert faults_of(f"model.hf={dense}", "parallel.tensor=8", world_size=8) == []
    expect(faults_of(f"model.hf={dense}", "parallel.expert=2"), "parallel.expert: 2", "no experts", "use 1")


def test_model_directory(tmp_path, model, faults_of):
    expect(faults_of("model.hf=/nonexistent"), "model.hf: '/nonexistent'", "not a directory")
    (model / "config.json").unlink()
    expect(faults_of(), "model.hf:", "has no config.json")
    (model / "config.json").write_text("{")
    expect(faults_of(), "config.json cannot be read as JSON")
    (model / "config.json").write_text(json.dumps(TINY | {"architectures": ["GPT2LMHeadModel"]}))
    expect(faults_of(), "GPT2LMHeadModel", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
    (model / "config.json").write_text(json.dumps(TINY | {"hidden_size": None}))
    expect(faults_of(), "hidden_size")
    for key, value in (("attention_bias", True), ("hidden_act", "gelu"), ("rope_scaling", {"rope_type": "longrope"})):
        (model / "config.json").write_text(json.dumps(TINY | {key: value}))
        expect(faults_of(), key, "not supported")
    (model / "config.json").write_text(json.dumps(TINY | {"rope_scaling": {"rope_type": "yarn"}}))
    expect(faults_of(), "rope_scaling of type yarn", "factor")


def test_expert_count_under_its_newer_name(model, faults_of):
    values = {key: value for key, value in TINY.items() if key != "num_experts"} | {"num_local_experts": 8}
    (model / "config.json").write_text(json.dumps(values))
    assert faults_of("parallel.expert=8") == []


def test_tokenizer_files(model, faults_of):
    (model / "tokenizer.json").unlink()
    expect(faults_of(), "model.hf:", "no tokenizer files", "tokenizer.json")


def test_missing_truncated_and_unreadable_shards(model, faults_of):
    first, second = sorted(model.glob("*.safetensors"))
    whole = second.read_bytes()
    second.write_bytes(whole[:-100])
    expect(faults_of(), second.name, "truncated", str(len(whole) - 100), "copy it again")
    second.write_bytes(whole + b"x")
    expect(faults_of(), second.name, "too long")
    second.write_bytes(b"abc")
    expect(faults_of(), second.name, "cut off")
    second.write_bytes(whole[:8] + b"x" * 50)
    expect(faults_of(), second.name, "header")
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    smallest, largest = sorted(header, key=lambda name: header[name]["data_offsets"][1])[:: len(header) - 1]
    header[smallest]["data_offsets"] = header[largest]["data_offsets"]
    text = json.dumps(header).encode()
    second.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    expect(faults_of(), second.name, "tensors that overlap, or gaps")
    second.unlink()
    expect(faults_of(), second.name, "is missing")


def test_the_index_lists_only_what_shards_hold(model, faults_of):
    index = model / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["ghost"] = values["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(values))
    expect(faults_of(), "'ghost'", "1 tensors of the index")
    values["weight_map"] = {"a": "../a.safetensors"}
    index.write_text(json.dumps(values))
    expect(faults_of(), "outside the directory")
    index.write_text("[]")
    expect(faults_of(), index.name, "cannot be read")


def test_a_checkpoint_without_an_index(model, faults_of):
    first, second = sorted(model.glob("*.safetensors"))
    (model / "model.safetensors.index.json").unlink()
    second.unlink()
    first.rename(model / "model.safetensors")
    expect(faults_of(), "tensors are missing", "copy the checkpoint again")
    write_checkpoint(model, TINY, num_shards=1)
    (model / "model.safetensors.index.json").unlink()
    (model / "model-00001-of-00001.safetensors").rename(model / "model.safetensors")
    assert faults_of() == []
    (model / "model.safetensors").unlink()
    expect(faults_of(), "neither model.safetensors nor model.safetensors.index.json")
    (model / "pytorch_model.bin").write_bytes(b"x")
    expect(faults_of(), "pickles", "pytorch_model.bin", "convert them to safetensors")


def test_data_files(tmp_path, faults_of):
    data = tmp_path / "train.jsonl"
    data.write_text("\n\n")
    expect(faults_of(), "data.train:", "is empty")
    data.write_text("prompt\n")
    expect(faults_of(), "data.train:", "not JSON")
    data.write_text('{"question": 1}\n')
    expect(faults_of(), "data.train:", "`prompt`")


def test_a_directory_of_an_earlier_run(tmp_path, faults_of):
    (tmp_path / "run").mkdir()
    assert faults_of() == []
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    expect(faults_of(), "run.dir:", "holds the results of a run (metrics.jsonl)", "run.overwrite=true")
    assert faults_of("run.overwrite=true") == []


def test_replay_needs_neither_data_nor_reward(tmp_path, faults_of):
    (tmp_path / "step_1.jsonl").write_text("{}\n")
    assert faults_of("rollout.servers=[]", f"rollout.replay={tmp_path}", "data.train=", "reward.name=") == []


@pytest.mark.parametrize(
    ("pipeline", "transformer", "parts"),
    [
        (3, "{num_layers_in_first_pipeline_stage: 1, num_layers_in_last_pipeline_stage: 1}", None),
        (2, "{num_layers_in_last_pipeline_stage: 1}", None),
        (3, "{account_for_embedding_in_pipeline_split: true, account_for_loss_in_pipeline_split: true}", None),
        (2, "{pipeline_model_parallel_layout: 'Et|t*3L'}", None),
        (3, "{num_layers_in_first_pipeline_stage: 1}", ["num_layers_in_first_pipeline_stage", "3 are left", "2 other"]),
        (3, "{num_layers_in_first_pipeline_stage: 4}", ["0 are left for 2 other stages"]),
        (3, "{account_for_loss_in_pipeline_split: true}", ["parallel.pipeline: 3", "1 more", "use 1 or 5"]),
        (
            2,
            "{num_layers_in_first_pipeline_stage: 1, account_for_loss_in_pipeline_split: true}",
            ["in different ways", "give one"],
        ),
        (2, "{pipeline_model_parallel_layout: 'Ett|t|tL'}", ["has 3 chunks", "is 2"]),
        (2, "{pipeline_model_parallel_layout: 'Ett|tL'}", ["have 4 t between"]),
        (2, "{pipeline_model_parallel_layout: 'Ett|ttm'}", ["may hold E, t, L"]),
        (2, "{microbatch_group_size_per_vp_stage: 1}", ["is below parallel.pipeline (2)", "at least 2"]),
    ],
)
def test_pipelines_that_are_cut_unevenly(faults_of, pipeline, transformer, parts):
    faults = faults_of(f"parallel.pipeline={pipeline}", f"megatron.transformer={transformer}")
    assert faults == [] if parts is None else len(faults) == 1 and all(part in faults[0] for part in parts), faults


def test_layouts_with_all_axes_pass(faults_of):
    axes = "parallel={tensor: 2, pipeline: 2, virtual_pipeline: 2, context: 2, expert: 2, expert_tensor: 2}"
    assert faults_of(axes, world_size=8) == []
