"""What the servers serve, compared with each other and with the run."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.config import ConfigError
from gspo_megatron.rollout.client import CONTEXT_MARGIN, SGLangClient
from gspo_megatron.rollout.errors import RequestError

SGLANG_VERSION = "0.5.23"
IDENTITY = ("model_type", "architectures", "dtype", "version")
"""What must be the same on all servers; paths may differ between machines."""


@dataclass(frozen=True)
class ServerFacts:
    url: str
    facts: dict[str, Any]
    """/server_info and /model_info in one."""

    @property
    def token_limit(self) -> int:
        """Longest prompt and response together, in tokens, that is not cut short."""
        return int(self.facts["max_req_input_len"]) + CONTEXT_MARGIN

    def vocab_size(self) -> int | None:
        """From the model's config.json, where its directory is on this machine."""
        path = Path(self.facts["model_path"]) / "config.json"
        if not path.is_file():
            return None
        config = json.loads(path.read_text())
        return config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))


class Survey(tuple[ServerFacts, ...]):
    """The servers that answered."""

    def check(self, vocab_size: int, report: Callable[[str], None]) -> int:
        """The smallest token limit. Raises ConfigError when the servers differ, or are not for this vocabulary."""
        first = self[0]
        for server in self[1:]:
            for key in IDENTITY:
                if server.facts.get(key) != first.facts.get(key):
                    raise ConfigError(
                        f"rollout.servers: {first.url} has {key} {first.facts.get(key)} and {server.url} has"
                        f" {server.facts.get(key)}; start them all with the same model and SGLang version"
                    )
        for server in self:
            found = server.vocab_size()
            if found is not None and found != vocab_size:
                raise ConfigError(
                    f"rollout.servers: {server.url} serves {server.facts['model_path']} with a vocabulary of {found},"
                    f" model.hf has {vocab_size}; start it with the model of model.hf"
                )
        if first.facts.get("version") != SGLANG_VERSION:
            report(f"SGLang {first.facts.get('version')} answers; this package is tested with {SGLANG_VERSION}")
        return min(server.token_limit for server in self)


def survey(clients: Sequence[SGLangClient], timeout_s: float) -> tuple[Survey, dict[str, RequestError]]:
    """Ask all servers at once; gives those that answered, and url -> error of the others."""

    def ask(client: SGLangClient) -> ServerFacts | RequestError:
        try:
            return ServerFacts(client.url, {**client.server_info(timeout_s), **client.model_info(timeout_s)})
        except RequestError as error:
            return error

    with ThreadPoolExecutor(min(32, len(clients))) as threads:
        answers = list(threads.map(ask, clients))
    found = Survey(answer for answer in answers if isinstance(answer, ServerFacts))
    errors = {answer.url: answer for answer in answers if isinstance(answer, RequestError)}
    return found, errors
