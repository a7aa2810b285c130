"""Collects the scored responses of one step from the servers."""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from gspo_megatron.config import ConfigError, RolloutConfig
from gspo_megatron.rollout.client import (
    MIN_RESPONSE_ROOM,
    RestartedServer,
    SGLangClient,
    VersionMismatch,
    validate_prompt,
)
from gspo_megatron.rollout.errors import RequestError, RolloutError, ServersLost
from gspo_megatron.rollout.pool import PooledServer, RetryPolicy, ServerPool
from gspo_megatron.rollout.preflight import survey
from gspo_megatron.types import Completion, Prompt, Rollout, Sample

PROGRESS_EVERY_S = 30.0

Score = Callable[[Sequence[Prompt], Sequence[Completion]], list[float]]


class Collector:
    """Asks servers for `samples_per_prompt` responses to each prompt and has them scored.

    `score` takes one group ([G] times the same prompt, [G] completions) and gives [G] finite rewards; it is called in
    one thread of its own while generation goes on. `max_prompt_tokens` is the longest prompt that will ever come, so
    that `check_servers` can tell whether it fits.
    """

    def __init__(
        self,
        config: RolloutConfig,
        urls: Sequence[str],
        *,
        stop_token_ids: Sequence[int],
        vocab_size: int,
        score: Score,
        report: Callable[[str], None] = print,
        max_prompt_tokens: int = 1,
        policy: RetryPolicy | None = None,
    ):
        if not urls:
            raise ConfigError("rollout.servers: no server; give URLs there, or have some started by rollout.launch")
        self._config, self._score, self._report = config, score, report
        self._vocab_size, self._max_prompt_tokens = vocab_size, max_prompt_tokens
        self._policy = policy or RetryPolicy()
        connections = max(1, config.concurrency)
        clients = [SGLangClient(url, config.request_timeout_s, connections=connections) for url in urls]
        self._pool = ServerPool(clients, config.concurrency, self._policy, report)
        self._token_limit: int | None = None
        self._sampling = {
            "temperature": config.temperature,
            "max_new_tokens": config.max_response_tokens,
            "stop_token_ids": list(stop_token_ids),
            # the trainer models the temperature and nothing else; a server's own defaults must not come in
            "top_p": config.top_p,
            "top_k": config.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
        }

    def check_servers(self) -> None:
        """Ask every server what it serves; those that don't answer are left out until they do.

        Raises ConfigError when none answers, when they serve different models, when the vocabulary is not ours, and
        when the longest prompt and response don't fit.
        """
        found, errors = survey([server.client for server in self._pool.servers], self._policy.probe_timeout_s)
        for server in self._pool.servers:
            if server.url in errors:
                self._pool.set_aside(server, errors[server.url])
        if not found:
            raise ConfigError(f"rollout.servers: none answers; {self._pool.describe()}")
        self._token_limit = found.check(self._vocab_size, self._report)
        self._check_length(self._max_prompt_tokens)

    def serve_from(self, urls: Collection[str]) -> None:
        """Only these servers have the current weights and get requests."""
        self._pool.serve_from(urls)

    def collect(
        self, prompts: Sequence[Prompt], weight_version: int, recover: Callable[[ServersLost], None] | None = None
    ) -> Rollout:
        """[P] prompts to P * G samples, group by group in the order of `prompts`, all under `weight_version`.

        Where no server with these weights is left, `recover` is called to bring some back, and the prompts that have no
        responses yet are asked again. Raises RolloutError naming the prompt or the servers, ConfigError for a prompt
        that does not fit.
        """
        for prompt in prompts:
            try:
                validate_prompt(prompt.token_ids, self._vocab_size)
            except ValueError as error:
                raise ConfigError(f"data.train: prompt {prompt.index}: {error}") from error
        if self._token_limit is None:
            self.check_servers()
        self._check_length(max((len(prompt.token_ids) for prompt in prompts), default=0))
        collection = _Collection(self, prompts, weight_version, can_recover=recover is not None)
        while True:
            try:
                return asyncio.run(collection.run())
            except ServersLost as lost:
                if recover is None:
                    raise
                recover(lost)
            except BaseExceptionGroup as group:
                first = _first_of(group)
                if recover is None or not isinstance(first, ServersLost):
                    raise first from first.__cause__
                recover(first)

    def close(self) -> None:
        for server in self._pool.servers:
            server.client.close()

    def _check_length(self, prompt_tokens: int) -> None:
        response = self._config.max_response_tokens
        if prompt_tokens + max(response, MIN_RESPONSE_ROOM) > self._token_limit:
            raise ConfigError(
                f"rollout.max_response_tokens: {response}: with a prompt of {prompt_tokens} tokens this is more than"
                f" the {self._token_limit} tokens that a server holds, and it would cut responses short; lower it or"
                " data.max_prompt_tokens, or start servers with a larger --context-length and --max-total-tokens"
            )


def _first_of(group: BaseExceptionGroup) -> BaseException:
    """What went wrong first, and not what that brought about: lost servers matter where nothing else is the matter."""
    found = [inner for each in group.exceptions for inner in (
        [_first_of(each)] if isinstance(each, BaseExceptionGroup) else [each]
    )]  # fmt: skip
    return next((error for error in found if not isinstance(error, ServersLost)), found[0])


class _Collection:
    """One call of `collect`: a bounded number of workers take prompts in order. May run again for what it lacks."""

    def __init__(self, collector: Collector, prompts: Sequence[Prompt], weight_version: int, can_recover: bool):
        self._config, self._policy, self._pool = collector._config, collector._policy, collector._pool
        self._sampling, self._vocab_size = collector._sampling, collector._vocab_size
        self._score, self._report = collector._score, collector._report
        self._prompts, self._version = prompts, weight_version
        self._groups: list[list[Sample] | None] = [None] * len(prompts)
        self._under_way: dict[int, tuple[float, str]] = {}
        """Position of a prompt -> when its generation started, and at which server it is."""
        self._started = time.monotonic()
        self._stopped, self._can_recover = False, can_recover

    async def run(self) -> Rollout:
        self._stopped = False
        samples = self._config.samples_per_prompt
        workers = len(self._pool.servers) * max(1, self._config.concurrency // samples)
        positions = iter([position for position, group in enumerate(self._groups) if group is None])
        executor = ThreadPoolExecutor(1, thread_name_prefix="score")
        try:
            async with self._pool:
                progress = asyncio.create_task(self._progress())
                try:
                    async with asyncio.TaskGroup() as tasks:
                        for _ in range(min(workers, len(self._prompts))):
                            tasks.create_task(self._work(positions, tasks, executor))
                finally:
                    progress.cancel()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
        return Rollout(tuple(itertools.chain.from_iterable(self._groups)))

    async def _work(self, positions, tasks: asyncio.TaskGroup, executor: ThreadPoolExecutor) -> None:
        try:
            for position in positions:
                completions = await self._generate(position)
                tasks.create_task(self._score_group(position, completions, executor))
        except BaseException:
            self._stopped = True
            raise

    async def _generate(self, position: int) -> list[Completion]:
        prompt, samples = self._prompts[position], self._config.samples_per_prompt
        failed_at, error = "", None
        for attempt in range(self._config.retries + 1):
            if attempt:
                await asyncio.sleep(self._policy.backoff(attempt))
            if self._stopped:
                # a connection that fails in the same moment can swallow the task group's cancellation
                raise asyncio.CancelledError
            server = await self._pool.acquire(samples, avoid=failed_at, give_up=self._can_recover)
            self._under_way[position] = (time.monotonic(), server.url)
            try:
                completions = await server.client.generate(prompt.token_ids, self._sampling, samples, self._vocab_size)
                self._check_versions(prompt, server, completions)
            except VersionMismatch as mismatch:
                raise self._wrong_version(prompt, server, ", ".join(mismatch.found)) from mismatch
            except RestartedServer as restarted:
                self._pool.leave_out(server, restarted)
                failed_at, error = server.url, restarted
            except RequestError as failure:
                if not failure.retryable:
                    raise RolloutError(f"prompt {prompt.index}: {failure}") from failure
                failed_at, error = server.url, failure
                self._pool.failed(server, failure)
            else:
                self._pool.succeeded(server)
                return completions
            finally:
                del self._under_way[position]
                self._pool.release(server, samples)
        raise RolloutError(
            f"prompt {prompt.index}: failed {self._config.retries + 1} times, the last time with: {error};"
            f" servers: {self._pool.describe()}"
        ) from error

    def _check_versions(self, prompt: Prompt, server: PooledServer, completions: Sequence[Completion]) -> None:
        for completion in completions:
            if completion.weight_version != self._version:
                raise self._wrong_version(prompt, server, str(completion.weight_version))

    def _wrong_version(self, prompt: Prompt, server: PooledServer, found: str) -> RolloutError:
        return RolloutError(
            f"prompt {prompt.index}: {server.url} answered under weight version {found}, expected {self._version};"
            " does another run send weights to it, or was it restarted?"
        )

    async def _score_group(self, position: int, completions: list[Completion], executor: ThreadPoolExecutor) -> None:
        prompt = self._prompts[position]
        group = [prompt] * len(completions)
        loop = asyncio.get_running_loop()
        try:
            rewards = await loop.run_in_executor(executor, self._score, group, completions)
        except Exception as error:
            raise RolloutError(f"prompt {prompt.index}: scoring failed: {type(error).__name__}: {error}") from error
        if len(rewards) != len(completions):
            raise RolloutError(f"prompt {prompt.index}: {len(rewards)} rewards for {len(completions)} responses")
        if not all(math.isfinite(reward) for reward in rewards):
            raise RolloutError(f"prompt {prompt.index}: a reward is not finite: {list(rewards)}")
        self._groups[position] = [
            Sample(
                group=position,
                prompt_ids=prompt.token_ids,
                response_ids=completion.token_ids,
                rollout_log_probs=completion.log_probs,
                reward=float(reward),
                finish_reason=completion.finish_reason,
                weight_version=completion.weight_version,
            )
            for completion, reward in zip(completions, rewards, strict=True)
        ]

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            now = time.monotonic()
            done = sum(group is not None for group in self._groups)
            line = f"collected {done} of {len(self._prompts)} prompts in {now - self._started:.0f} s"
            if self._under_way:
                position, (since, url) = min(self._under_way.items(), key=lambda item: item[1])
                line += f"; slowest: prompt {self._prompts[position].index}, {now - since:.0f} s at {url}"
            elif done < len(self._prompts):
                line += "; all generated or waiting for a server, scoring goes on"
            self._report(line)
