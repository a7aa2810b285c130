"""Starts SGLang servers on this machine, waits until they answer, and takes them down again in any case."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gspo_megatron.config import ConfigError, LaunchConfig
from gspo_megatron.rollout.errors import ServerError

HOST = "127.0.0.1"
POLL_S = 0.5
REPORT_EVERY_S = 15.0
LOG_TAIL_LINES = 25
HUNG_S = 60.0
"""A server that has not answered for as long, in seconds, is as good as dead; a busy one may take some."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
CPU_FLAGS: dict[str, Any] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,
    "grammar-backend": "none",
    "skip-server-warmup": True,
    "sleep-on-idle": True,  # or the scheduler keeps a core busy while the trainer's ranks want it
    "max-total-tokens": 16384,
    "max-running-requests": 64,
}
"""What makes the server run without a GPU; `rollout.launch.args` overrides them one by one."""

TRAINER_VARIABLES = frozenset(
    "RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE"
    " MASTER_ADDR MASTER_PORT CUDA_DEVICE_MAX_CONNECTIONS".split()
)
"""Set by torchrun or for Megatron; a server that inherits them joins the trainer's rendezvous or runs slower."""


@dataclass(eq=False)
class _Server:
    url: str
    log: Path
    command: list[str]
    environment: dict[str, str]
    process: subprocess.Popen = field(init=False)
    """The supervisor, leader of the server's process group."""
    starts: int = 0

    def start(self) -> None:
        with self.log.open("ab" if self.starts else "wb") as output:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=self.environment, start_new_session=True,
            )  # fmt: skip
        self.starts += 1

    def end(self) -> None:
        """Takes its whole process group down at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(5.0)

    def ended(self) -> bool:
        """Without reaping the process: until then no other process group can get its number."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"last lines of {self.log}:\n" + "\n".join(lines)


class ServerProcesses:
    """A context manager around `launch.count` servers; `urls` is filled on entry."""

    def __init__(
        self,
        launch: LaunchConfig,
        model_dir: str | Path,
        dtype: str,
        log_dir: str | Path,
        seed: int,
        stop_grace_s: float = 10.0,
        report: Callable[[str], None] = print,
    ):
        if dtype not in DTYPES:
            raise ConfigError(f"train.dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
        self._launch, self._model_dir, self._dtype = launch, str(Path(model_dir).absolute()), DTYPES[dtype]
        self._log_dir, self._seed, self._stop_grace_s, self._report = Path(log_dir), seed, stop_grace_s, report
        self._servers: list[_Server] = []
        self._starting: list[_Server] = []
        """Started again, and not known to have answered since."""

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self._servers)

    def __enter__(self) -> "ServerProcesses":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception) -> None:
        self.stop()

    def start(self) -> None:
        """Start all servers and wait until they answer.

        Raises ConfigError before anything starts (port, devices), and ServerError when a server ends or does not answer
        within `rollout.launch.ready_timeout_s`.
        """
        ports = _ports(self._launch)
        environments = [server_environment(os.environ, self._launch, index) for index in range(self._launch.count)]
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for index, (port, environment) in enumerate(zip(ports, environments, strict=True)):
            log = self._log_dir / f"server_{index}.log"
            command = server_command(self._launch, self._model_dir, self._dtype, port, self._seed + index)
            supervisor = [sys.executable, "-m", "gspo_megatron.rollout.supervise", "--parent", str(os.getpid())]
            supervisor += ["--grace", str(self._stop_grace_s), "--"]
            server = _Server(f"http://{HOST}:{port}", log, [*supervisor, *command], environment)
            server.start()
            self._servers.append(server)
        self._wait_until_ready(self._servers)

    def revive(self) -> None:
        """Start servers again that ended by themselves, without waiting for them.

        Raises ServerError, with the end of its log, for one that did so more than `rollout.launch.restarts` times.
        """
        for server in self._servers:
            if server.ended():
                self._start_again(server, "ended by itself")

    def revive_and_wait(self, urls: Collection[str]) -> None:
        """Have these servers answer: those that don't are started again, when they ended, or hang for a minute.

        Raises ServerError as `revive` does, and where one does not answer in time.
        """
        servers, patience = [server for server in self._servers if server.url in urls], time.monotonic() + HUNG_S
        for server in servers:
            while server not in self._starting and not self._answers(server):
                if server.ended():
                    self._start_again(server, "ended by itself")
                elif time.monotonic() > patience:
                    self._start_again(server, "does not answer")
                else:
                    time.sleep(POLL_S)
        self._wait_until_ready(servers)

    def _start_again(self, server: _Server, why: str) -> None:
        if server.starts > self._launch.restarts:
            raise ServerError(
                f"the SGLang server at {server.url} {why}, for the last time that rollout.launch.restarts ="
                f" {self._launch.restarts} allows; {server.log_tail()}"
            )
        self._report(f"the SGLang server at {server.url} {why} and is started again; log: {server.log}")
        server.end()
        server.start()
        self._starting.append(server)

    def stop(self) -> None:
        """End all servers: SIGTERM, then SIGKILL to what is left of their process groups. Takes the grace and 5 s."""
        for server in self._servers:
            if not server.ended():
                os.kill(server.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self._stop_grace_s + 5.0
        for server in self._servers:
            while not server.ended() and time.monotonic() < deadline:
                time.sleep(0.05)
            if not server.ended():
                self._report(f"the SGLang server at {server.url} does not stop, killing its process group")
            server.end()
        self._servers.clear()

    def _wait_until_ready(self, servers: Sequence[_Server]) -> None:
        started, reported = time.monotonic(), time.monotonic()
        waiting = list(servers)
        while waiting:
            for server in waiting:
                if server.ended():
                    raise ServerError(f"the SGLang server at {server.url} ended by itself; {server.log_tail()}")
            waiting = [server for server in waiting if not self._answers(server)]
            now = time.monotonic()
            if waiting and now - started > self._launch.ready_timeout_s:
                raise ServerError(
                    f"the SGLang server at {waiting[0].url} did not answer within rollout.launch.ready_timeout_s ="
                    f" {self._launch.ready_timeout_s:g}; give it longer, or see its log; {waiting[0].log_tail()}"
                )
            if waiting and now - reported > REPORT_EVERY_S:
                reported = now
                logs = ", ".join(str(server.log) for server in waiting)
                self._report(f"waiting for {len(waiting)} SGLang server(s), {now - started:.0f} s so far; log: {logs}")
            if waiting:
                time.sleep(POLL_S)
        self._starting = [server for server in self._starting if server not in servers]
        seconds = time.monotonic() - started
        if seconds > POLL_S:
            urls = ", ".join(server.url for server in servers)
            self._report(f"{len(servers)} SGLang server(s) ready after {seconds:.0f} s: {urls}")

    def _answers(self, server: _Server) -> bool:
        try:
            answer = httpx.get(f"{server.url}/server_info", timeout=5.0, trust_env=False)
        except httpx.TransportError:
            return False
        if answer.status_code != 200:
            return False
        found = answer.json().get("model_path")
        if found != self._model_dir:
            raise ServerError(f"another program answers at {server.url}: it serves {found}, not {self._model_dir}")
        return True


launch_servers = ServerProcesses


def server_command(launch: LaunchConfig, model_dir: str, dtype: str, port: int, seed: int) -> list[str]:
    """The command line of one server; `dtype` is SGLang's name of the type."""
    on_cpu = launch.device == "cpu"
    module = "gspo_megatron.rollout.sglang_cpu" if on_cpu else "sglang.launch_server"
    flags: dict[str, Any] = {"model-path": model_dir, "host": HOST, "port": port, "dtype": dtype, "random-seed": seed}
    flags["tp-size"] = launch.tensor_parallel
    # fused into the routed experts, shared ones have no names that a weight sync could be held against
    flags["disable-shared-experts-fusion"] = True
    if on_cpu:
        flags.update(CPU_FLAGS)
    flags.update({name.lstrip("-").replace("_", "-"): value for name, value in launch.args.items()})
    command = [sys.executable, "-m", module]
    for name, value in flags.items():
        if value is True:
            command.append(f"--{name}")
        elif isinstance(value, (list, tuple)):
            command += [f"--{name}", *map(str, value)]
        elif value is not False and value is not None:
            command += [f"--{name}", str(value)]
    return command


def server_environment(environment: Mapping[str, str], launch: LaunchConfig, index: int) -> dict[str, str]:
    """The environment of server `index`: the trainer's own without its ranks, with the server's devices.

    Raises ConfigError when CUDA_VISIBLE_DEVICES does not list the devices that the server is to take.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name not in TRAINER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    for name in ("no_proxy", "NO_PROXY"):
        kept[name] = ",".join(filter(None, [environment.get(name), HOST, "localhost"]))
    if launch.device == "cpu":
        kept["OMP_NUM_THREADS"] = "1"
        if launch.tensor_parallel > 1:
            # without it SGLang wants a NUMA node for every rank
            cores, first = sorted(os.sched_getaffinity(0)), index * launch.tensor_parallel
            bound = [str(cores[(first + rank) % len(cores)]) for rank in range(launch.tensor_parallel)]
            kept.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(bound))
        return kept
    first = launch.first_device + index * launch.tensor_parallel
    wanted = range(first, first + launch.tensor_parallel)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    devices = [str(device) for device in wanted]
    if visible is not None:
        listed = [device for device in visible.split(",") if device]
        if wanted.stop > len(listed):
            raise ConfigError(
                f"rollout.launch.first_device: {launch.first_device}: server {index} takes devices {first} to"
                f" {wanted.stop - 1}, and CUDA_VISIBLE_DEVICES={visible} lists {len(listed)};"
                " make more devices visible to rank 0, or lower rollout.launch.count or tensor_parallel"
            )
        devices = [listed[device] for device in wanted]
    kept["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return kept


def _ports(launch: LaunchConfig) -> list[int]:
    """One free port a server. Raises ConfigError when a chosen one is taken."""
    sockets = []
    try:
        for index in range(launch.count):
            port = launch.port and launch.port + index
            listener = socket.socket()
            sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"rollout.launch.port: {launch.port}: server {index} can't listen on {HOST}:{port} ({error});"
                    " choose another port, or 0 for free ones"
                ) from error
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()
