"""Where the samples of a step come from, and where weights go: live SGLang servers, or saved rollouts.

Both live on rank 0 only; other ranks get the samples from it.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import dtype

from gspo_megatron.checkpoints import SavedRun
from gspo_megatron.config import Config, ConfigError, ModelConfig
from gspo_megatron.data import load_dataset
from gspo_megatron.rewards.scorer import Scorer
from gspo_megatron.outgoing import weights_dir
from gspo_megatron.rollout.collector import Collector
from gspo_megatron.rollout.errors import ServersLost
from gspo_megatron.rollout.launcher import launch_servers
from gspo_megatron.rollout.locks import hold_servers
from gspo_megatron.rollout.pool import RetryPolicy
from gspo_megatron.rollout.records import load_rollout, save_rollout, step_file
from gspo_megatron.rollout.senders import Crew
from gspo_megatron.rollout.torchvision_operators import ensure_torchvision_operators
from gspo_megatron.rollout.weight_sync import SyncReport, Tensors, WeightSync
from gspo_megatron.sampling import collect_groups
from gspo_megatron.types import Rollout
from gspo_megatron.weights.hf_files import read_hf_config, read_json

Report = Callable[[str], None]
REPLAYED = "replayed"
"""In a position: that rollouts were replayed, and the hash of the last step's file."""


class ReplaySource:
    """Saved rollouts, step by step, as they were trained on; weights go nowhere."""

    metrics: dict[str, float] = {}
    """Nothing to log: reward terms and sampling rules did their work when the rollouts were saved."""

    def __init__(self, config: Config):
        self._config, self._directory = config, config.rollout.replay
        self._last: int | None = None
        load_rollout(self._directory, 0)  # a wrong directory is found before the model is built

    def position(self) -> dict[str, Any] | None:
        """The step says which file comes next; this says what the last one held."""
        return None if self._last is None else {REPLAYED: self._hash(self._last)}

    def restore(self, saved: SavedRun) -> None:
        """Raises ConfigError where the last step's file is not the one that the checkpoint's run trained on."""
        known = (saved.data or {}).get(REPLAYED)
        allowed = {"rollout", "rollout.replay"} & set(self._config.run.allow_changed)
        if known is not None and not allowed and self._hash(saved.step - 1) != known:
            raise ConfigError(
                f"rollout.replay: {step_file(self._directory, saved.step - 1)} is not what the run of the checkpoint "
                f"{saved.directory} trained on; give that directory, or add rollout.replay to run.allow_changed"
            )
        self._last = saved.step - 1

    def collect(self, step: int, send_again: Callable[[], None]) -> Rollout:
        self._last = step
        return load_rollout(self._directory, step)

    def _hash(self, step: int) -> str:
        """Of a step's file; of nothing where it is not there."""
        path = step_file(self._directory, step)
        return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()

    def close(self) -> None:
        return None


class LiveSource:
    """Prompts, servers (started here when `rollout.launch` asks for it), scoring, and the weight sync.

    Raises ConfigError or ServerError on construction for data, rewards and servers that can't work; what was started is
    stopped then, and by `close`.
    """

    def __init__(self, config: Config, report: Report):
        self._config, self._report = config, report
        self.metrics: dict[str, float] = {}
        """What to log of the last `collect`: parts of the reward, rounds of dynamic sampling."""
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as started:
            tokenizer = load_tokenizer(config.model)
            self.prompts = load_dataset(config.data, tokenizer, config.run.seed)
            scorer = started.enter_context(Scorer(config.reward, tokenizer))
            scorer.check(self.prompts.prompts[0])
            self.urls = self._servers(started)
            self._collector = Collector(
                config.rollout,
                self.urls,
                stop_token_ids=stop_token_ids(config),
                vocab_size=read_hf_config(config.model.hf)["vocab_size"],
                score=scorer.score,
                report=report,
                max_prompt_tokens=max(len(prompt.token_ids) for prompt in self.prompts.prompts),
            )
            started.callback(self._collector.close)
            self._collector.check_servers()
            self._scorer = scorer
            self._stack = started.pop_all()
        self._sync: WeightSync | None = None

    def _servers(self, started: contextlib.ExitStack) -> tuple[str, ...]:
        config = self._config
        self._processes = None
        if config.rollout.launch is None:
            started.enter_context(hold_servers(config.rollout.servers, config.run.dir))
            return config.rollout.servers
        log_dir = Path(config.run.dir) / "servers"
        self._processes = started.enter_context(
            launch_servers(
                config.rollout.launch,
                config.model.hf,
                config.train.dtype,
                log_dir,
                config.run.seed,
                report=self._report,
            )
        )
        return self._processes.urls

    def collect(self, step: int, send_again: Callable[[], None]) -> Rollout:
        """The scored samples of a step, all of weight version `step`.

        `send_again` sends the weights of that version once more: to servers that were started anew, when none is left
        that has them. Raises WeightSyncError where somebody else changed a server's weights in the meantime.
        """
        if self._processes is not None:
            self._processes.revive()
        timeouts = self._scorer.num_timeouts + self._scorer.num_crashes
        recovery = Recovery(self, step, send_again)
        rollout, self.metrics = collect_groups(
            self._config, lambda number: self._collector.collect(self.prompts.next(number), step, recovery)
        )
        self._sync.check_unchanged()
        lost = self._scorer.num_timeouts + self._scorer.num_crashes - timeouts
        if lost:
            self._report(f"step {step}: scoring hung or crashed on {lost} responses, which got reward 0")
        if self._config.rollout.save:
            save_rollout(rollout, Path(self._config.run.dir) / "rollouts", step)
        return rollout

    def position(self) -> dict[str, Any]:
        """Where in the prompts the next step begins, as JSON values."""
        return self.prompts.state()

    def restore(self, saved: SavedRun) -> None:
        """Go on with the prompts where the checkpoint's run was.

        After a run of saved rollouts that is where a run with servers would be. Raises ConfigError where the prompts
        are others; with `data.train` in run.allow_changed they are taken from their beginning. What comes with the
        same prompts may change then too.
        """
        if saved.data is None or REPLAYED in saved.data:
            self.prompts.next(saved.step * self._config.rollout.prompts_per_step)
        elif {"data", "data.train"} & set(self._config.run.allow_changed):
            try:
                self.prompts.restore({key: value for key, value in saved.data.items() if key != "records"})
            except ConfigError:
                self._report("data.train: other prompts than the checkpoint's, taken from their beginning")
        else:
            self.prompts.restore(saved.data)

    def connect_weights(
        self,
        expected: dict[str, tuple[dtype, tuple[int, ...]]],
        engine_name: Callable[[str], str],
        backend: str,
        crew: Crew | None = None,
    ) -> None:
        """Join the servers for weight updates; `expected` are dtype and shape of all HF tensors that a sync sends, and
        `crew` the ranks that send them, where it is not this one alone."""
        self._sync = WeightSync(
            self._config.weights,
            self.urls,
            backend=backend,
            expected=expected,
            engine_name=engine_name,
            directory=weights_dir(self._config),
            model_dir=self._config.model.hf,
            crew=crew,
            report=self._report,
        )
        self._stack.callback(self._sync.close)
        self._sync.connect()

    def send_weights(self, tensors: Callable[[], Tensors], version: int, prove: bool) -> SyncReport:
        """One sync, or with `prove` two of them around noise (`weights.prove_coverage`); `tensors` runs once a sync."""
        if self._processes is not None:
            # the others go on without one that is still starting, and it gets the next version
            if len(self.urls) == 1:
                self._processes.revive_and_wait(self.urls)
            else:
                self._processes.revive()
        sent = self._sync.prove_coverage(tensors, version) if prove else self._sync.run(tensors(), version)
        self._collector.serve_from(self._sync.urls)
        return sent

    def close(self) -> None:
        """Stop what was started; bounded."""
        self._stack.close()


class Recovery:
    """Called when no server is left that has the weights of `step`: brings servers back, and the weights to them."""

    def __init__(self, source: LiveSource, step: int, send_again: Callable[[], None]):
        self._source, self._step, self._send_again = source, step, send_again
        self._left = source._config.rollout.retries + 1

    def __call__(self, lost: ServersLost) -> None:
        """Raises ServersLost where none comes back, or too often; ServerError for one that can't be started again."""
        source = self._source
        source._report(f"step {self._step}: {lost}")
        if not self._left:
            raise lost
        self._left -= 1
        if source._processes is not None:
            source._processes.revive_and_wait(source.urls)
        elif not source._sync.wait_for_any(RetryPolicy().no_server_s):
            raise lost
        current = source._sync.current_urls()
        if current:
            source._collector.serve_from(current)
        else:
            self._send_again()


def load_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of a checkpoint, by transformers. Raises ConfigError where it can't be loaded, or is code that
    `trust_remote_code` does not allow to run."""
    ensure_torchvision_operators()
    from transformers import AutoTokenizer

    try:  # not given, the last argument would have transformers ask on the terminal
        return AutoTokenizer.from_pretrained(
            model.hf, local_files_only=True, trust_remote_code=model.trust_remote_code
        )  # fmt: skip
    except (OSError, ValueError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"model.hf: {model.hf}: its tokenizer is Python code of its own; read it, and set "
                "model.trust_remote_code=true to run it"
            ) from None
        raise ConfigError(
            f"model.hf: {model.hf}: no tokenizer can be loaded ({error}); copy its files there"
        ) from error


def stop_token_ids(config: Config) -> tuple[int, ...]:
    """`rollout.stop_token_ids`, or the eos_token_id of generation_config.json, or of config.json.

    Raises ConfigError where none is given: responses would always run to the length limit.
    """
    if config.rollout.stop_token_ids:
        return config.rollout.stop_token_ids
    directory = Path(config.model.hf)
    generation = (
        read_json(directory / "generation_config.json") if (directory / "generation_config.json").exists() else {}
    )
    for values in (generation, read_hf_config(directory)):
        ids = values.get("eos_token_id")
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    raise ConfigError(
        "rollout.stop_token_ids: empty, and the checkpoint names no eos_token_id; list the token ids that end"
    )
