"""tools/check_weight_sync.py against the real server: its table, and what it refuses."""

import os
import subprocess
import sys

import check_weight_sync
import pytest

from tests.ranks import REPOSITORY
from tests.training.runs import CONFIG, from_servers, overrides

TOOL = str(REPOSITORY / "tools" / "check_weight_sync.py")


def run(num_ranks, *arguments):
    command = [sys.executable, TOOL]
    if num_ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", TOOL]
    return subprocess.run(
        [*command, "--config", CONFIG, *arguments], cwd=REPOSITORY, timeout=200, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def rows(output):
    return dict(line.split("  ", 1) for line in output.splitlines() if "  " in line)


def test_the_table_of_one_process(fresh_sglang_server, tmp_path):
    url, model = fresh_sglang_server
    settings = [*overrides(model, tmp_path / "run", *from_servers(url), "parallel.expert=1"), "--version", "7"]
    done = run(1, *settings)
    assert done.returncode == 0, done.stdout
    found = {name.strip(): value.strip() for name, value in rows(done.stdout).items()}
    assert found["transport"] == "distributed, to 1 server(s), 1 engine rank(s)"
    assert found["tensors"].startswith("69 in") and found["bytes"] == "759,296"
    # one engine rank gets every byte once
    assert found["lower bound"] == "759,296 bytes, every engine rank its part once; moved 1.00 times it"
    assert found["checksums"] == "ok, 21 of 21 engine parameters are what was sent"
    assert found["version"] == "ok, all servers report 7 and serve"


def test_all_ranks_write_for_a_transport_by_files(fresh_sglang_server, tmp_path):
    url, model = fresh_sglang_server
    settings = overrides(model, tmp_path / "run", *from_servers(url), "weights.transport=delta", "parallel.expert=2")
    done = run(2, *settings)
    assert done.returncode == 0, done.stdout
    assert "checksums" in done.stdout and "ok, 21 of 21 engine parameters" in done.stdout
    assert (tmp_path / "run" / "weights" / "engine" / "version_0").is_dir()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["rollout.launch={device: cpu}"], "rollout.servers: empty: this needs running servers"),
        (["weights.transport=carrier_pigeon"], "weights.transport"),
        ([*from_servers("http://127.0.0.1:1"), "--version=-1"], "--version: -1: give a number"),
    ],
)
def test_bad_input_is_refused_in_a_line(tiny_qwen3_moe, tmp_path, capsys, arguments, message):
    given = ["--config", CONFIG, *overrides(tiny_qwen3_moe, tmp_path / "run", "parallel.expert=1"), *arguments]
    assert check_weight_sync.main(given) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(tiny_qwen3_moe, tmp_path):
    url = "http://127.0.0.1:9"
    refused = run(1, *overrides(tiny_qwen3_moe, tmp_path / "run", *from_servers(url), "parallel.expert=1"))
    assert refused.returncode == 2 and "Traceback" not in refused.stdout, refused.stdout
    assert f"{url}/server_info: no answer" in refused.stdout
