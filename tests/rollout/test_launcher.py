"""Starting and ending servers; the server proper is exercised by the tests that use the shared one."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gspo_megatron.config import ConfigError, LaunchConfig
from gspo_megatron.rollout import launcher
from gspo_megatron.rollout.errors import ServerError
from gspo_megatron.rollout.launcher import launch_servers, server_command, server_environment

FAMILY = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']);"
"""A stand-in for a server: it has a child process of its own."""


DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"


def group_members(group: int) -> list[int]:
    """Processes of a group that still run (a zombie does not)."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, found = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(found) == group and state != "Z":
            members.append(int(stat.parent.name))
    return members


def wait_until(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def use_program(monkeypatch, program: str) -> None:
    monkeypatch.setattr(launcher, "server_command", lambda *arguments: [sys.executable, "-c", program])


def test_a_taken_port_is_named_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        servers = launch_servers(LaunchConfig(device="cpu", port=port), tmp_path, "fp32", tmp_path / "log", seed=1)
        with pytest.raises(ConfigError, match=rf"rollout.launch.port: {port}: .*choose another port, or 0"):
            servers.start()
    assert not (tmp_path / "log").exists() and not servers.urls


def test_a_server_that_ends_while_starting_is_reported_with_its_log(tmp_path):
    with pytest.raises(ServerError, match=r"ended by itself; last lines of .*server_0\.log") as caught:
        launch = LaunchConfig(device="cpu")
        with launch_servers(launch, tmp_path / "no_model", "fp32", tmp_path, seed=1, stop_grace_s=1):
            pytest.fail("no server can serve a directory that is not there")
    assert "no_model" in str(caught.value) and "status 1" in str(caught.value)


def test_a_server_that_never_answers_is_given_up_and_leaves_nothing(tmp_path, monkeypatch):
    use_program(monkeypatch, FAMILY + "print('loading', flush=True); time.sleep(300)")
    monkeypatch.setattr(launcher, "REPORT_EVERY_S", 0.5)
    lines = []
    launch = LaunchConfig(device="cpu", ready_timeout_s=2.0)
    servers = launch_servers(launch, tmp_path, "fp32", tmp_path, seed=1, stop_grace_s=1, report=lines.append)
    groups = []
    monkeypatch.setattr(servers, "stop", lambda stop=servers.stop: (groups.extend(_groups(servers)), stop()))
    with pytest.raises(ServerError, match=r"rollout.launch.ready_timeout_s = 2; .*server_0\.log(.|\n)*loading"):
        servers.__enter__()
    assert len(groups) == 1 and not group_members(groups[0])
    assert any("waiting for 1 SGLang server(s)" in line and "server_0.log" in line for line in lines)


def _groups(servers) -> list[int]:
    return [server.process.pid for server in servers._servers]


@pytest.mark.parametrize("program", ["time.sleep(300)", DEAF + "time.sleep(300)"], ids=["meek", "deaf"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_trainer_leaves_no_process(tmp_path, program, end):
    trainer = textwrap.dedent(f"""
        import sys, threading
        from gspo_megatron.config import LaunchConfig
        from gspo_megatron.rollout import launcher
        launcher.server_command = lambda *arguments: [sys.executable, "-c", {FAMILY + program!r}]
        servers = launcher.launch_servers(LaunchConfig(device="cpu"), ".", "fp32", {str(tmp_path)!r}, 1, stop_grace_s=1)
        threading.Thread(target=servers.start, daemon=True).start()
        while not servers.urls:
            pass
        print(servers._servers[0].process.pid, flush=True)
        threading.Event().wait(60)
    """)
    with subprocess.Popen([sys.executable, "-c", trainer], stdout=subprocess.PIPE, text=True) as process:
        group = int(process.stdout.readline())
        try:
            assert wait_until(lambda: len(group_members(group)) == 3), group_members(group)
            process.send_signal(end)
            process.wait(10)
            assert wait_until(lambda: not group_members(group)), group_members(group)
        finally:
            process.kill()
    assert "is gone" in (tmp_path / "server_0.log").read_text()


def test_a_killed_supervisor_is_noticed_the_server_started_again_and_all_stopped(tmp_path, monkeypatch):
    use_program(monkeypatch, FAMILY + "time.sleep(300)")
    launch = LaunchConfig(device="cpu", count=2, restarts=1)
    servers = launch_servers(launch, tmp_path, "fp32", tmp_path, seed=1, stop_grace_s=1)
    monkeypatch.setattr(servers, "_wait_until_ready", lambda servers: None)
    with servers:
        groups, url = _groups(servers), servers.urls[1]
        assert wait_until(lambda: all(len(group_members(group)) == 3 for group in groups))
        servers.revive()
        assert _groups(servers) == groups
        os.kill(groups[1], signal.SIGKILL)
        assert wait_until(servers._servers[1].ended)
        servers.revive()
        again = _groups(servers)
        assert again[0] == groups[0] and again[1] != groups[1] and servers.urls[1] == url
        assert wait_until(lambda: len(group_members(again[1])) == 3 and not group_members(groups[1]))
        os.kill(again[1], signal.SIGKILL)
        assert wait_until(servers._servers[1].ended)
        with pytest.raises(ServerError, match=f"{url} ended by itself, for the last time that .*restarts = 1 allows"):
            servers.revive()
    assert wait_until(lambda: not any(group_members(group) for group in groups + again))


def test_a_server_that_hangs_is_started_again_after_a_while(tmp_path, monkeypatch):
    use_program(monkeypatch, FAMILY + "time.sleep(300)")
    monkeypatch.setattr(launcher, "HUNG_S", 0.5)
    lines = []
    launch = LaunchConfig(device="cpu", ready_timeout_s=1.0)
    servers = launch_servers(launch, tmp_path, "fp32", tmp_path, seed=1, stop_grace_s=1, report=lines.append)
    wait = servers._wait_until_ready
    monkeypatch.setattr(servers, "_wait_until_ready", lambda servers: None)
    with servers:
        group, url = _groups(servers)[0], servers.urls[0]
        monkeypatch.setattr(servers, "_wait_until_ready", wait)
        with pytest.raises(ServerError, match=f"{url} did not answer within rollout.launch.ready_timeout_s = 1"):
            servers.revive_and_wait([url])
        assert any(f"{url} does not answer and is started again" in line for line in lines)
        assert _groups(servers)[0] != group and wait_until(lambda: not group_members(group))


def test_command_of_a_cpu_server_and_its_overrides():
    args = {"max_total_tokens": 512, "log-requests": True, "skip-server-warmup": False}
    launch = LaunchConfig(device="cpu", args=args)
    command = server_command(launch, "/model", "float32", 31000, seed=5)
    assert command[:3] == [sys.executable, "-m", "gspo_megatron.rollout.sglang_cpu"]
    pairs = dict(zip(command, command[1:]))
    assert pairs["--max-total-tokens"] == "512" and pairs["--random-seed"] == "5" and pairs["--device"] == "cpu"
    assert pairs["--port"] == "31000" and pairs["--dtype"] == "float32" and pairs["--host"] == "127.0.0.1"
    assert "--log-requests" in command and "--skip-server-warmup" not in command and "True" not in command


def test_command_of_a_gpu_server():
    command = server_command(LaunchConfig(tensor_parallel=2), "/model", "bfloat16", 31000, seed=5)
    assert command[2] == "sglang.launch_server" and dict(zip(command, command[1:]))["--tp-size"] == "2"
    assert "--disable-shared-experts-fusion" in command
    assert "--device" not in command and "--skip-tokenizer-init" not in command


def test_the_trainers_ranks_do_not_reach_a_server():
    torchrun = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    torchrun |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    given = {**torchrun, "HOME": "/home/user", "OMP_NUM_THREADS": "8"}
    environment = server_environment(given, LaunchConfig(device="cpu"), 0)
    assert not torchrun.keys() & environment.keys()
    assert environment["HOME"] == "/home/user" and environment["OMP_NUM_THREADS"] == "1"


def test_ranks_of_a_cpu_server_are_bound_to_cores():
    environment = server_environment({}, LaunchConfig(device="cpu", tensor_parallel=2), 0)
    cores = environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(cores) == 2 and {int(core) for core in cores} <= os.sched_getaffinity(0)


def test_devices_of_gpu_servers():
    launch = LaunchConfig(count=2, tensor_parallel=2, first_device=4)
    assert server_environment({}, launch, 1)["CUDA_VISIBLE_DEVICES"] == "6,7"
    listed = {"CUDA_VISIBLE_DEVICES": "8,9,10,11,12,13,14,15"}
    assert server_environment(listed, launch, 0)["CUDA_VISIBLE_DEVICES"] == "12,13"
    with pytest.raises(ConfigError, match="rollout.launch.first_device: 4: server 1 takes devices 6 to 7.*lists 4"):
        server_environment({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, launch, 1)
