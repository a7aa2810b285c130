"""A `torch_dist` checkpoint on its way to disk: tensors in host memory, files written here or in a thread beside.

Megatron's own writers are processes: forked from a rank (0.16.1), which costs time by the size of the rank and leaves
them writing when it is killed. What they run for each file (`FileSystemWriterAsync.write_preloaded_data`) runs here.
"""

import contextlib
import inspect
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

CheckpointError = CheckpointingException
"""Megatron's own: a checkpoint that can't be written, or is of another model."""


class PendingSave:
    """The tensors are this object's own from the start: training may go on."""

    def __init__(
        self,
        shards: dict[str, Any],
        directory: Path,
        replicas: ProcessGroup,
        live: Collection[Tensor],
        fill: Callable[[Sequence[ShardedTensor]], None],
    ):
        """Plan the files and copy what goes into them. Collective.

        `replicas` share the writing of what they all hold. `live`: tensors that training changes in place. `fill` is
        called on all ranks once it is known who writes what, with what this rank writes: it gives shards their values
        that are on the meta device.
        """
        filesystem_async._results_queue = queue.Queue()  # Megatron's is served by a process that it spawns, for seconds
        strategy = _SharedSave(TorchDistSaveShardedStrategy("torch_dist", 1), replicas, fill)
        with failures_named():
            self._request = _plan(shards, str(directory), strategy)
        self._thread: threading.Thread | None = None
        if self._request.async_fn is None:  # nothing to write on this rank
            return
        storages = {tensor.untyped_storage().data_ptr() for tensor in live}
        buckets = self._request.preload_fn()
        for _, _, (_, tensors) in buckets:
            tensors[:] = [(item, _own(tensor, storages)) for item, tensor in tensors]
        _, _, results = self._request.async_fn_args
        self._work = (list(self._request.async_fn.args[0]), buckets, results)

    def write(self) -> None:
        """Write this rank's files. What fails is told to all ranks by `finish`."""
        if self._request.async_fn is not None:
            _write_files(*self._work)

    def start(self) -> None:
        """`write` in a thread, which ends with the process."""
        self._thread = threading.Thread(target=self.write, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """On this rank, or failed."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self, timeout_s: float) -> None:
        """Wait for this rank's files, then have rank 0 write what joins those of all ranks. Collective.

        Raises CheckpointError on all ranks where one could not write, or naming this one after `timeout_s` seconds.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise CheckpointError(f"rank {dist.get_rank()}: its files are not written after {timeout_s:g} s")
        with failures_named():
            for finalize in self._request.finalize_fns:
                finalize()


class _SharedSave(FullyParallelSaveStrategyWrapper):
    """Megatron's way to share out the writing, and the values only then."""

    def __init__(
        self,
        strategy: TorchDistSaveShardedStrategy,
        replicas: ProcessGroup,
        fill: Callable[[Sequence[ShardedTensor]], None],
    ):
        super().__init__(strategy, replicas)
        self._fill = fill

    def apply_saving_parallelization(self, sharded_state_dict: dict[str, Any]) -> None:
        super().apply_saving_parallelization(sharded_state_dict)
        shards = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        self._fill([shard for shard in shards if is_main_replica(shard.replica_id)])


def _plan(shards: dict[str, Any], directory: str, strategy: FullyParallelSaveStrategyWrapper) -> Any:
    """Megatron's AsyncRequest; 0.19 takes another library's where that is installed, unless told not to."""
    knows_others = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    own = {"async_strategy": "mcore"} if knows_others else {}
    return dist_checkpointing.save(shards, directory, strategy, async_sharded_save=True, **own)


def _own(tensor: Tensor, storages: Collection[int]) -> Tensor:
    """On a CPU, `to("cpu")` and Megatron's copy of views leave a whole tensor as it is: training would change it."""
    return tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor


def _write_files(transforms: list, buckets: list, results: queue.Queue) -> None:
    """Put file number -> what is where in it into `results`, or the exception; one thread a file."""
    outcomes: queue.Queue = queue.Queue()
    threads = [
        threading.Thread(target=_write_file, args=(transforms, number, bucket, outcomes), daemon=True)
        for number, bucket in enumerate(buckets)
    ]
    for thread in threads:
        thread.start()
    written: dict[int, list] = {}
    failed: Exception | None = None
    for _ in threads:
        number, outcome = outcomes.get()
        if isinstance(outcome, Exception):
            failed = _first_cause(outcome)
        else:
            written[number] = outcome
    results.put(failed or dict(sorted(written.items())))


def _first_cause(error: Exception) -> Exception:
    """What the disk said, where torch's writer failed once more when it closed the file ("unexpected pos")."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _write_file(transforms: list, number: int, bucket: tuple, outcomes: queue.Queue) -> None:
    counted: queue.Queue = queue.Queue()
    counted.put(number)  # Megatron's writer takes it out at its end
    try:
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, local_proc_idx=number, write_bucket=bucket, results_queue=outcomes, count_queue=counted,
            use_fsync=True,
        )  # fmt: skip
    except Exception as error:
        outcomes.put((number, error))


@contextlib.contextmanager
def failures_named() -> Iterator[None]:
    """torch tells what failed on which rank by an exception that is no Exception; make it Megatron's, in a line."""
    try:
        yield
    except CheckpointException as error:
        failures = [f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()]
        raise CheckpointError("; ".join(failures)) from error
    except (OSError, KeyError) as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error
