"""A real SGLang server of DeepSeek-V3 gets whole weights, and answers with the log-probs of transformers."""

import pytest
import reference
from make_tiny_model import make_tiny_model
from safetensors.torch import load_file

from gspo_megatron.config import LaunchConfig, RolloutConfig, WeightsConfig
from gspo_megatron.rollout.collector import Collector
from gspo_megatron.rollout.launcher import launch_servers
from gspo_megatron.rollout.weight_sync import WeightSync
from gspo_megatron.types import Prompt
from gspo_megatron.weights.families import FAMILIES

pytestmark = pytest.mark.slow

PROMPTS = [Prompt(index, tuple(range(10 + index, 16 + index))) for index in range(2)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(url, model directory, directory of other weights)"""
    root = tmp_path_factory.mktemp("models")
    model, other = (make_tiny_model("deepseek_v3", root / str(seed), seed) for seed in (1, 2))
    launch = LaunchConfig(device="cpu", ready_timeout_s=400)
    with launch_servers(launch, model, "fp32", tmp_path_factory.mktemp("logs"), seed=1, stop_grace_s=1.0) as servers:
        yield servers.urls[0], model, other


def assert_serves(url, directory, version):
    config = RolloutConfig(samples_per_prompt=2, max_response_tokens=8, request_timeout_s=120.0)
    collector = Collector(config, [url], stop_token_ids=[2], vocab_size=512, score=lambda p, c: [0.0] * len(c))
    for sample in collector.collect(PROMPTS, version).samples:
        expected = reference.log_probs(directory, sample.prompt_ids, sample.response_ids, 1.0)
        assert sample.rollout_log_probs == pytest.approx(expected, abs=1e-4)


def test_down_projections_reach_the_engine_however_small_the_buckets(server, tmp_path):
    """q_a_proj and kv_a_proj_with_mqa of a layer (6 KiB each) would come in buckets of their own, and SGLang would drop
    both; the checksums of all parameters say that none was."""
    url, model, other = server
    new = load_file(other / "model.safetensors")
    sync = WeightSync(
        WeightsConfig(transport="tensor", bucket_mib=0.004, timeout_s=60.0),
        [url],
        backend="gloo",
        expected={name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in new.items()},
        engine_name=FAMILIES["DeepseekV3ForCausalLM"].engine_name,
        directory=tmp_path,
        model_dir=model,
    )
    try:
        sync.connect()
        report = sync.run(new.items(), version=1)
        assert report.num_tensors == len(new) and report.num_buckets > 20
        assert report.unknown == 0 and report.checked == sum(len(names) for names in sync._engines[url].ranks)
        assert_serves(url, other, 1)
        sync.prove_coverage(lambda: load_file(model / "model.safetensors").items(), version=2)
        assert_serves(url, model, 2)
    finally:
        sync.close()
