"""Every mistake in a file is found, all at once, with path, value, class and remedy; a config survives a round trip."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_megatron.config import Config, ConfigError, GRPOConfig, GSPOConfig, LaunchConfig
from gspo_megatron.config_loader import dump_config, load_config, read_config
from gspo_megatron.passthrough import CLASSES, REFUSED, _installed_core, class_fields

ROOT = Path(__file__).parents[2]


def load(tmp_path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def faults(tmp_path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return caught.value.faults


def one_fault(tmp_path, text: str, *overrides: str) -> str:
    found = faults(tmp_path, text, *overrides)
    assert len(found) == 1, found
    assert "\n" not in found[0]
    return found[0]


def test_an_empty_file_gives_the_defaults(tmp_path):
    assert load(tmp_path, "") == Config()
    assert load(tmp_path, "train:\nrun: {}\n") == Config()


def test_types_and_nested_sections(tmp_path):
    config = load(
        tmp_path,
        """
        optimizer: {lr: 3e-4, clip_grad: 1}
        rollout: {servers: ["http://a:1", http://b:2], stop_token_ids: [1, 2],
          launch: {args: {mem-fraction-static: 0.8}}}
        loss: {name: grpo, clip_low: 1e-1}
        metrics: {writers: [tensorboard]}
        """,
    )
    assert config.optimizer.lr == 3e-4
    assert type(config.optimizer.clip_grad) is float
    assert config.rollout.servers == ("http://a:1", "http://b:2")
    assert config.rollout.stop_token_ids == (1, 2)
    assert config.rollout.launch == LaunchConfig(args={"mem-fraction-static": 0.8})
    assert config.loss == GRPOConfig(clip_low=0.1)
    assert config.metrics.writers == ("tensorboard",)


@pytest.mark.parametrize("text", ["3e-4", "3E-4", "3.0e-4", ".0003", "0.0003", "3e-04", "+3e-4"])
def test_numbers_as_people_write_them(tmp_path, text):
    assert load(tmp_path, f"optimizer: {{lr: {text}}}").optimizer.lr == 3e-4


def test_overrides(tmp_path):
    config = load(
        tmp_path,
        "train: {steps: 5, dtype: fp32}\nrollout: {launch: {count: 3}, servers: [http://a:1]}\n",
        "train.steps=7",
        "parallel={tensor: 2, expert: 4}",
        "rollout.launch={port: 4000}",
        "rollout.servers=[http://h:1,http://h2:2]",
        "run.dir=a=b",
        "data.train=",
        "loss.clip_low=1e-4",
        "train.steps=8",
    )
    assert config.train.steps == 8 and config.train.dtype == "fp32"
    assert (config.parallel.tensor, config.parallel.expert) == (2, 4)
    assert config.rollout.launch == LaunchConfig(count=3, port=4000)
    assert config.rollout.servers == ("http://h:1", "http://h2:2")
    assert config.run.dir == "a=b" and config.data.train == ""
    assert config.loss == GSPOConfig(clip_low=1e-4)


def test_an_override_creates_and_removes_the_launch_section(tmp_path):
    assert load(tmp_path, "", "rollout.launch.port=0").rollout.launch == LaunchConfig()
    assert load(tmp_path, "rollout: {launch: {count: 2}}", "rollout.launch=null").rollout.launch is None


@pytest.mark.parametrize("override", ["train.steps", "=3", "train..steps=3", "train.steps={"])
def test_a_malformed_override_is_named(tmp_path, override):
    assert one_fault(tmp_path, "", override).startswith(f"override {override!r}: ")


def test_an_override_below_a_plain_value_is_refused(tmp_path):
    assert one_fault(tmp_path, "run: {dir: x}", "run.dir.y=1").startswith("run.dir: ")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train: {step: 3}", ["train.step:", "TrainConfig", "given 3", "did you mean steps?", "updates_per_rollout"]),
        ("train: {temperature: 0.7}", ["train.temperature:", "it belongs at rollout.temperature"]),
        ("lr: 1e-5", ["lr:", "it belongs at optimizer.lr"]),
        ("rollouts: {}", ["rollouts:", "did you mean rollout?"]),
        ("train: {steps: ten}", ["train.steps:", "'ten'", "must be an integer", "TrainConfig.steps"]),
        ("train: {steps: 1e3}", ["train.steps:", "1000.0", "write 1000"]),
        ("train: {steps: true}", ["train.steps:", "True", "must be an integer"]),
        ("optimizer: {lr: true}", ["optimizer.lr:", "must be a number"]),
        ("optimizer: {lr: .nan}", ["optimizer.lr:", "not a finite number"]),
        ("run: {dir: 5}", ["run.dir:", "must be text", 'quote it: "5"']),
        ("rollout: {save: 1}", ["rollout.save:", "must be true or false"]),
        (
            "train: {dtype: bf61}",
            ["train.dtype:", "'bf61'", "did you mean bf16?", "allowed: fp32, bf16", "TrainConfig"],
        ),
        ("train: 3", ["train:", "TrainConfig", "section"]),
        ("rollout: {servers: http://a:1}", ["rollout.servers:", "must be a list: [http://a:1]"]),
        ("rollout: {stop_token_ids: [1, x]}", ["rollout.stop_token_ids:", "item 2", "must be an integer"]),
        ("metrics: {writers: [wandbb]}", ["metrics.writers:", "did you mean wandb?"]),
        ("rollout: {launch: {prot: 1}}", ["rollout.launch.prot:", "LaunchConfig", "did you mean port?"]),
        ("data: {options: 3}", ["data.options:", "must be a mapping"]),
        ("loss: {name: gsop}", ["loss.name:", "did you mean gspo?", "allowed: gspo, gspo_token, luspo"]),
        ("loss: {name: 'my.module:loss'}", ["loss.name:", "can't be imported", "PYTHONPATH"]),
        ("loss: {name: 'json:loss'}", ["loss.name:", "has no function 'loss'"]),
        ("loss: {name: 'json:dumps'}", ["loss.name:", "must be annotated", "LossConfig"]),
        ("loss: {name: 'json:'}", ["loss.name:", "must have the form package.module:function"]),
        ("loss: {aggregation: token-meen}", ["loss.aggregation:", "GSPOConfig", "did you mean token-mean?"]),
        ("- a\n- b\n", ["must hold sections"]),
        ("train: {steps: 3", ["not valid YAML", "line 1"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(tmp_path, text, parts):
    fault = one_fault(tmp_path, text)
    for part in parts:
        assert part in fault, fault


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path):
    fault = one_fault(tmp_path, "train:\n  steps: 1\n  dtype: bf16\n  steps: 2\n")
    assert "steps: given twice, on line 2 and on line 4" in fault


def test_all_faults_are_reported_at_once(tmp_path):
    found = faults(tmp_path, "train: {step: 1, dtype: x}\nfoo: 2\ntrain: {timeout_s: no}\n", "optimizer.lr=high")
    assert len(found) == 6, found


def test_a_missing_file_is_a_fault(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(tmp_path / "none.yaml")


def test_read_config_leaves_faulty_values_at_their_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: x, dtype: fp32}")
    config, found = read_config(path)
    assert config.train.steps == Config().train.steps and config.train.dtype == "fp32" and len(found) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["loss.name=grpo", "loss.i_know_what_i_do=[wide_clip]", "rollout.launch.args={a: true, b: [1, x]}"],
        ["run.dir='3e-4'", "model.hf='true'", "data.train=' x: y '", "optimizer.lr=1.234567890123e-17", "run.seed=7"],
        ["data.options={a: {b: [1, 2.5e-7, null]}}", "megatron.transformer={recompute_num_layers: 1}"],
    ],
)
def test_dump_and_load_give_the_same_config(tmp_path, overrides):
    config = load(tmp_path, "", *overrides)
    assert load(tmp_path, dump_config(config)) == config


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("transformer.hidden_size", "64", ["config.json"]),
        ("transformer.tensor_model_parallel_size", "2", ["parallel.tensor"]),
        ("transformer.sequence_parallel", "true", ["parallel.sequence_parallel"]),
        ("transformer.bf16", "true", ["train.dtype"]),
        ("transformer.calculate_per_token_loss", "false", ["the trainer sets it"]),
        ("transformer.batch_p2p_comm", "true", ["the trainer sets it"]),
        ("transformer.attention_dropout", "0.1", ["must be 0"]),
        ("transformer.moe_aux_loss_coeff", "0.01", ["0.01", "only 0 works", "local tokens"]),
        ("transformer.moe_aux_loss_coeff", "[0.0, 0.1]", ["only 0 works"]),
        ("transformer.moe_z_loss_coeff", "0.001", ["only 0 works"]),
        ("transformer.recompute_granularit", "full", ["TransformerConfig", "did you mean recompute_granularity?"]),
        ("transformer.recompute_granularity", "fulll", ["does not fit"]),
        ("transformer.recompute_num_layers", "one", ["does not fit", "int"]),
        ("transformer.init_method", "x", ["Python object"]),
        ("optimizer.lr", "1", ["optimizer.lr"]),
        ("optimizer.clip_grad", "1", ["optimizer.clip_grad"]),
        ("optimizer.use_distributed_optimizer", "false", ["the trainer sets it"]),
        ("optimizer.overlap_param_gathr", "true", ["did you mean overlap_param_gather?"]),
        ("ddp.use_distributed_optimizer", "false", ["the trainer sets it"]),
        ("ddp.overlap_param_gather", "true", ["weights are sent to the servers before"]),
        ("ddp.bucket_sizes", "1", ["DistributedDataParallelConfig", "did you mean bucket_size?"]),
    ],
)
def test_the_pass_through_to_megatron_is_checked(tmp_path, key, value, parts):
    fault = one_fault(tmp_path, "", f"megatron.{key}={value}")
    assert fault.startswith(f"megatron.{key}: ")
    for part in parts:
        assert part in fault, fault


def test_the_pass_through_accepts_what_is_megatrons_own(tmp_path):
    transformer = (
        "{recompute_granularity: full, recompute_num_layers: 1, moe_aux_loss_coeff: 0, overlap_p2p_comm: false}"
    )
    config = load(tmp_path, "", f"megatron.transformer={transformer}", "megatron.ddp.overlap_grad_reduce=true")
    assert config.megatron.transformer["recompute_num_layers"] == 1


def test_refused_keys_are_fields_of_the_installed_megatron():
    for section, (file, cls) in CLASSES.items():
        assert REFUSED[section].keys() <= class_fields(_installed_core() / file, cls).keys()


def test_fields_read_from_source_are_those_of_the_imported_classes():
    import dataclasses

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    imported = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    for cls, (file, name) in zip(imported, CLASSES.values(), strict=True):
        public = {field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")}
        assert set(class_fields(_installed_core() / file, name)) == public


def test_loading_and_checking_import_no_torch(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("megatron: {transformer: {recompute_num_layers: 1}}")
    code = (
        "import sys; from gspo_megatron.__main__ import main; "
        f"assert main(['check', {str(path)!r}]) == 2; "
        "print([name for name in sys.modules if name in ('torch', 'numpy', 'transformers', 'megatron.core')])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == "[]"
    assert re.search(r"^model.hf: required", answer.stderr, re.MULTILINE)
