"""Several trainer ranks send to the real server: all weights arrive, and one rank's fault is everyone's."""

import re

import pytest
from make_tiny_model import make_tiny_model
from sender_runs import sync
from test_weight_sync import assert_serves, is_paused

from tests.ranks import run_ranks
from tests.training.runs import from_servers, metrics, overrides, train


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("models") / "sent", seed=3)


def test_stages_send_what_they_hold(fresh_sglang_server, other_model):
    url, _ = fresh_sglang_server
    results = run_ranks(sync, 2, {"pipeline": 2}, str(other_model), [url], [""])
    assert [result["errors"] for result in results] == [[""]] * 2
    assert results[0]["senders"] == [0, 1]
    calls = [result["calls"] for result in results]
    assert min(calls) >= 3 and sum(calls) == results[0]["num_buckets"]
    report = results[0]["reports"][0]
    # the first sync compares all parameters of the engine, whichever rank sent their tensors
    assert report.checked > 0 and report.unknown == 0
    assert_serves(url, other_model, 1)


def test_a_fault_of_one_sender_stops_all_and_the_next_sync_recovers(fresh_sglang_server, other_model):
    url, _ = fresh_sglang_server
    layout, faults = {"tensor": 2, "pipeline": 2, "expert": 2}, ["raises", "", "changes bytes"]
    results = run_ranks(sync, 4, layout, str(other_model), [url], faults)
    assert results[0]["senders"] == [0, 2]
    leader, followers = results[0]["errors"], [result["errors"] for result in results[1:]]
    assert re.search(
        rf"sync to version 1 failed, {url} stay paused: rank 2, version 1: bucket 0 \(.+\): no way to the engines",
        leader[0],
    )
    assert not leader[1]
    # only proven by what rank 2 found about the tensors that it sent
    assert re.search(rf"version 3 failed, {url} stay paused: .*does not hold what was sent: .*layers\.1\.", leader[2])
    for errors in followers:
        assert [bool(error) for error in errors] == [True, False, True]
        assert leader[0] in errors[0] and leader[2] in errors[2]
    assert is_paused(url)
    results = run_ranks(sync, 4, layout, str(other_model), [url], [""])
    assert results[0]["errors"] == [""] and not is_paused(url)
    assert_serves(url, other_model, 1)


@pytest.mark.slow
def test_a_run_on_pipeline_stages_trains_with_what_all_of_them_send(fresh_sglang_server, tmp_path):
    url, model = fresh_sglang_server
    layout = ["parallel.expert=1", "parallel.pipeline=2", "train.steps=2", "weights.bucket_mib=0.1"]
    finished = train(2, overrides(model, tmp_path / "run", *from_servers(url), *layout))
    assert finished.returncode == 0, finished.stdout[-4000:]
    assert "every parameter of the servers proven covered" in finished.stdout
    lines = metrics(tmp_path / "run")
    assert [line["rollout/weight_version"] for line in lines] == [0, 1]
    assert all(line["rollout/logprob_gap_mean"] <= 1e-4 and line["grad_norm"] > 0 for line in lines)
