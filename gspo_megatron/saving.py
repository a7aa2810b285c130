"""What a run writes to be used later: checkpoints to go on from, and exports in Hugging Face format."""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from gspo_megatron.backend.checkpoint import CheckpointError, PendingSave
from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.policy import Policy
from gspo_megatron.checkpoints import SavedRun, begin, checkpoints_dir, finish
from gspo_megatron.config import Config
from gspo_megatron.resume import as_json
from gspo_megatron.weights.hf_files import read_hf_config
from gspo_megatron.weights.hf_writer import SHARD_BYTES, HFWriteError, remove_hf_checkpoint, write_hf_checkpoint


SMALL_BYTES = 64 << 20
"""A model up to this size is written by one rank: one file is worth more than the time."""


def export_policy(
    policy: Policy, directory: Path, reference: str, shard_bytes: int = SHARD_BYTES, prediction_layers: str = "keep"
) -> Path:
    """Write the policy as a Hugging Face checkpoint, by all ranks at once where it is not small, and read it back.

    Collective. `reference`: where config and tokenizer files come from. Raises as `write_hf_checkpoint` does.
    """
    num_bytes = sum(prod(shape) for shape in policy.hf_shapes.values()) * policy.dtype.itemsize
    senders = "all" if num_bytes > SMALL_BYTES else "first"
    return write_hf_checkpoint(
        policy.hf_tensors(senders), directory, reference, shard_bytes,
        writers=policy.mesh, shapes=policy.hf_shapes, verified=True, prediction_layers=prediction_layers,
    )  # fmt: skip


class _UnderWay(NamedTuple):
    """A checkpoint whose files are being written."""

    state: SavedRun | None
    """On rank 0: where the run stood when the tensors were copied."""
    step: int
    partial: Path
    pending: PendingSave
    started: float


class Saver:
    """Collective: all ranks call all methods. At most one checkpoint is under way."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        policy: Policy,
        position: Callable[[], dict[str, Any] | None],
        timed: Callable[[str], AbstractContextManager],
        report: Callable[[str], None],
    ):
        """`position`: where the prompts stand, asked on rank 0. `timed`: adds seconds to a metric of the step."""
        self.config, self._mesh, self._policy, self._position, self._timed = config, mesh, policy, position, timed
        self._report = report if mesh.rank == 0 else lambda message: None
        self._under_way: _UnderWay | None = None

    def after_step(self, step: int, stop: bool) -> bool:
        """Write what is due after `step` steps, and a checkpoint where a rank was asked to `stop`; True for the latter.

        The last step's are written by `at_end`.
        """
        if step == self.config.train.steps:
            return False
        checkpoint = self.config.checkpoint
        stop = checkpoint.save and self._mesh.any_rank(stop, "whether a rank was asked to stop")
        if self._under_way and not self._mesh.any_rank(not self._under_way.pending.is_written, "a checkpoint's files"):
            with self._timed("time/checkpoint_s"):
                self._complete()
        if self.config.export.hf_every and step % self.config.export.hf_every == 0:
            self._export(f"hf_step_{step}")  # before the checkpoint: a run killed in between makes it again
            self._remove_exports(step)
        if checkpoint.save and (stop or (checkpoint.every and step % checkpoint.every == 0)):
            self._save(step, wait=stop or not checkpoint.async_save)
        if stop:
            done = f"step {step} of {self.config.train.steps}"
            self._report(f"asked to stop: {done} is done and saved; start again to go on")
        return stop

    def at_end(self) -> None:
        """The trained model, then the last checkpoint: a run that has it has nothing left to do."""
        if self.config.export.hf_final:
            self._export("hf")
        if self.config.checkpoint.save:
            self._save(self.config.train.steps, wait=True)

    def _export(self, name: str) -> None:
        """Raises RuntimeError where it can't be written; nothing half-written stays then."""
        with self._timed("time/export_s"):
            try:
                directory = Path(self.config.run.dir) / name
                shard_bytes = int(self.config.export.shard_mib * 2**20)
                written = export_policy(
                    self._policy, directory, self.config.model.hf, shard_bytes, self.config.export.mtp
                )  # fmt: skip
            except (HFWriteError, OSError) as error:
                raise RuntimeError(f"the model can't be exported: {error}") from error
        self._report(f"trained model: {written}")

    def _remove_exports(self, step: int) -> None:
        """Those up to `step` that `export.keep` leaves out."""
        if self._mesh.rank or not self.config.export.keep:
            return
        numbers = [path.name.removeprefix("hf_step_") for path in Path(self.config.run.dir).glob("hf_step_*")]
        steps = sorted(int(number) for number in numbers if number.isdigit() and int(number) <= step)
        for old in steps[: -self.config.export.keep]:
            remove_hf_checkpoint(Path(self.config.run.dir) / f"hf_step_{old}")

    def _save(self, step: int, wait: bool) -> None:
        """Begin the checkpoint after `step` steps, and end it too where it is to be waited for. Its seconds are in the
        next step's metrics. Raises RuntimeError where one can't be written; nothing half-written stays then."""
        with self._timed("time/checkpoint_s"):
            self._complete()
            started, root = time.monotonic(), checkpoints_dir(self.config)
            partial = root / f"step_{step}.partial"
            try:
                if self._mesh.rank == 0:
                    begin(root, step)
                self._mesh.barrier("rank 0 making the directory of a checkpoint")
                pending = self._policy.begin_save(partial)
            except (OSError, CheckpointError) as error:
                self._fail(step, partial, error)
            state = self._state(step) if self._mesh.rank == 0 else None
            self._under_way = _UnderWay(state, step, partial, pending, started)
            if wait:
                pending.write()
                self._complete()
            else:
                pending.start()

    def _complete(self) -> None:
        """Wait for the files of the checkpoint under way, if there is one, and give it its name."""
        if self._under_way is None:
            return
        state, step, partial, pending, started = self._under_way
        self._under_way = None
        try:
            with self._mesh.waiting_for("other ranks writing a checkpoint"):
                pending.finish(self.config.train.timeout_s)
            if state is not None:
                size = finish(partial, state, self.config.checkpoint)
                self._report(f"checkpoint: step {step}, {size / 2**20:.1f} MiB, {time.monotonic() - started:.2f} s")
            self._mesh.barrier("rank 0 finishing a checkpoint")
        except (OSError, CheckpointError) as error:
            self._fail(step, partial, error)

    def _fail(self, step: int, partial: Path, error: Exception) -> None:
        if self._mesh.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise RuntimeError(f"the checkpoint of step {step} can't be written to {partial.parent}: {error}") from error

    def _state(self, step: int) -> SavedRun:
        return SavedRun(
            step=step,
            weight_version=step,
            data=self._position(),
            world_size=self._mesh.world_size,
            config=as_json(self.config),
            model=read_hf_config(self.config.model.hf),
        )
