"""The process groups of a run: one object that knows every axis, this rank's place on it, and what it holds."""

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch.distributed import ProcessGroup

from gspo_megatron.backend.context import ContextParallel
from gspo_megatron.backend.device import collective_backend, prepare_device
from gspo_megatron.config import ParallelConfig


class CollectiveError(RuntimeError):
    """A collective failed or ran into its bound; says which rank waited for what."""


@dataclass(frozen=True)
class Mesh:
    """`rank` counts all trainer ranks. Groups are torch process groups; `world` is one over host memory."""

    device: torch.device
    rank: int
    world_size: int
    parallel: ParallelConfig
    world: ProcessGroup
    tensor: ProcessGroup
    pipeline: ProcessGroup
    data: ProcessGroup
    """Ranks with other sequences; those of one context-parallel group have the same data rank."""
    data_with_context: ProcessGroup
    """All copies of this rank's dense parameters: data and context parallel."""
    expert: ProcessGroup
    context: ContextParallel

    @classmethod
    def create(cls, parallel: ParallelConfig, seed: int, timeout_s: float) -> "Mesh":
        """Join the process group that torchrun's environment describes and build Megatron's groups.

        `timeout_s` bounds every collective.
        """
        device = prepare_device()
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(collective_backend(device), timeout=timeout)
        world = dist.new_group(backend="gloo", timeout=timeout)
        return cls._of_groups(device, world, parallel, seed, timeout_s, for_checkpoints=True)

    @classmethod
    def alone(cls) -> "Mesh":
        """A mesh of this process, to describe a model, not to run it: its groups are torch's `fake` ones, which send
        nothing and have no threads, whose end would take a tenth of a second."""
        device = prepare_device()
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
        return cls._of_groups(device, dist.group.WORLD, ParallelConfig(), seed=1, timeout_s=60, for_checkpoints=False)

    @classmethod
    def _of_groups(
        cls,
        device: torch.device,
        world: ProcessGroup,
        parallel: ParallelConfig,
        seed: int,
        timeout_s: float,
        for_checkpoints: bool,
    ) -> "Mesh":
        """Megatron's groups in the process group that is there; `for_checkpoints` also those over host memory."""
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            create_gloo_process_groups=for_checkpoints,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        return cls(
            device=device,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            parallel=parallel,
            world=world,
            tensor=parallel_state.get_tensor_model_parallel_group(),
            pipeline=parallel_state.get_pipeline_model_parallel_group(),
            data=parallel_state.get_data_parallel_group(),
            data_with_context=parallel_state.get_data_parallel_group(with_context_parallel=True),
            expert=parallel_state.get_expert_model_parallel_group(),
            context=ContextParallel(parallel_state.get_context_parallel_group()),
        )

    @property
    def data_rank(self) -> int:
        return self.data.rank()

    @property
    def data_size(self) -> int:
        return self.data.size()

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank() == self.pipeline.size() - 1

    def describe(self) -> str:
        """This rank's place, for messages: `rank 3 (tensor 1, pipeline 0, context 0, data 1)`."""
        return (
            f"rank {self.rank} (tensor {self.tensor.rank()}, pipeline {self.pipeline.rank()}, "
            f"context {self.context.rank}, data {self.data.rank()})"
        )

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Turns the failure of a collective inside into one that says who waited for what."""
        try:
            yield
        except CollectiveError:  # has its name from a narrower place
            raise
        except dist.DistBackendError as error:
            raise CollectiveError(f"{self.describe()}: waiting for {what}: {error}") from error
        except RuntimeError as error:
            if not any(word in str(error).lower() for word in ("timed out", "connection closed", "gloo", "socket")):
                raise
            raise CollectiveError(f"{self.describe()}: waiting for {what}: {error}") from error

    def from_last_stage(self, tensor: Tensor, what: str) -> Tensor:
        """`tensor` of the last pipeline stage on all stages of this pipeline (same shape everywhere); in place."""
        if self.pipeline.size() > 1:
            with self.waiting_for(what):
                dist.broadcast(
                    tensor, dist.get_global_rank(self.pipeline, self.pipeline.size() - 1), group=self.pipeline
                )
        return tensor

    def any_rank(self, value: bool, what: str) -> bool:
        """True on all ranks where it is so on one of them."""
        flag = torch.tensor(int(value))
        with self.waiting_for(what):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.world)
        return bool(flag)

    def broadcast_object(self, value, what: str):
        """`value` of rank 0 on all ranks."""
        box = [value]
        with self.waiting_for(what):
            dist.broadcast_object_list(box, src=0, group=self.world)
        return box[0]

    def gather_objects(self, value, what: str) -> list:
        """The values of all ranks by rank, on all of them."""
        values = [None] * self.world_size
        with self.waiting_for(what):
            dist.all_gather_object(values, value, group=self.world)
        return values

    def barrier(self, what: str) -> None:
        with self.waiting_for(what):
            dist.barrier(group=self.world)

    def close(self) -> None:
        """Leave the process groups."""
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
