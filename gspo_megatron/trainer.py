"""The training loop: collect, advantages, pack, log-likelihoods, updates, sync, log, save."""

import contextlib
import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.algorithm.advantages import GroupAdvantages, group_advantages, token_advantages
from gspo_megatron.algorithm.loss_metrics import add_metrics
from gspo_megatron.algorithm.losses import LOSSES, reduce_metrics
from gspo_megatron.algorithm.objective import make_objective
from gspo_megatron.algorithm_config import GROUP_LOSSES
from gspo_megatron.backend.checkpoint import CheckpointError
from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.policy import Policy, UpdateResult
from gspo_megatron.batches import MicroBatch, RolloutArrays, gap_sums, mini_batch_loss, plan_rank
from gspo_megatron.checkpoints import SavedRun, find_checkpoint
from gspo_megatron.config import Config, ConfigError
from gspo_megatron.health import Alarms
from gspo_megatron.metrics import MetricsWriter, Progress
from gspo_megatron.outgoing import bring_to_rank_zero, outgoing_weights
from gspo_megatron.plugins import load_function, load_loss
from gspo_megatron.resume import as_json
from gspo_megatron.run_dir import hold_run_dir, prepare_run_dir
from gspo_megatron.rollout.senders import Crew
from gspo_megatron.saving import Saver
from gspo_megatron.sources import LiveSource, ReplaySource
from gspo_megatron.stop import StopRequest


SEND_AGAIN = "send the weights again"
"""What rank 0 tells the others in place of a step's rollouts."""


def train(config: Config) -> bool:
    """One training run on the ranks that torchrun started, from its last checkpoint where it has one. Collective.

    True when SIGTERM or SIGUSR1 ended it early, with a checkpoint to go on from. Raises ConfigError for bad input,
    before a process group starts wherever one rank can see it.
    """
    with Run(config) as run, StopRequest(config.checkpoint.save) as stop:
        if run.is_complete:
            return False
        run.sync_weights(version=run.first_step)
        for step in range(run.first_step, config.train.steps):
            started = time.monotonic()
            with run.timed("time/rollout_s"):
                rollout = run.collect(step)
            advantages = group_advantages(rollout.rewards, rollout.groups, config.advantage)
            mini_batches = run.plan(rollout, advantages)
            with run.timed("time/log_likelihood_s"):
                old_log_probs = run.old_log_probs(mini_batches)
            with run.timed("time/train_s"):
                updates = [
                    run.update(mini_batch, old)
                    for mini_batch, old in zip(mini_batches, old_log_probs, strict=True)
                ]  # fmt: skip
            with run.timed("time/weight_sync_s"):
                run.sync_weights(version=step + 1)
            run.log(step, rollout, advantages, updates, seconds=time.monotonic() - started)
            if run.saver.after_step(step + 1, stop.requested):
                return True
        run.saver.at_end()
    return False


class Run:
    """What a run holds: on every rank the mesh and the policy; on rank 0 also the source of rollouts and the
    writers."""

    def __init__(self, config: Config):
        self.config = config
        self._saved: SavedRun | None = None
        loss = LOSSES[config.loss.name][1] if config.loss.name in LOSSES else load_loss(config.loss.name)[1]
        self._loss = make_objective(loss, config)
        self._alarms = Alarms(config.health)
        self._seconds: dict[str, float] = defaultdict(float)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Run":
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Rank 0 first sees to data, reward and servers, which can fail for reasons of the user's.

        It alone looks at run.dir, into which it writes at once, and tells the others what to go on from.
        """
        config, self.source = self.config, None
        if is_rank_zero():
            self._saved = find_checkpoint(config)
            if not self.is_complete:
                stack.enter_context(hold_run_dir(config))
                self._saved = find_checkpoint(config)  # who held it before may have written one meanwhile
            if self.is_complete:
                report(f"{self._saved.directory}: all {config.train.steps} train.steps are done; raise it to go on")
            else:
                self._open_source(stack)
        self.mesh = Mesh.create(config.parallel, config.run.seed, config.train.timeout_s)
        stack.callback(self.mesh.close)
        self._saved = self.mesh.broadcast_object(self._saved, "what rank 0 found in run.dir")
        if self.is_complete:
            return
        self.policy = Policy(config, self.mesh)
        if self._saved is not None:
            self._load(self._saved)
        position = self.source.position if self.source is not None else lambda: None
        self.saver = Saver(config, self.mesh, self.policy, position, self.timed, report)
        if not config.rollout.replay:
            self._connect_servers(stack)

    def _connect_servers(self, stack: contextlib.ExitStack) -> None:
        """Rank 0 joins the servers for weight updates, and with `distributed` one rank of each pipeline stage."""
        backend, policy = "nccl" if self.mesh.device.type == "cuda" else "gloo", self.policy
        self._crew = None
        if self.config.weights.transport == "distributed":
            export = lambda: policy.hf_buckets("stages")  # noqa: E731
            self._crew = Crew(self.config.weights, backend, policy.sending_order("stages"), export, self.mesh.world)
            stack.callback(self._crew.close)
        if self.source is not None:
            with self._crew.lead() if self._crew else contextlib.nullcontext():
                specs, engine_name = policy.hf_tensor_specs, policy.family.engine_name
                self.source.connect_weights(specs, engine_name, backend, self._crew)
        elif self._crew is not None:
            self._crew.follow()

    def _open_source(self, stack: contextlib.ExitStack) -> None:
        config = self.config
        run_dir = prepare_run_dir(config, self._saved, report)
        self.source = ReplaySource(config) if config.rollout.replay else LiveSource(config, report)
        stack.callback(self.source.close)
        if self._saved is not None:
            self.source.restore(self._saved)
        self._writer = stack.enter_context(
            MetricsWriter(config.metrics, run_dir, dataclasses.asdict(config), first_step=self.first_step)
        )
        self._progress = Progress(config.train.steps)

    @property
    def first_step(self) -> int:
        return self._saved.step if self._saved else 0

    @property
    def is_complete(self) -> bool:
        """True where a checkpoint of the last step is there."""
        return self.first_step >= self.config.train.steps

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds inside to the step's metric `name`."""
        started = time.monotonic()
        yield
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds[name] += time.monotonic() - started

    def collect(self, step: int) -> RolloutArrays:
        """The samples of a step, on all ranks. Raises RuntimeError for a sample of another weight version.

        Until they come, the other ranks take part in sending the weights again as often as rank 0 asks for it.
        """
        what = f"the rollouts of step {step} from rank 0"
        if self.source is None:
            while (arrays := self.mesh.broadcast_object(None, what)) == SEND_AGAIN:
                self.sync_weights(step)
            return arrays

        def send_again() -> None:
            self.mesh.broadcast_object(SEND_AGAIN, what)
            self.sync_weights(step)

        arrays = RolloutArrays.from_rollout(self.source.collect(step, send_again))
        found = np.unique(arrays.weight_versions)
        if found.tolist() != [step]:
            raise RuntimeError(f"step {step}: rollouts of weight versions {found.tolist()}, expected only {step}")
        return self.mesh.broadcast_object(arrays, what)

    def plan(self, rollout: RolloutArrays, advantages: GroupAdvantages) -> list[list[MicroBatch]]:
        """[mini-batch][micro-batch] of this rank."""
        config, per_token = self.config, None
        if config.advantage.per_token:
            function = load_function("advantage.per_token", config.advantage.per_token)
            responses = [rollout.response(sample).tolist() for sample in range(rollout.num_samples)]
            per_token = token_advantages(function, advantages, rollout.rewards, rollout.groups, responses)
        return plan_rank(
            rollout,
            advantages.advantages,
            num_mini_batches=config.train.updates_per_rollout,
            token_budget=config.train.tokens_per_micro_batch,
            data_rank=self.mesh.data_rank,
            data_size=self.mesh.data_size,
            parallel=config.parallel,
            token_advantages=per_token,
            drop=rollout.truncated if config.sampling.overlong_filtering else None,
            whole_groups=config.loss.name in GROUP_LOSSES,
        )

    def old_log_probs(self, mini_batches: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor]]:
        """log pi_old [T] of every micro-batch, from before the first update, and the gap to the rollout engine."""
        micro_batches = [micro_batch for mini_batch in mini_batches for micro_batch in mini_batch]
        if self.config.loss.old_log_probs == "rollout":
            flat, self._gap = [m.packed.values["rollout_log_probs"] for m in micro_batches], None
        else:
            packed = [micro_batch.packed for micro_batch in micro_batches]
            flat = self.policy.log_likelihoods(packed, record_routing=True)
            self._gap = self._sum_gap(gap_sums(micro_batches, flat))
            self._check_gap(self._gap)
        if self.config.regularizer.kl:
            reference = self.policy.reference_log_likelihoods([micro_batch.packed for micro_batch in micro_batches])
            for micro_batch, values in zip(micro_batches, reference, strict=True):
                micro_batch.packed.values["reference_log_probs"] = values
        remaining = iter(flat)
        return [[next(remaining) for _ in mini_batch] for mini_batch in mini_batches]

    def update(self, mini_batch: Sequence[MicroBatch], old_log_probs: Sequence[Tensor]) -> UpdateResult:
        where, context = self.mesh.describe(), self.mesh.context
        loss = mini_batch_loss(self._loss, self.config.loss, mini_batch, old_log_probs, where, context)
        result = self.policy.update([micro_batch.packed for micro_batch in mini_batch], loss)
        if self._gap is None:  # the first mini-batch's pass is the first look at the engine's log-probs
            self._gap = {name: float(result.metrics[name]) for name in ("gap_sum", "gap_max", "gap_count")}
            self._check_gap(self._gap)
        return result

    def sync_weights(self, version: int) -> None:
        """Bring the servers to the policy's weights as `version`; all ranks hand in their shards."""
        if self.config.rollout.replay:
            return
        first = version == self.first_step
        prove = first and self.config.weights.prove_coverage
        tensors = outgoing_weights(self.policy, self.config, version)
        if self.source is not None:
            with self._crew.lead() if self._crew else contextlib.nullcontext():
                sent = self.source.send_weights(tensors, version, prove)
            if first:
                report(f"weights: {sent.text}" + ("; every parameter of the servers proven covered" if prove else ""))
        elif self._crew is not None:
            self._crew.follow()
        else:
            for _ in range(2 if prove else 1):
                bring_to_rank_zero(self.policy, self.config)
        self.mesh.barrier(f"the sync of weight version {version} by rank 0")

    def log(
        self,
        step: int,
        rollout: RolloutArrays,
        advantages: GroupAdvantages,
        updates: list[UpdateResult],
        seconds: float,
    ) -> None:
        """Write the step's metrics and show its progress and its alarms, on rank 0."""
        routing = self.policy.routing_metrics()
        if self.source is None:
            self._seconds.clear()
            return
        metrics = {
            "step": step,
            **rollout_metrics(rollout, advantages),
            **self.source.metrics,
            **update_metrics(updates),
            **routing,
            "rollout/logprob_gap_mean": self._gap["gap_sum"] / max(self._gap["gap_count"], 1.0),
            "rollout/logprob_gap_max": self._gap["gap_max"],
            "rollout/weight_version": step,
            **self._seconds,
            "time/step_s": seconds,
            "tokens/per_s": int(rollout.lengths.sum()) / seconds,
        }
        self._seconds.clear()
        metrics |= self._alarms.judge(metrics)
        self._writer.write(step, metrics)
        self._progress.step(step, metrics)
        for message in self._alarms.news():
            report(f"step {step + 1}: {message}")

    def _load(self, saved: SavedRun) -> None:
        """Raises ConfigError where the files are not what this model needs."""
        layout = as_json(self.config)["parallel"]
        same_layout = saved.world_size == self.mesh.world_size and saved.config["parallel"] == layout
        try:
            self.policy.load(saved.directory, same_layout)
        except CheckpointError as error:
            raise ConfigError(
                f"run.dir: the checkpoint {saved.directory} can't be loaded ({error}); give the model that it is of, "
                "or another run.dir"
            ) from error
        if self.source is not None:
            if saved.note:
                report(saved.note)
            other = "" if same_layout else ", of another layout: random generators start from run.seed"
            report(f"going on after step {saved.step} from {saved.directory}{other}")

    def _sum_gap(self, gap: dict[str, Tensor]) -> dict[str, float]:
        sums = torch.stack([gap["gap_sum"], gap["gap_count"]]).to(self.mesh.device)
        maximum = gap["gap_max"].to(self.mesh.device)
        with self.mesh.waiting_for("the log-prob gap of data-parallel ranks"):
            dist.all_reduce(sums, group=self.mesh.data)
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.mesh.data)
        return {"gap_sum": float(sums[0]), "gap_max": float(maximum), "gap_count": float(sums[1])}

    def _check_gap(self, gap: dict[str, float]) -> None:
        """Raises RuntimeError where the engine evidently does not run this policy."""
        mean, bound = gap["gap_sum"] / max(gap["gap_count"], 1.0), self.config.rollout.max_logprob_gap
        if not mean <= bound:
            raise RuntimeError(
                f"the servers' log-probs differ from the trainer's by {mean:.4g} nats per token on average, more than "
                f"rollout.max_logprob_gap = {bound:g}: other weights, temperature, or numerics than the policy's"
            )


def rollout_metrics(rollout: RolloutArrays, advantages: GroupAdvantages) -> dict[str, float]:
    """What the samples of a step say by themselves."""
    return {
        "reward/mean": float(rollout.rewards.mean()),
        "reward/std": float(rollout.rewards.std()),
        "rollout/response_length_mean": float(rollout.response_lengths.mean()),
        "rollout/truncated_fraction": float(rollout.truncated.mean()),
        "rollout/empty_responses": int((rollout.response_lengths == 0).sum()),
        "rollout/zero_std_groups": advantages.num_zero_std_groups,
        "rollout/zero_std_fraction": advantages.num_zero_std_groups / max(len(np.unique(rollout.groups)), 1),
    }


def update_metrics(updates: Sequence[UpdateResult]) -> dict[str, float]:
    """One step's metrics of the loss, over all its mini-batches; `grad_norm` is the mean over updates."""
    total: dict[str, Tensor] = {}
    for update in updates:
        total = add_metrics(total, update.metrics)
    loss = float(total["loss_sum"] / total["loss_count"].clamp(min=1))
    return {
        "loss": loss,
        "grad_norm": sum(update.grad_norm for update in updates) / len(updates),
        "learning_rate": updates[-1].learning_rate,
        **reduce_metrics(total),
    }


def is_rank_zero() -> bool:
    """Before the process group exists."""
    return os.environ.get("RANK", "0") == "0"


def report(message: str) -> None:
    print(message, flush=True)
