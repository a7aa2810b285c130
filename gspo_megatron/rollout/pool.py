"""Which server gets the next request, and which ones are left alone for a while because they fail."""

import asyncio
import random
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from gspo_megatron.rollout.client import SGLangClient
from gspo_megatron.rollout.errors import RequestError, RolloutError, ServersLost


@dataclass(frozen=True)
class RetryPolicy:
    """How failures are met; all times in seconds."""

    first_backoff_s: float = 0.5
    """Pause before the second try; doubles with every further one."""
    max_backoff_s: float = 30.0
    failures_before_aside: int = 3
    """A server that fails as often in a row gets no requests until it answers a probe."""
    probe_every_s: float = 5.0
    probe_timeout_s: float = 10.0
    no_server_s: float = 60.0
    """Collection is given up when no server has lived for as long."""

    def backoff(self, attempt: int) -> float:
        """Pause before try `attempt` (1 is the second one), with jitter so that retries don't come all at once."""
        return min(self.max_backoff_s, self.first_backoff_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)


@dataclass
class PooledServer:
    client: SGLangClient
    in_flight: int = 0
    """Samples asked for and not yet answered."""
    failures: int = 0
    """Failed requests since the last good one."""
    aside_since: float | None = None
    left_out: bool = False
    """It has not got the current weights: no requests and no probes until `serve_from` names it."""
    last_error: str = "no error so far"

    @property
    def url(self) -> str:
        return self.client.url


class ServerPool:
    """Use as `async with pool:`; what it knows about its servers outlives the block and the event loop.

    `concurrency` bounds the samples under way on one server.
    """

    def __init__(
        self, clients: Sequence[SGLangClient], concurrency: int, policy: RetryPolicy, report: Callable[[str], None]
    ):
        self.servers = [PooledServer(client) for client in clients]
        self._concurrency, self._policy, self._report = concurrency, policy, report
        self._changed: asyncio.Event | None = None
        self._stack: AsyncExitStack | None = None
        self._prober: asyncio.Task | None = None

    async def __aenter__(self) -> "ServerPool":
        self._changed, self._stack = asyncio.Event(), AsyncExitStack()
        for server in self.servers:
            server.in_flight = 0
            if server.aside_since is not None:
                server.aside_since = time.monotonic()
            await self._stack.enter_async_context(server.client)
        self._prober = asyncio.create_task(self._probe_forever())
        return self

    async def __aexit__(self, *exception) -> None:
        # more than once: a connection that fails in the same moment can swallow a cancellation
        while not self._prober.done():
            self._prober.cancel()
            await asyncio.wait([self._prober], timeout=0.2)
        await self._stack.aclose()

    async def acquire(self, samples: int, avoid: str = "", give_up: bool = False) -> PooledServer:
        """The least loaded living server with room for `samples` more, not `avoid` where there is another.

        Raises RolloutError when no server has lived for `no_server_s`; ServersLost at once when none that lives has the
        current weights, and with `give_up` when none lives.
        """
        while True:
            server = self._choose(samples, avoid)
            if server is not None:
                server.in_flight += samples
                return server
            self._give_up_without_servers(give_up)
            self._changed.clear()
            try:
                async with asyncio.timeout(1.0):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def release(self, server: PooledServer, samples: int) -> None:
        server.in_flight -= samples
        self._changed.set()

    def succeeded(self, server: PooledServer) -> None:
        server.failures, server.aside_since = 0, None

    def failed(self, server: PooledServer, error: RequestError) -> None:
        server.failures += 1
        server.last_error = str(error)
        if server.failures >= self._policy.failures_before_aside:
            self.set_aside(server, error)

    def set_aside(self, server: PooledServer, error: RequestError) -> None:
        server.last_error = str(error)
        server.failures = max(server.failures, self._policy.failures_before_aside)
        if server.aside_since is None:
            server.aside_since = time.monotonic()
            self._report(f"{server.url} gets no requests until it answers again: {error}")

    def leave_out(self, server: PooledServer, error: RequestError) -> None:
        server.left_out, server.last_error = True, str(error)
        self._report(f"{server.url} gets no requests until it has the current weights: {error}")

    def serve_from(self, urls: Collection[str]) -> None:
        """These servers have the current weights; others get no requests."""
        for server in self.servers:
            server.left_out = server.url not in urls
            if not server.left_out:
                server.failures, server.aside_since = 0, None

    def describe(self) -> str:
        return "; ".join(f"{server.url}: {server.last_error}" for server in self.servers)

    def _choose(self, samples: int, avoid: str) -> PooledServer | None:
        living = [server for server in self.servers if server.aside_since is None and not server.left_out]
        living = [server for server in living if server.url != avoid] or living
        # a group larger than the bound still has to run, alone
        free = [s for s in living if s.in_flight == 0 or s.in_flight + samples <= self._concurrency]
        return min(free, key=lambda server: server.in_flight, default=None)

    def _give_up_without_servers(self, at_once: bool) -> None:
        candidates = [server for server in self.servers if not server.left_out]
        if any(server.aside_since is None for server in candidates):
            return
        if at_once or not candidates:
            raise ServersLost(f"no SGLang server has the current weights and answers: {self.describe()}")
        seconds = time.monotonic() - max(server.aside_since for server in candidates)
        if seconds >= self._policy.no_server_s:
            raise RolloutError(f"no SGLang server lives, waited {seconds:.0f} s for one: {self.describe()}")

    async def _probe_forever(self) -> None:
        while True:
            aside = [server for server in self.servers if server.aside_since is not None and not server.left_out]
            await asyncio.gather(*map(self._probe, aside))
            await asyncio.sleep(self._policy.probe_every_s)

    async def _probe(self, server: PooledServer) -> None:
        try:
            await server.client.probe(self._policy.probe_timeout_s)
        except RequestError as error:
            server.last_error = str(error)
            return
        # one more failure sets it aside again: it may answer probes and still not generate
        server.failures, server.aside_since = self._policy.failures_before_aside - 1, None
        self._report(f"{server.url} answers again")
        self._changed.set()
