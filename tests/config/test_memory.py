"""The parameter counts against published sizes, and the estimate against hand-computed cases."""

import re
from pathlib import Path

import pytest

from gspo_megatron.config import Config, MegatronConfig, ParallelConfig, RolloutConfig, TrainConfig
from gspo_megatron.layout import layout_of
from gspo_megatron.memory import LOGITS_CHUNK_TOKENS, count_parameters, estimate, memory_text
from gspo_megatron.model_files import read_model
from tests.config.fakes import QWEN3_8B, QWEN3_30B_A3B, TINY, write_checkpoint

ROOT = Path(__file__).parents[2]


def info(tmp_path, values):
    model, faults = read_model(write_checkpoint(tmp_path / "model", values))
    assert not faults
    return model


def test_parameters_of_the_published_models(tmp_path):
    """The model cards: Qwen3-30B-A3B has 30.5 billion parameters, 29.9 without embeddings; Qwen3-8B has 8.2."""
    moe = count_parameters(info(tmp_path, QWEN3_30B_A3B))
    assert moe.total == 30_532_122_624  # the sum of all tensors of the published checkpoint
    assert moe.experts == 48 * 128 * 3 * 2048 * 768
    assert round((moe.total - 2 * 151936 * 2048) / 1e9, 1) == 29.9
    dense = count_parameters(info(tmp_path, QWEN3_8B))
    assert dense.total == 8_190_735_360
    assert dense.experts == 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_counted_as_transformers_builds_it(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    import torch

    values = TINY | {"tie_word_embeddings": tied}
    with torch.device("meta"):
        built = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**values))
    assert count_parameters(info(tmp_path, values)).total == sum(weight.numel() for weight in built.parameters())


def test_shards_add_up_to_the_model(tmp_path):
    """Over tensor, pipeline and expert ranks; norms and routers are on every tensor rank, and counted once each."""
    model = info(tmp_path, QWEN3_30B_A3B)
    whole = count_parameters(model)
    stages = [count_parameters(model, 4, 8, 1, range(24), embedding=stage == 0, output=stage == 1) for stage in (0, 1)]
    replicated = 48 * (2 * 2048 + 2 * 128 + 2048 * 128) + 2048
    assert sum(stage.dense for stage in stages) * 4 - 3 * replicated == whole.dense
    assert sum(stage.experts for stage in stages) * 8 == whole.experts


def test_bytes_of_a_rank(tmp_path):
    model = info(tmp_path, QWEN3_30B_A3B)
    config = Config(parallel=ParallelConfig(tensor=2, pipeline=3, expert=8), rollout=RolloutConfig(replay="x"))
    rows = estimate(config, model, layout_of(config, 48))
    assert [row.stage for row in rows] == ["first", "middle", "last"]
    first, middle, last = rows
    dense, experts = middle.parameters.dense, middle.parameters.experts
    assert experts == 16 * 16 * 3 * 2048 * 768
    assert middle.weights == 2 * (dense + experts)
    assert middle.gradients == 4 * (dense + experts)
    assert middle.optimizer == 12 * dense / 8 + 12 * experts / 2
    assert first.activations == pytest.approx(3 * last.activations)
    assert first.parameters.dense - dense == 151936 * 2048 / 2
    assert (first.logits, middle.logits, last.logits) == (0, 0, 3 * 4 * LOGITS_CHUNK_TOKENS * 151936 / 2)
    assert first.weight_sync == 0
    assert first.total == first.weights + first.gradients + first.optimizer + first.activations


def test_activations_of_a_dense_layer_by_hand(tmp_path):
    """T tokens in bf16 without tensor parallelism: 4 H of the norms, 12,288 * 3 of the feed-forward part, and of the
    attention q 4096, k and v 1024 each, twice more q and k, and the output, beside 32 fp32 sums."""
    model = info(tmp_path, QWEN3_8B)
    config = Config(train=TrainConfig(tokens_per_micro_batch=1000))
    (row,) = estimate(config, model, layout_of(config, 1))
    elements = 4 * 4096 + (4096 + 2 * 1024) + 2 * (4096 + 1024) + 4096 + 3 * 12288
    assert row.activations == 36 * 1000 * (2 * elements + 32 * 4)


def test_recomputation_keeps_one_row_a_layer(tmp_path):
    model = info(tmp_path, QWEN3_8B)
    transformer = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain = Config(train=TrainConfig(tokens_per_micro_batch=1000))
    config = Config(train=plain.train, megatron=type(plain.megatron)(transformer=transformer))
    (without,) = estimate(plain, model, layout_of(plain, 1))
    (row,) = estimate(config, model, layout_of(config, 1))
    assert row.activations == 36 * 1000 * 4096 * 2 + without.activations / 36


def test_fp32_has_no_further_master_weights(tmp_path):
    model = info(tmp_path, TINY)
    config = Config(train=TrainConfig(dtype="fp32"))
    (row,) = estimate(config, model, layout_of(config, 2))
    assert row.weights == 4 * row.parameters.total and row.optimizer == 8 * row.parameters.total / 2


def test_the_table_names_the_model_and_every_stage(tmp_path):
    model = info(tmp_path, QWEN3_30B_A3B)
    config = Config(parallel=ParallelConfig(pipeline=2))
    text = memory_text(config, model, layout_of(config, 2))
    assert "30.5 billion" in text and re.search(r"^first ", text, re.M) and re.search(r"^last ", text, re.M)


def test_the_logits_chunk_is_the_backends():
    source = (ROOT / "gspo_megatron" / "backend" / "log_likelihood.py").read_text()
    assert int(re.search(r"^CHUNK_TOKENS = (\d+)", source, re.M).group(1)) == LOGITS_CHUNK_TOKENS


def test_uneven_and_virtual_stages(tmp_path):
    """The last of two stages holds 12 of 48 layers; with virtual stages a rank keeps activations of more."""
    model = info(tmp_path, QWEN3_30B_A3B)
    parallel, replay = ParallelConfig(pipeline=2), RolloutConfig(replay="x")
    megatron = MegatronConfig(transformer={"num_layers_in_last_pipeline_stage": 12})
    config = Config(parallel=parallel, rollout=replay, megatron=megatron)
    first, last = estimate(config, model, layout_of(config, 2))
    assert first.parameters.experts == 3 * last.parameters.experts == 36 * 128 * 3 * 2048 * 768
    assert first.activations == pytest.approx(2 * 3 * last.activations)
    plain = Config(parallel=parallel, rollout=replay)
    virtual = Config(parallel=ParallelConfig(pipeline=2, virtual_pipeline=2), rollout=replay)
    rows = [estimate(config, model, layout_of(config, 2)) for config in (plain, virtual)]
    # stage 0 keeps (2 * 1 + 1 * 2 + 1) / 2 = 2.5 micro-batches instead of 2, stage 1 (0 + 2 + 1) / 2 instead of 1
    assert rows[1][0].activations == pytest.approx(2.5 / 2 * rows[0][0].activations)
    assert rows[1][1].activations == pytest.approx(1.5 * rows[0][1].activations)
