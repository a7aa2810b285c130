"""Collection from the real server: tokens, log-probs, order and versions."""

import pytest
import reference

from gspo_megatron.config import ConfigError, RolloutConfig
from gspo_megatron.rollout.collector import Collector
from gspo_megatron.rollout.errors import RequestError, RolloutError
from gspo_megatron.types import Prompt

STOP, VOCABULARY = 2, 512
CONFIG = RolloutConfig(prompts_per_step=6, samples_per_prompt=4, max_response_tokens=24, temperature=0.7)
PROMPTS = [Prompt(index, tuple(range(5 + index, 8 + 3 * index))) for index in range(6)]


def length(prompts, completions) -> list[float]:
    return [float(len(completion.token_ids)) for completion in completions]


def collector(url, config=CONFIG, score=length, **options) -> Collector:
    return Collector(config, [url], stop_token_ids=[STOP], vocab_size=VOCABULARY, score=score, **options)


def test_samples_come_group_by_group_with_transformers_log_probs(fresh_sglang_server):
    url, model_dir = fresh_sglang_server
    samples = collector(url).collect(PROMPTS, weight_version=0).samples
    assert [sample.group for sample in samples] == [group for group in range(6) for _ in range(4)]
    assert [sample.prompt_ids for sample in samples] == [prompt.token_ids for prompt in PROMPTS for _ in range(4)]
    assert len({sample.response_ids for sample in samples}) == len(samples)
    for sample in samples:
        assert sample.reward == len(sample.response_ids) and sample.weight_version == 0
        stopped = sample.response_ids[-1] == STOP
        assert sample.finish_reason == ("stop" if stopped else "length")
        assert STOP not in sample.response_ids[:-1]
        assert stopped or len(sample.response_ids) == CONFIG.max_response_tokens
        expected = reference.log_probs(model_dir, sample.prompt_ids, sample.response_ids, CONFIG.temperature)
        assert sample.rollout_log_probs == pytest.approx(expected, abs=1e-4)


def test_cold_sampling_is_greedy(fresh_sglang_server):
    url, model_dir = fresh_sglang_server
    config = RolloutConfig(samples_per_prompt=2, max_response_tokens=8, temperature=1e-3)
    prompt = PROMPTS[3]
    expected = reference.greedy(model_dir, prompt.token_ids, 8)
    for sample in collector(url, config).collect([prompt], 0).samples:
        assert sample.response_ids == expected[: len(sample.response_ids)]


def test_a_wrong_version_is_refused_and_named(fresh_sglang_server):
    url, _ = fresh_sglang_server
    with pytest.raises(RolloutError, match=f"prompt 0: {url} answered under weight version 0, expected 7"):
        collector(url).collect(PROMPTS[:1], weight_version=7)


def test_a_version_that_is_no_number_is_refused(fresh_sglang_server):
    import httpx

    url, _ = fresh_sglang_server
    httpx.post(f"{url}/update_weight_version", json={"new_version": "default"}, trust_env=False).raise_for_status()
    with pytest.raises(RolloutError, match="weight version default: it has not got this run's weights"):
        collector(url).collect(PROMPTS[:1], weight_version=0)


@pytest.mark.parametrize("tokens, message", [((), "prompt 9: .*without tokens"), ((1, 512), "prompt 9: .*512.*vocab")])
def test_prompts_that_would_kill_the_server_are_not_sent(fresh_sglang_server, tokens, message):
    url, _ = fresh_sglang_server
    with pytest.raises(ConfigError, match=message):
        collector(url).collect([Prompt(9, tokens)], 0)
    assert collector(url).collect(PROMPTS[:1], 0).samples


def test_the_longest_response_the_server_takes_is_not_cut_short(fresh_sglang_server):
    url, _ = fresh_sglang_server
    limit = 4096 - 2
    too_long = RolloutConfig(max_response_tokens=limit)
    with pytest.raises(ConfigError, match=f"rollout.max_response_tokens: {limit}.*more than the {limit}.*lower it"):
        collector(url, too_long).check_servers()
    collector(url, RolloutConfig(max_response_tokens=limit - 1)).check_servers()
    config = RolloutConfig(samples_per_prompt=1, max_response_tokens=4)
    prompt = Prompt(0, tuple(token % 500 + 3 for token in range(limit - 5)))
    (sample,) = collector(url, config).collect([prompt], 0).samples
    assert len(sample.response_ids) == 4 or sample.finish_reason == "stop"
    with pytest.raises(ConfigError, match="with a prompt of 4090 tokens"):
        collector(url, config).collect([Prompt(0, (*prompt.token_ids, 3))], 0)


def test_another_vocabulary_is_refused(fresh_sglang_server):
    url, model_dir = fresh_sglang_server
    other = Collector(CONFIG, [url], stop_token_ids=[2], vocab_size=1000, score=length)
    with pytest.raises(ConfigError, match=f"{url} serves {model_dir} with a vocabulary of 512, model.hf has 1000"):
        other.check_servers()


def test_the_servers_own_words_reach_the_user(fresh_sglang_server):
    url, _ = fresh_sglang_server
    wrong = collector(url, RolloutConfig(temperature=-1.0))
    with pytest.raises(RolloutError, match=rf"prompt 0: {url}/generate: HTTP 400: .*temperature") as caught:
        wrong.collect(PROMPTS[:1], 0)
    assert isinstance(caught.value.__cause__, RequestError)


def test_errors_of_the_scoring_name_the_prompt(fresh_sglang_server):
    url, _ = fresh_sglang_server

    def broken(prompts, completions):
        if prompts[0].index == 2:
            raise KeyError("answer")
        return length(prompts, completions)

    with pytest.raises(RolloutError, match="prompt 2: scoring failed: KeyError: 'answer'"):
        collector(url, score=broken).collect(PROMPTS, 0)
    with pytest.raises(RolloutError, match="prompt 0: a reward is not finite"):
        collector(url, score=lambda prompts, completions: [float("nan")] * 4).collect(PROMPTS[:1], 0)
    with pytest.raises(RolloutError, match="prompt 0: 1 rewards for 4 responses"):
        collector(url, score=lambda prompts, completions: [1.0]).collect(PROMPTS[:1], 0)
