"""One SGLang server over HTTP: token ids in, token ids out, and the control calls of a weight update."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from gspo_megatron.config import ConfigError
from gspo_megatron.rollout.errors import RequestError
from gspo_megatron.types import Completion

CONTEXT_MARGIN = 4
"""`max_req_input_len` plus this is the longest prompt and response together that is not cut short in silence."""
MIN_RESPONSE_ROOM = 5
"""A prompt has to leave this much of it, whatever the response's bound: longer ones are refused."""


class SGLangClient:
    """Calls of one server. `timeout_s`, in seconds, bounds the whole of `generate`, and each silence in other calls.

    `generate` is a coroutine and needs `async with client:` around its use; all else is synchronous and thread-safe.
    Failed calls raise RequestError with the URL, the endpoint, the status and the server's own words.
    """

    def __init__(self, url: str, timeout_s: float, *, connections: int = 256):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"rollout.servers: {url!r} is no URL of a server; write http://HOST:PORT")
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        # no trust_env: a proxy of the environment has no business between the trainer and its servers
        self._sync = httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)
        self._async: httpx.AsyncClient | None = None

    async def __aenter__(self) -> "SGLangClient":
        self._async = httpx.AsyncClient(base_url=self.url, timeout=self.timeout_s, trust_env=False, limits=self._limits)
        return self

    async def __aexit__(self, *exception) -> None:
        client, self._async = self._async, None
        await client.aclose()

    def close(self) -> None:
        self._sync.close()

    # what the server is

    def server_info(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The resolved start-up configuration. `weight_version` in it is the one of the start."""
        return self._call("GET", "/server_info", timeout_s=timeout_s)

    def model_info(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Model path, architectures, and the weight version of now."""
        return self._call("GET", "/model_info", timeout_s=timeout_s)

    def weight_version(self) -> str:
        return str(self.model_info()["weight_version"])

    async def probe(self, timeout_s: float) -> None:
        """Raises RequestError unless the server's scheduler answers within `timeout_s` seconds."""
        try:
            response = await self._async.get("/server_info", timeout=timeout_s)
        except httpx.TransportError as error:
            raise self._no_answer("/server_info", error, timeout_s) from error
        self._read("/server_info", response)

    # sampling

    async def generate(
        self, input_ids: Sequence[int], sampling: dict[str, Any], num_samples: int, vocab_size: int
    ) -> list[Completion]:
        """`num_samples` responses to one prompt, each with as many log-probs as tokens, all finite.

        Raises ValueError for a prompt that would kill the server, RequestError for everything that it answers.
        """
        validate_prompt(input_ids, vocab_size)
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {**sampling, "n": num_samples},
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
        }
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._async.post("/generate", json=body)
        except (httpx.TransportError, TimeoutError) as error:
            raise self._no_answer("/generate", error, self.timeout_s) from error
        answer = self._read("/generate", response)
        outputs = answer if isinstance(answer, list) else [answer]
        if len(outputs) != num_samples:
            raise MalformedAnswer(self.url, f"{len(outputs)} responses, asked for {num_samples}")
        return [self._completion(output, vocab_size) for output in outputs]

    def _completion(self, output: dict[str, Any], vocab_size: int) -> Completion:
        try:
            meta, token_ids = output["meta_info"], output["output_ids"]
            finish = meta["finish_reason"]
            pairs = meta.get("output_token_logprobs") or []
            version = str(meta["weight_version"])
            spans = {str(span["version"]) for span in meta.get("weight_versions") or ()} | {version}
        except (KeyError, TypeError) as error:
            raise MalformedAnswer(self.url, f"an answer without {error}: {str(output)[:300]}") from error
        if finish["type"] == "abort":
            raise RequestError(self.url, "/generate", None, f"aborted: {finish.get('message', 'no reason given')}")
        if len(pairs) != len(token_ids) or any(pair[1] != token for pair, token in zip(pairs, token_ids, strict=True)):
            raise MalformedAnswer(self.url, f"{len(token_ids)} tokens with log-probs of {len(pairs)} or other tokens")
        log_probs = tuple(math.nan if pair[0] is None else float(pair[0]) for pair in pairs)
        if not all(map(math.isfinite, log_probs)):
            raise MalformedAnswer(self.url, f"log-probs that are not finite: {log_probs[:8]} ...")
        if any(not 0 <= token < vocab_size for token in token_ids):
            raise MalformedAnswer(self.url, f"token ids outside the vocabulary of {vocab_size}: {token_ids[:8]} ...")
        if len(spans) == 1 and not version.isdecimal():
            raise RestartedServer(self.url, version)
        if len(spans) > 1:
            raise VersionMismatch(self.url, sorted(spans))
        return Completion(tuple(token_ids), log_probs, finish["type"], int(version))

    # control calls; each raises RequestError unless the server reports success

    def pause_generation(self, mode: str = "abort") -> None:
        self._call("POST", "/pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        self._call("POST", "/continue_generation", {})

    def flush_cache(self, wait_s: float = 30.0) -> None:
        """Empty the prefix cache; the server waits up to `wait_s` seconds until it is idle."""
        self._call("POST", f"/flush_cache?timeout={wait_s:g}", {})

    def begin_weight_update(self) -> None:
        self._call("POST", "/begin_weight_update", {})

    def end_weight_update(self) -> None:
        self._call("POST", "/end_weight_update", {})

    def init_weights_update_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None:
        body = {"master_address": host, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        self._call("POST", "/init_weights_update_group", {**body, "group_name": group, "backend": backend})

    def destroy_weights_update_group(self, group: str) -> None:
        self._call("POST", "/destroy_weights_update_group", {"group_name": group})

    def update_weights_from_distributed(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group: str
    ) -> None:
        """Announce one flattened bucket; returns when the server has received and loaded it."""
        body = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(shape) for shape in shapes]}
        # the cache is flushed once a sync, not once a bucket
        options = {"group_name": group, "load_format": "flattened_bucket", "flush_cache": False}
        self._call("POST", "/update_weights_from_distributed", {**body, **options})

    def update_weights_from_tensor(self, payloads: Sequence[str]) -> None:
        """Hand over one flattened bucket, by one payload a rank; returns when the server has loaded it."""
        options = {"load_format": "flattened_bucket", "flush_cache": False}
        self._call("POST", "/update_weights_from_tensor", {"serialized_named_tensors": list(payloads), **options})

    def update_weights_from_disk(self, directory: str) -> None:
        """Load a checkpoint from the server's file system; its version stays."""
        body = {"model_path": directory, "load_format": "safetensors", "flush_cache": False}
        self._call("POST", "/update_weights_from_disk", body)

    def update_weight_version(self, version: str) -> None:
        self._call("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def weights_checker(self, action: str, skip: Sequence[str] = ()) -> dict[str, Any]:
        """`checksum` (of every parameter, by engine rank) or `reset_tensors` (to noise); not of parameters in whose
        name one of `skip` occurs.

        SGLang has `snapshot` and `compare` too; the comparison needs CUDA and the copy as much memory as the weights.
        """
        return self._call("POST", "/weights_checker", {"action": action, "skip_tensor_list": list(skip)})

    # one call

    def _call(self, method: str, endpoint: str, body: dict[str, Any] | None = None, timeout_s: float | None = None):
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            response = self._sync.request(method, endpoint, json=body, timeout=limit)
        except httpx.TransportError as error:
            raise self._no_answer(endpoint, error, limit) from error
        return self._read(endpoint, response)

    def _no_answer(self, endpoint: str, error: Exception, limit_s: float) -> RequestError:
        what = str(error) or type(error).__name__
        if isinstance(error, (httpx.TimeoutException, TimeoutError)):
            what = f"{type(error).__name__} after {limit_s:g} s"
        elif isinstance(error, httpx.ConnectError):
            what += "; is the server running, and is its URL in rollout.servers right?"
        return RequestError(self.url, endpoint, None, what)

    def _read(self, endpoint: str, response: httpx.Response) -> Any:
        try:
            answer = response.json()
        except ValueError:
            answer = response.text
        failed = isinstance(answer, dict) and answer.get("success") is False
        if response.is_success and not failed:
            return answer
        raise RequestError(self.url, endpoint, response.status_code, _message(answer))


class MalformedAnswer(RequestError):
    """An answer that training on would be wrong; asking again is no remedy."""

    retryable = False

    def __init__(self, url: str, message: str):
        super().__init__(url, "/generate", 200, message)


class RestartedServer(RequestError):
    """A response under the weights that a server starts with, which no sync has given a number."""

    def __init__(self, url: str, version: str):
        super().__init__(url, "/generate", 200, f"weight version {version}: it has not got this run's weights")

    retryable = True


class VersionMismatch(RequestError):
    """A response under several weight versions."""

    retryable = False

    def __init__(self, url: str, found: Sequence[str]):
        self.found = tuple(found)
        super().__init__(url, "/generate", 200, f"weight version {', '.join(found)}")


def validate_prompt(input_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError for what kills SGLang's scheduler: no token at all, or one that the model does not have."""
    if len(input_ids) == 0:
        raise ValueError("a prompt without tokens can't be sampled from; leave it out of data.train")
    wrong = [token for token in input_ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(
            f"token ids {wrong[:5]} are outside the vocabulary of {vocab_size};"
            " tokenise the prompts with the tokenizer of model.hf"
        )


def _message(answer: Any) -> str:
    """The server's words, out of `error` (a string or an object with `message`), `message` or `detail`."""
    if not isinstance(answer, dict):
        return str(answer).strip()
    error = answer.get("error") or answer.get("message") or answer.get("detail") or answer
    if isinstance(error, dict):
        error = error.get("message") or error
    return str(error).strip()
