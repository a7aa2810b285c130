"""Failing servers: others take over, errors name the server and the prompt, and nothing waits for ever."""

import contextlib
import itertools
import time

import pytest
from fake_server import FakeServer, good, slow

from gspo_megatron.config import ConfigError, RolloutConfig
from gspo_megatron.rollout import collector as collector_module
from gspo_megatron.rollout.collector import Collector
from gspo_megatron.rollout.errors import RolloutError, ServerError
from gspo_megatron.rollout.pool import RetryPolicy
from gspo_megatron.types import Prompt

POLICY = RetryPolicy(first_backoff_s=0.02, max_backoff_s=0.1, probe_every_s=0.1, probe_timeout_s=1.0, no_server_s=1.0)
PROMPTS = [Prompt(100 + index, (1, 2, 3 + index)) for index in range(8)]


def collect(servers, prompts=PROMPTS, version=1, policy=POLICY, report=print, score=None, **settings):
    config = RolloutConfig(**{"samples_per_prompt": 2, "max_response_tokens": 2, "request_timeout_s": 10.0, **settings})
    urls = [server if isinstance(server, str) else server.url for server in servers]
    score = score or (lambda prompts, completions: [0.0] * len(completions))
    options = {"stop_token_ids": [2], "vocab_size": 50, "policy": policy, "report": report}
    return Collector(config, urls, score=score, **options).collect(prompts, version)


def failing(status, answer):
    return lambda body: (status, answer)


def changed(**meta):
    def generate(body):
        status, outputs = good(body)
        outputs[1] = {**outputs[1], "meta_info": {**outputs[1]["meta_info"], **meta}}
        return status, outputs

    return generate


def assert_complete(rollout):
    assert [sample.prompt_ids for sample in rollout.samples] == [p.token_ids for p in PROMPTS for _ in range(2)]
    assert [sample.group for sample in rollout.samples] == [group for group in range(8) for _ in range(2)]


@pytest.mark.parametrize(
    "generate",
    [
        failing(500, {"error": {"message": "out of memory"}}),
        failing(503, {"error": "overloaded"}),
        changed(finish_reason={"type": "abort", "message": "aborted"}),
        slow(3.0),
    ],
    ids=["500", "503", "abort", "hang"],
)
def test_another_server_takes_over(generate):
    with FakeServer(generate) as broken, FakeServer() as sound:
        assert_complete(collect([broken, sound], request_timeout_s=1.0))
        assert 1 <= len(broken.requests) <= 8 and len(sound.requests) >= 8


def test_a_dead_server_among_living_ones_is_left_out():
    lines = []
    with FakeServer() as sound:
        assert_complete(collect(["http://127.0.0.1:9", sound], report=lines.append))
    assert any("http://127.0.0.1:9 gets no requests" in line for line in lines)


def test_a_server_that_recovers_is_used_again():
    count = itertools.count()

    def generate(body):
        return good(body) if next(count) >= 5 else (500, {"error": "warming up"})

    lines = []
    with FakeServer(generate) as server:
        assert_complete(collect([server], report=lines.append, retries=8))
    assert any("gets no requests" in line for line in lines) and any("answers again" in line for line in lines)


def test_servers_that_all_die_end_the_collection_within_the_bound():
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(FakeServer()) for _ in range(2))
        collector = Collector(
            RolloutConfig(samples_per_prompt=2, max_response_tokens=2, retries=50),
            [first.url, second.url],
            stop_token_ids=[2],
            vocab_size=50,
            score=lambda prompts, completions: [0.0] * 2,
            policy=POLICY,
        )
        collector.check_servers()
    started = time.monotonic()
    words = f"no SGLang server lives.*{first.url}/.*no answer.*{second.url}/.*no answer"
    with pytest.raises(RolloutError, match=words):
        collector.collect(PROMPTS, 1)
    assert time.monotonic() - started < 6


def test_no_server_at_the_start_is_a_config_error_naming_them():
    with pytest.raises(ConfigError, match=r"rollout.servers: none answers; http://127.0.0.1:9: .*is its URL in rol"):
        collect(["http://127.0.0.1:9"])
    with pytest.raises(ConfigError, match=r"rollout.servers: '127.0.0.1:9' is no URL"):
        collect(["127.0.0.1:9"])


def test_a_prompt_that_always_fails_is_given_up_with_the_servers_words():
    with FakeServer(failing(500, {"error": {"message": "out of memory"}})) as server:
        with pytest.raises(RolloutError, match=rf"prompt 10\d: failed 3 times.*{server.url}/generate: HTTP 500: out"):
            collect([server], retries=2)


def test_a_refused_request_is_not_tried_again():
    with FakeServer(failing(400, {"error": "unknown field"})) as server:
        with pytest.raises(RolloutError, match=rf"prompt 100: {server.url}/generate: HTTP 400: unknown field"):
            collect([server], PROMPTS[:1])
        assert len(server.requests) == 1


def test_a_hung_server_alone_ends_after_the_tries():
    started = time.monotonic()
    with FakeServer(slow(2.0)) as server:
        with pytest.raises(RolloutError, match=r"prompt 100: failed 2 times.*TimeoutError after 0.5 s"):
            collect([server], PROMPTS[:1], retries=1, request_timeout_s=0.5)
    assert time.monotonic() - started < 4


@pytest.mark.parametrize(
    "generate, message",
    [
        (changed(output_token_logprobs=[[-1.0, 7, None]]), "2 tokens with log-probs of 1"),
        (changed(output_token_logprobs=[[-1.0, 7, None], [-1.0, 9, None]]), "other tokens"),
        (changed(output_token_logprobs=[[-1.0, 7, None], [float("nan"), 8, None]]), "not finite"),
        (changed(output_token_logprobs=[[-1.0, 7, None], [float("-inf"), 8, None]]), "not finite"),
        (changed(output_token_logprobs=[[-1.0, 7, None], [None, 8, None]]), "not finite"),
        (changed(weight_version="2"), "under weight version 2, expected 1"),
        (changed(weight_versions=[{"version": "0"}, {"version": "1"}]), "under weight version 0, 1, expected 1"),
    ],
)
def test_answers_that_would_train_wrongly_are_refused(generate, message):
    with FakeServer(generate) as server:
        with pytest.raises(RolloutError, match=rf"prompt 100: {server.url}.*{message}"):
            collect([server], PROMPTS[:1])
        assert len(server.requests) == 1


def test_samples_in_flight_are_bounded_and_spread():
    with FakeServer(slow(0.1)) as first, FakeServer(slow(0.1)) as second:
        assert_complete(collect([first, second], concurrency=5))
        assert first.peak_in_flight <= 2 and second.peak_in_flight <= 2
        assert len(first.requests) >= 2 and len(second.requests) >= 2
        assert len(first.requests) + len(second.requests) == 8


def test_a_group_larger_than_the_bound_still_runs():
    with FakeServer() as server:
        assert_complete(collect([server], concurrency=1))


def test_scoring_runs_while_generation_goes_on():
    scored = []

    def score(prompts, completions):
        time.sleep(0.1)
        scored.append((prompts[0].index, len(server.requests)))
        return [1.0, 2.0]

    with FakeServer(slow(0.05)) as server:
        rollout = collect([server], concurrency=2, score=score)
    assert [sample.reward for sample in rollout.samples] == [1.0, 2.0] * 8
    assert len(scored) == 8 and any(requests > done + 1 for done, (_, requests) in enumerate(scored))


def test_progress_names_the_slowest_prompt(monkeypatch):
    monkeypatch.setattr(collector_module, "PROGRESS_EVERY_S", 0.1)
    lines = []
    with FakeServer(slow(0.3)) as server:
        collect([server], concurrency=2, prompts=PROMPTS[:2], report=lines.append)
    words = f"collected 0 of 2 prompts in 0 s; slowest: prompt 100, 0 s at {server.url}"
    assert any(words in line for line in lines)


def test_servers_of_different_models_are_refused():
    with FakeServer(model_type="qwen3_moe") as first, FakeServer(model_type="qwen3") as second:
        with pytest.raises(ConfigError, match=f"{first.url} has model_type qwen3_moe and {second.url} has qwen3"):
            collect([first, second])


def recovering(servers, recover, **settings):
    config = RolloutConfig(samples_per_prompt=2, max_response_tokens=2, request_timeout_s=10.0, **settings)
    options = {"stop_token_ids": [2], "vocab_size": 50, "policy": POLICY, "score": lambda p, completions: [0.0] * 2}
    collector = Collector(config, [server.url for server in servers], **options)
    return collector, lambda: collector.collect(PROMPTS, 1, lambda lost: recover(collector, lost))


def test_a_server_that_was_started_anew_gets_no_requests_until_it_has_the_weights():
    versions = {"version": "1"}

    def generate(body):
        if body["input_ids"] == [1, 2, 6]:  # the fourth prompt: the server is another one by now, once
            versions["version"] = versions.pop("next", "default")
        return good(body, versions["version"])

    def recover(collector, lost):
        calls.append(str(lost))
        versions["version"] = versions["next"] = "1"
        collector.serve_from([server.url])

    calls = []
    with FakeServer(generate) as server:
        _, collect_all = recovering([server], recover, concurrency=2)
        assert_complete(collect_all())
        asked = [body["input_ids"][2] for body in server.requests]
    assert len(calls) == 1 and "weight version default: it has not got this run's weights" in calls[0]
    # what had been answered is not asked again
    assert asked == [3, 4, 5, 6, 6, 7, 8, 9, 10]


def test_a_server_with_old_weights_is_not_asked_while_another_has_the_new_ones():
    with FakeServer() as stale, FakeServer() as current:
        collector, collect_all = recovering([stale, current], lambda collector, lost: pytest.fail(str(lost)))
        collector.serve_from([current.url])
        assert_complete(collect_all())
        assert not stale.requests
        collector.serve_from([stale.url, current.url])
        assert_complete(collect_all())
        assert stale.requests


def test_a_recovery_that_fails_ends_the_collection_with_its_words():
    def recover(collector, lost):
        raise ServerError("no more restarts")

    with FakeServer(failing(500, {"error": "broken"})) as server:
        _, collect_all = recovering([server], recover)
        with pytest.raises(ServerError, match="no more restarts"):
            collect_all()
