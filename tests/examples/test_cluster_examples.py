"""The cluster examples without a cluster: configurations pass the preflight, scripts pass shellcheck, and the Slurm
script runs from start to end with srun, scontrol, curl, sglang and torchrun replaced by small stand-ins.

Not tested here: Slurm itself, containers, and that the settings train well.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.config.fakes import QWEN3_8B, QWEN3_30B_A3B, write_checkpoint

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "examples" / "slurm" / "qwen3_30b_a3b.sbatch"
TORCHRUN = ROOT / "examples" / "torchrun_qwen3_30b_a3b.sh"
SCRIPTS = [SBATCH, TORCHRUN, ROOT / "requirements" / "make_venv.sh", ROOT / ".ci" / "run"]

STAND_INS = {
    "scontrol": r"""
        if [ "$1" = requeue ]; then echo "$2" >>"$FAKE/requeued"; else printf "%s\n" $FAKE_NODES; fi
    """,
    # The command after the options, once for every node of --nodelist; signals go to all, as srun forwards them.
    "srun": r"""
        echo "$*" >>"$FAKE/srun"
        nodes=""
        while [ "${1#--}" != "$1" ]; do
            case $1 in --nodelist=*) nodes=${1#--nodelist=} ;; esac
            shift
        done
        pids=""; id=0
        for node in ${nodes//,/ }; do
            SLURM_NODEID=$id "$@" & pids="$pids $!"; id=$((id + 1))
        done
        trap 'kill -TERM $pids' TERM
        trap 'kill -USR1 $pids' USR1
        status=0
        for pid in $pids; do
            while :; do
                wait "$pid"; code=$?
                kill -0 "$pid" 2>/dev/null || break
            done
            [ "$code" = 0 ] || status=$code
        done
        exit "$status"
    """,
    "python": r"""
        echo "$*" >>"$FAKE/servers"
        while [ "$1" != --port ]; do shift; done
        port=$2
        [ "$port" != "${FAKE_DYING_PORT:-}" ] || exit 3
        trap 'echo "$port" >>"$FAKE/stopped"; exit 0' TERM
        [ "$port" = "${FAKE_MUTE_PORT:-}" ] || touch "$FAKE/ready.$port"
        while :; do sleep 0.05; done
    """,
    "curl": r"""
        for url; do :; done
        port=${url%/server_info}; port=${port##*:}
        [ -e "$FAKE/ready.$port" ] || exit 7
    """,
    "torchrun": r"""
        echo "$*" >>"$FAKE/torchrun"
        trap 'echo trainer >>"$FAKE/stopped"; exit 0' TERM
        trap 'sleep 0.3; echo trainer >>"$FAKE/saved"; exit 1' USR1
        if [ -n "${FAKE_TRAINING:-}" ]; then touch "$FAKE/training"; while :; do sleep 0.05; done; fi
        exit "${FAKE_STATUS:-0}"
    """,
    "sleep": 'exec /bin/sleep "$(case $1 in 2) echo 0.1 ;; *) echo "$1" ;; esac)"',
}


@pytest.fixture
def job(tmp_path):
    """A function that starts the Slurm script in a world of stand-ins; `job.lines(name)` is what a stand-in noted."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    notes = tmp_path / "notes"
    notes.mkdir()
    started = []

    def start(*arguments: str, nodes: str = "node0 node1 node2", **environment: str) -> subprocess.Popen:
        world = os.environ | {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "FAKE": str(notes),
            "FAKE_NODES": nodes,
            "SLURM_JOB_NODELIST": "node[0-2]",
            "SLURM_SUBMIT_DIR": str(ROOT),
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(
            ["bash", str(SBATCH), *arguments], env=world | environment, start_new_session=True, **pipes
        )
        started.append(process)
        return process

    def lines(name: str) -> list[str]:
        path = notes / name
        return path.read_text().splitlines() if path.exists() else []

    start.lines, start.notes = lines, notes
    yield start
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended, as it should


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=60)
    return output


def test_the_job_starts_servers_hands_their_urls_to_the_trainer_and_stops_all(job):
    process = job("train.steps=3", SERVER_TP="4", MODEL="some/model")
    output = finish(process)
    assert process.returncode == 0, output
    servers = job.lines("servers")
    assert len(servers) == 2 and all("-m sglang.launch_server --model-path some/model" in line for line in servers)
    assert {line[line.index("--port") :].split(" --mem")[0] for line in servers} == {
        "--port 30000 --tp-size 4 --base-gpu-id 0",
        "--port 30200 --tp-size 4 --base-gpu-id 4",
    }
    ranks = sorted(job.lines("torchrun"))
    assert len(ranks) == 2
    for rank, line in enumerate(ranks):
        assert f"--nnodes 2 --node-rank {rank} --nproc-per-node 8 --master-addr node0 --master-port 29500" in line
        assert "-m gspo_megatron train examples/qwen3_30b_a3b.yaml" in line
        assert line.endswith(
            "model.hf=some/model rollout.servers=[http://node2:30000,http://node2:30200] train.steps=3"
        )
    assert sorted(job.lines("stopped")) == ["30000", "30200"]
    assert "all steps stopped" in output


def test_the_trainers_exit_status_is_the_jobs(job):
    process = job(FAKE_STATUS="5")
    finish(process)
    assert process.returncode == 5
    assert len(job.lines("stopped")) == 4  # four servers of two GPUs


def test_a_server_that_dies_while_starting_ends_the_job(job):
    process = job(FAKE_DYING_PORT="30200", SERVER_TP="4")
    output = finish(process)
    assert process.returncode == 1 and "http://node2:30200 ended while starting" in output
    assert job.lines("torchrun") == [] and job.lines("stopped") == ["30000"]


def test_waiting_for_a_server_is_bounded(job):
    process = job(FAKE_MUTE_PORT="30000", SERVER_TP="8", READY_TIMEOUT_S="1")
    output = finish(process)
    assert process.returncode == 1 and "no answer from http://node2:30000 within READY_TIMEOUT_S=1 s" in output
    assert job.lines("torchrun") == [] and job.lines("stopped") == ["30000"]


def start_training(job, **environment: str) -> subprocess.Popen:
    process = job(FAKE_TRAINING="1", SERVER_TP="8", **environment)
    deadline = time.monotonic() + 30
    while not (job.notes / "training").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


def test_sigterm_during_training_stops_trainer_and_servers(job):
    process = start_training(job)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 143, output
    assert sorted(set(job.lines("stopped"))) == ["30000", "trainer"]


@pytest.mark.parametrize("requeue", ["0", "1"])
def test_near_the_time_limit_the_trainer_saves_before_servers_are_stopped(job, requeue):
    process = start_training(job, REQUEUE=requeue, SLURM_JOB_ID="77")
    process.send_signal(signal.SIGUSR1)
    output = finish(process)
    assert process.returncode == 124, output
    assert set(job.lines("saved")) == {"trainer"} and job.lines("stopped") == ["30000"]
    assert job.lines("requeued") == (["77"] if requeue == "1" else [])


def test_too_few_nodes_are_refused(job):
    process = job(nodes="node0 node1")
    assert "2 nodes are too few" in finish(process)
    assert process.returncode == 2 and job.lines("servers") == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    answer = subprocess.run([shellcheck, "--shell=bash", script], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize(
    ("config", "sizes", "world", "most_gib"),
    [
        ("examples/qwen3_30b_a3b.yaml", QWEN3_30B_A3B, 16, 60),
        ("examples/configs/qwen3_8b_one_node.yaml", QWEN3_8B, 4, 60),
    ],
)
def test_example_configurations_pass_the_preflight_and_fit_80_gb(tmp_path, config, sizes, world, most_gib):
    # Sparse files stand for 61 GB of weights.
    model = write_checkpoint(tmp_path / "model", sizes, num_shards=16)
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}) + "\n")
    overrides = [f"model.hf={model}", f"run.dir={tmp_path / 'run'}"]
    if "launch:" not in (ROOT / config).read_text():
        overrides += ["rollout.servers=[http://node2:30000]", f"data.train={data}"]
    command = [sys.executable, "-m", "gspo_megatron", "check", config, "--world-size", str(world), *overrides]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    rows = [line.split() for line in answer.stdout.splitlines() if line.startswith(("first ", "last ", "only "))]
    assert rows and all(float(row[-1]) < most_gib for row in rows), answer.stdout
