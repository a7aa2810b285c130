"""A real SGLang server of Qwen2-MoE (biases, a gated shared expert) gets whole weights, and answers with the log-probs
of transformers."""

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


@pytest.mark.slow
def test_every_parameter_gets_what_was_sent_and_answers_are_those_of_transformers(tmp_path):
    model, other = (make_tiny_model("qwen2_moe", tmp_path / str(seed), seed) for seed in (1, 2))
    new = load_file(other / "model.safetensors")
    launch = LaunchConfig(device="cpu", ready_timeout_s=400)
    with launch_servers(launch, model, "fp32", tmp_path / "logs", seed=1, stop_grace_s=1.0) as servers:
        url = servers.urls[0]
        sync = WeightSync(
            WeightsConfig(bucket_mib=0.25, timeout_s=60),
            [url],
            backend="gloo",
            expected={name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in new.items()},
            engine_name=FAMILIES["Qwen2MoeForCausalLM"].engine_name,
            model_dir=model,
        )
        try:
            sync.connect()
            report = sync.run(new.items(), version=1)
        finally:
            sync.close()
        assert report.unknown == 0 and report.checked > 20
        config = RolloutConfig(samples_per_prompt=2, max_response_tokens=8, request_timeout_s=120.0)
        collector = Collector(config, [url], stop_token_ids=[2], vocab_size=512, score=lambda p, c: [0.0] * len(c))
        prompts = [Prompt(index, tuple(range(10 + index, 16 + index))) for index in range(2)]
        for sample in collector.collect(prompts, 1).samples:
            expected = reference.log_probs(other, sample.prompt_ids, sample.response_ids, 1.0)
            assert sample.rollout_log_probs == pytest.approx(expected, abs=1e-4)
