"""Weight updates of the real server over gloo: whole, checked, and recoverable."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import reference
import torch
from make_tiny_model import make_tiny_model
from safetensors.torch import load_file

from gspo_megatron.config import ConfigError, RolloutConfig, WeightsConfig
from gspo_megatron.rollout.collector import Collector
from gspo_megatron.rollout.errors import WeightSyncError
from gspo_megatron.rollout.weight_sync import WeightSync
from gspo_megatron.types import Prompt
from tests.servers import is_paused

PROMPTS = [Prompt(index, tuple(range(10 + index, 16 + index))) for index in range(3)]
GATE = "model.layers.1.mlp.gate.weight"
EXPERT = "model.layers.0.mlp.experts.3.gate_proj.weight"


def engine_name(name: str) -> str:
    name = re.sub(r"self_attn\.[qkv]_proj", "self_attn.qkv_proj", name)
    name = re.sub(r"experts\.\d+\.(gate|up)_proj\.weight", "experts.w13_weight", name)
    return re.sub(r"experts\.\d+\.down_proj\.weight", "experts.w2_weight", name)


def specs(tensors):
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("models") / "other", seed=2)


@pytest.fixture
def tensors(other_model):
    return load_file(other_model / "model.safetensors")


@pytest.fixture
def sync_to(fresh_sglang_server, tensors, tmp_path):
    """Makes a WeightSync to the shared server; all are closed at the end."""
    made = []

    def make(expected=None, bucket_mib=0.25, names=engine_name, model_dir="", **settings) -> WeightSync:
        sync = WeightSync(
            WeightsConfig(bucket_mib=bucket_mib, timeout_s=60, **settings),
            [fresh_sglang_server[0]],
            backend="gloo",
            expected=specs(tensors) if expected is None else expected,
            engine_name=names,
            model_dir=model_dir,
            directory=tmp_path / "weights",
        )
        made.append(sync)
        return sync

    yield make
    for sync in made:
        sync.close()


def responses(url, version):
    config = RolloutConfig(samples_per_prompt=2, max_response_tokens=12, temperature=1.0)
    collector = Collector(config, [url], stop_token_ids=[2], vocab_size=512, score=lambda p, c: [0.0] * len(c))
    return collector.collect(PROMPTS, version).samples


def assert_serves(url, model_dir, version):
    for sample in responses(url, version):
        expected = reference.log_probs(model_dir, sample.prompt_ids, sample.response_ids, 1.0)
        assert sample.rollout_log_probs == pytest.approx(expected, abs=1e-4)


def test_generation_after_a_sync_is_of_the_new_weights(fresh_sglang_server, other_model, tensors, sync_to):
    url, model_dir = fresh_sglang_server
    assert_serves(url, model_dir, 0)
    sync = sync_to()
    sync.connect()
    report = sync.run(tensors.items(), version=1)
    assert report.num_tensors == len(tensors) and report.num_buckets >= 3
    assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert_serves(url, other_model, 1)
    # the second sync and the way back, with another order and buckets smaller than a tensor
    back = load_file(model_dir / "model.safetensors")
    small = sync_to(bucket_mib=0.01)
    assert small.run(reversed(back.items()), version=2).num_buckets > 20
    assert_serves(url, model_dir, 2)
    with pytest.raises(WeightSyncError, match=rf"{url} reports weight version 2, this run sent 1; does another run"):
        sync.run(tensors.items(), version=3)


def damaged(tensors, how):
    tensors = dict(tensors)
    if how == "missing":
        del tensors[EXPERT]
    elif how == "extra":
        tensors["model.layers.0.mlp.experts.8.gate_proj.weight"] = tensors[EXPERT]
    elif how == "shape":
        tensors[EXPERT] = tensors[EXPERT].T.contiguous()
    elif how == "dtype":
        tensors[GATE] = tensors[GATE].bfloat16()
    return tensors


@pytest.mark.parametrize(
    "how, message",
    [
        ("missing", rf"tensors not sent: {EXPERT}"),
        ("extra", r"experts\.8\.gate_proj\.weight is not expected"),
        ("shape", rf"{EXPERT} has shape \[64, 32\], expected \[32, 64\]"),
        ("dtype", rf"{GATE} has dtype torch.bfloat16, expected torch.float32"),
    ],
)
def test_a_damaged_sync_leaves_the_engine_paused_and_a_good_one_recovers(
    fresh_sglang_server, other_model, tensors, sync_to, how, message
):
    url, _ = fresh_sglang_server
    sync = sync_to()
    with pytest.raises(WeightSyncError, match=rf"version 4 failed, {url} stay paused.*{message}"):
        sync.run(damaged(tensors, how).items(), version=4)
    assert is_paused(url)
    sync.run(tensors.items(), version=5)
    assert_serves(url, other_model, 5)


def test_a_shape_that_only_the_engine_knows_is_wrong(fresh_sglang_server, other_model, tensors, sync_to):
    url, _ = fresh_sglang_server
    wrong = {**tensors, GATE: torch.zeros(9, 64)}
    with pytest.raises(WeightSyncError, match=rf"bucket \d+ \(.*{url}/update_weights_from_distributed: HTTP 400"):
        sync_to(expected=specs(wrong)).run(wrong.items(), version=6)
    assert is_paused(url)
    sync_to().run(tensors.items(), version=7)
    assert_serves(url, other_model, 7)


def test_an_error_of_the_export_is_passed_on_with_the_place(fresh_sglang_server, tensors, sync_to):
    url, _ = fresh_sglang_server

    def breaking():
        yield from list(tensors.items())[:3]
        raise OSError("no such rank")

    last = list(tensors)[2]
    with pytest.raises(WeightSyncError, match=f"after {last}: OSError: no such rank"):
        sync_to().run(breaking(), version=8)
    assert is_paused(url)


def test_a_model_that_does_not_fit_the_engine_is_refused_when_connecting(tensors, sync_to):
    extra = {**specs(tensors), "model.layers.2.input_layernorm.weight": (torch.float32, (64,))}
    with pytest.raises(WeightSyncError, match=r"no parameter for model\.layers\.2\.input_layernorm\.weight"):
        sync_to(expected=extra).connect()
    less = {name: spec for name, spec in specs(tensors).items() if name != GATE}
    with pytest.raises(WeightSyncError, match=rf"no tensor sent fills these parameters of .* rank 0 of 1: {GATE}"):
        sync_to(expected=less).connect()


def test_coverage_is_proven_by_noise(fresh_sglang_server, other_model, tensors, sync_to):
    url, _ = fresh_sglang_server
    sync_to().prove_coverage(lambda: tensors.items(), version=9)
    assert_serves(url, other_model, 9)


def test_an_expert_that_no_list_of_names_misses_is_found_by_noise(fresh_sglang_server, tensors, sync_to):
    url, _ = fresh_sglang_server
    # expected and sent agree and every fused parameter gets something: only the noise shows the gap
    less = {name: tensor for name, tensor in tensors.items() if name != EXPERT}
    sync = sync_to(expected=specs(less))
    with pytest.raises(WeightSyncError, match=rf"does not rewrite all of {engine_name(EXPERT)} of {url} rank 0 of 1$"):
        sync.prove_coverage(lambda: less.items(), version=10)
    assert is_paused(url)


def test_the_prefix_cache_of_the_old_weights_is_not_reused(fresh_sglang_server, other_model, tensors, sync_to):
    url, _ = fresh_sglang_server
    prompt = Prompt(0, tuple(range(20, 120)))
    config = RolloutConfig(samples_per_prompt=2, max_response_tokens=4)
    collector = Collector(config, [url], stop_token_ids=[2], vocab_size=512, score=lambda p, c: [0.0] * len(c))
    collector.collect([prompt], 0)
    sync_to().run(tensors.items(), version=1)
    for sample in collector.collect([prompt], 1).samples:
        expected = reference.log_probs(other_model, sample.prompt_ids, sample.response_ids, 1.0)
        assert sample.rollout_log_probs == pytest.approx(expected, abs=1e-4)


def test_servers_that_are_not_there_are_named(tensors):
    sync = WeightSync(
        WeightsConfig(timeout_s=5),
        ["http://127.0.0.1:9"],
        backend="gloo",
        expected=specs(tensors),
        engine_name=engine_name,
    )
    with pytest.raises(ConfigError, match=r"rollout.servers: .*http://127.0.0.1:9/server_info: no answer"):
        sync.connect()


def test_a_session_that_somebody_else_ends_is_reported_and_recovered_from(
    fresh_sglang_server, other_model, tensors, sync_to
):
    url, _ = fresh_sglang_server

    def interrupted():
        for index, item in enumerate(tensors.items()):
            if index == len(tensors) // 2:
                httpx.post(f"{url}/end_weight_update", json={}, trust_env=False).raise_for_status()
            yield item

    sync = sync_to(bucket_mib=0.05)
    with pytest.raises(WeightSyncError, match=r"bucket \d+ \(.*HTTP 400: .*must run between"):
        sync.run(interrupted(), version=11)
    assert is_paused(url)
    # the engine did not take part in the last broadcast, so the same object has to join a new group
    sync.run(tensors.items(), version=12)
    assert_serves(url, other_model, 12)


def test_the_trainers_own_group_has_no_part_in_it(fresh_sglang_server, other_model, tensors, sync_to, monkeypatch):
    url, _ = fresh_sglang_server
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sync_to().run(tensors.items(), version=13)
        assert torch.distributed.get_world_size() == 1
    finally:
        torch.distributed.destroy_process_group()
    assert_serves(url, other_model, 13)


def test_an_engine_of_another_model_is_refused_when_connecting(
    fresh_sglang_server, other_model, tensors, sync_to, tmp_path
):
    url, _ = fresh_sglang_server
    dense = make_tiny_model("qwen3", tmp_path / "dense")
    with pytest.raises(ConfigError, match=rf"{url} serves Qwen3MoeForCausalLM and model.hf is Qwen3ForCausalLM"):
        sync_to(model_dir=dense).connect()
    bf16 = {name: (torch.bfloat16, shape) for name, (_, shape) in specs(tensors).items()}
    with pytest.raises(ConfigError, match=rf"{url} holds its weights as float32 and the trainer sends bfloat16"):
        sync_to(expected=bf16, model_dir=other_model).connect()
    larger = make_tiny_model("qwen3_moe", tmp_path / "larger", overrides={"vocab_size": 576})
    with pytest.raises(ConfigError, match=rf"{url} serves .* with a vocabulary of 512, model.hf has 576"):
        sync_to(model_dir=larger).connect()
    # and where its files are not to be seen from here, it refuses the tensor itself
    wide = load_file(larger / "model.safetensors")
    with pytest.raises(WeightSyncError, match=r"bucket \d+ \((.|\n)*(576|org_vocab_size)"):
        sync_to(expected=specs(wide)).run(wide.items(), version=20)
    assert is_paused(url)


def flipping(sync, index):
    """Have a bit of one bucket change on its way."""
    send, sent = sync._transport.send_bucket, []

    def flip(bucket):
        sent.append(bucket)
        if len(sent) == index:
            bucket.flat[-1] ^= 1
        send(bucket)

    sync._transport.send_bucket = flip


@pytest.mark.parametrize("transport", ["distributed", "tensor"])
def test_one_flipped_bit_in_one_bucket_is_found(fresh_sglang_server, other_model, tensors, sync_to, transport):
    url, _ = fresh_sglang_server
    sync = sync_to(model_dir=other_model, transport=transport)
    flipping(sync, 2)
    words = rf"version 21 failed, {url} stay paused: {url} rank 0 of 1 does not hold what was sent: \S+ \(it has"
    with pytest.raises(WeightSyncError, match=words):
        sync.run(tensors.items(), version=21)
    assert is_paused(url)
    # after a failure everything is proven again
    assert sync.run(tensors.items(), version=22).checked == 21
    assert_serves(url, other_model, 22)


def test_an_engine_that_somebody_else_writes_to_is_noticed(fresh_sglang_server, other_model, tensors, sync_to):
    url, model_dir = fresh_sglang_server
    first = sync_to(model_dir=other_model)
    first.run(tensors.items(), version=23)
    first.check_unchanged()
    # another run, which happens to be at the same step
    sync_to(model_dir=other_model).run(load_file(model_dir / "model.safetensors").items(), version=23)
    with pytest.raises(WeightSyncError, match=rf"{url} no longer holds what .* version 23: .* and other \S+weight"):
        first.check_unchanged()
    sync_to().run(tensors.items(), version=24)
    with pytest.raises(WeightSyncError, match=rf"{url} no longer holds .* version 23: it reports version 24"):
        first.check_unchanged()
    with pytest.raises(WeightSyncError, match=rf"{url} reports weight version 24, this run sent 23; does another run"):
        first.run(tensors.items(), version=25)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_every_way_of_pausing_lets_generation_go_on_with_the_new_weights(
    fresh_sglang_server, other_model, tensors, sync_to, mode
):
    url, _ = fresh_sglang_server
    sync_to(model_dir=other_model, pause=mode).run(tensors.items(), version=26)
    assert_serves(url, other_model, 26)


def test_requests_that_keep_their_old_cache_are_an_error(fresh_sglang_server, other_model, tensors, sync_to):
    """Somebody else's request runs while a sync begins: in_place would go on with keys of the old weights."""
    url, _ = fresh_sglang_server
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3900, "ignore_eos": True}, "stream": True}
    started = threading.Event()

    def generate():
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=120, trust_env=False) as response:
            for _ in response.iter_lines():
                started.set()

    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client, ThreadPoolExecutor() as threads:
        running = threads.submit(generate)
        assert started.wait(60)
        try:
            with pytest.raises(WeightSyncError, match=r"flushing the cache: .*weights.pause=in_place keeps the caches"):
                sync_to(model_dir=other_model, pause="in_place").run(tensors.items(), version=27)
            assert sync_to(model_dir=other_model, pause="retract").run(tensors.items(), version=28).checked
        finally:
            client.post("/abort_request", json={"abort_all": True})
            running.result()
