"""Every transport brings whole weights to real servers: dense and MoE, on one engine rank and on two."""

import contextlib
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import reference
from make_tiny_model import make_tiny_model
from safetensors.torch import load_file

from gspo_megatron.config import ConfigError, LaunchConfig, RolloutConfig, WeightsConfig
from gspo_megatron.rollout.collector import Collector
from gspo_megatron.rollout.errors import WeightSyncError
from gspo_megatron.rollout.launcher import launch_servers
from gspo_megatron.rollout.weight_sync import WeightSync
from gspo_megatron.types import Prompt
from gspo_megatron.weights.families import FAMILIES
from gspo_megatron.weights.hf_files import read_hf_config
from tests.servers import is_paused

PROMPTS = [Prompt(index, tuple(range(10 + index, 16 + index))) for index in range(2)]
LAUNCHED = {"dense, 1 rank": ("qwen3", 1), "dense, 2 ranks": ("qwen3", 2), "moe, 2 ranks": ("qwen3_moe", 2)}
ENGINES = ["moe, 1 rank", *LAUNCHED]
TRANSPORTS = ["tensor", "distributed", "disk", "delta"]


@dataclass
class Engine:
    url: str
    model_dir: Path
    """What it was started with."""
    other_dir: Path
    """Other weights of the same model."""
    process: int = 0
    """Leader of its process group."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Real servers for this file, started at the same time."""
    models = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3_moe"):
        make_tiny_model(family, models / family, seed=1)
        make_tiny_model(family, models / f"other_{family}", seed=2)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as threads:
        servers = [
            launch_servers(
                LaunchConfig(device="cpu", tensor_parallel=ranks, ready_timeout_s=400), models / family, "fp32",
                tmp_path_factory.mktemp("logs"), seed=1, stop_grace_s=1.0,
            )
            for family, ranks in LAUNCHED.values()
        ]  # fmt: skip
        for server in servers:
            stack.callback(server.stop)
        list(threads.map(lambda server: server.start(), servers))
        yield {
            name: Engine(server.urls[0], models / family, models / f"other_{family}", server._servers[0].process.pid)
            for (name, (family, _)), server in zip(LAUNCHED.items(), servers, strict=True)
        }


@pytest.fixture
def engine(request, launched, fresh_sglang_server):
    if request.param not in LAUNCHED:
        url, model_dir = fresh_sglang_server
        return Engine(url, model_dir, launched["moe, 2 ranks"].other_dir)
    found = launched[request.param]
    body = {"model_path": str(found.model_dir), "weight_version": "0"}
    httpx.post(f"{found.url}/update_weights_from_disk", json=body, timeout=60, trust_env=False).raise_for_status()
    httpx.post(f"{found.url}/continue_generation", json={}, timeout=60, trust_env=False).raise_for_status()
    return found


@pytest.fixture
def sync_to(tmp_path):
    """Makes a WeightSync to an engine; all are closed at the end."""
    made = []

    def make(engine: Engine, transport: str, *more: Engine, **settings) -> WeightSync:
        settings = {"bucket_mib": 0.25, "timeout_s": 60.0, **settings}
        family = FAMILIES[read_hf_config(engine.model_dir)["architectures"][0]]
        sync = WeightSync(
            WeightsConfig(transport=transport, **settings),
            [engine.url, *(each.url for each in more)],
            backend="gloo",
            expected=specs(tensors_of(engine.other_dir)),
            engine_name=family.engine_name,
            directory=tmp_path / "weights",
            model_dir=engine.model_dir,
        )
        made.append(sync)
        return sync

    yield make
    for sync in made:
        sync.close()


def specs(tensors):
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def tensors_of(directory: Path):
    return load_file(directory / "model.safetensors")


def assert_serves(engine: Engine, model_dir: Path, version: int):
    config = RolloutConfig(samples_per_prompt=2, max_response_tokens=8)
    collector = Collector(config, [engine.url], stop_token_ids=[2], vocab_size=512, score=lambda p, c: [0.0] * len(c))
    for sample in collector.collect(PROMPTS, version).samples:
        expected = reference.log_probs(model_dir, sample.prompt_ids, sample.response_ids, 1.0)
        assert sample.rollout_log_probs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_generation_after_a_sync_is_of_the_new_weights(engine, transport, sync_to):
    sync = sync_to(engine, transport)
    sync.connect()
    new, old = tensors_of(engine.other_dir), tensors_of(engine.model_dir)
    report = sync.run(new.items(), version=1)
    assert report.num_tensors == len(new) and report.num_bytes >= sum(tensor.nbytes for tensor in new.values())
    # the first sync holds the checksum of every parameter of every engine rank against what was sent
    assert report.unknown == 0 and report.checked == sum(len(names) for names in sync._engines[engine.url].ranks)
    assert_serves(engine, engine.other_dir, 1)
    assert 0 < sync.run(old.items(), version=2).checked < report.checked
    assert_serves(engine, engine.model_dir, 2)
    sync.check_unchanged()
    sync.prove_coverage(lambda: new.items(), version=3)
    assert_serves(engine, engine.other_dir, 3)


def test_memory_is_handed_over_on_one_machine_only(sync_to, launched):
    engine = launched["dense, 1 rank"]
    far = Engine("http://another.example:30000", engine.model_dir, engine.other_dir)
    sync = sync_to(far, "tensor")
    with pytest.raises(ConfigError, match=r"weights.transport: tensor: http://another.example:30000 is not on this"):
        sync._connect_transport()


def test_a_full_disk_is_an_error_that_keeps_the_version_before(launched, sync_to, tmp_path):
    engine = launched["dense, 2 ranks"]
    sync = sync_to(engine, "disk")
    sync.run(tensors_of(engine.other_dir).items(), version=1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))  # stands for the disk
    try:
        with pytest.raises(WeightSyncError, match=rf"version 2 failed, {engine.url} stay paused: .*File too large"):
            sync.run(tensors_of(engine.model_dir).items(), version=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version_1"]
    assert is_paused(engine.url)
    sync.run(tensors_of(engine.model_dir).items(), version=3)
    assert_serves(engine, engine.model_dir, 3)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version_3"]


@pytest.mark.parametrize("dies", ["between syncs", "in a sync"])
def test_a_server_that_dies(launched, sync_to, dies):
    """The last test of this file: it ends two of the servers, which cut the same model in two ways."""
    victim = launched["dense, 1 rank" if dies == "between syncs" else "moe, 2 ranks"]
    other = launched["dense, 2 ranks"] if dies == "between syncs" else None
    lines = []
    sync = sync_to(victim, "distributed", *([other] if other else []), timeout_s=20.0)
    sync._report = lines.append
    new = tensors_of(victim.other_dir)
    sync.run(new.items(), version=5)
    if other:
        assert_serves(victim, victim.other_dir, 5)
        assert_serves(other, victim.other_dir, 5)
        os.killpg(victim.process, signal.SIGKILL)
        report = sync.run(tensors_of(victim.model_dir).items(), version=6)
        assert sync.urls == [other.url] and report.checked == sum(map(len, sync._engines[other.url].ranks))
        assert any(f"{victim.url} is left out of weight version 6" in line for line in lines)
        assert_serves(other, victim.model_dir, 6)
        return
    send, sent = sync._transport.send_bucket, []

    def send_until_death(bucket):
        sent.append(bucket)
        if len(sent) == 2:
            os.killpg(victim.process, signal.SIGKILL)
        send(bucket)

    sync._transport.send_bucket = send_until_death
    with pytest.raises(WeightSyncError, match=rf"version 6 failed, {victim.url} stay paused: bucket 1 \("):
        sync.run(tensors_of(victim.model_dir).items(), version=6)
    with pytest.raises(WeightSyncError, match=rf"version 7: no server answers: {victim.url}/server_info: no answer"):
        sync.run(new.items(), version=7)
