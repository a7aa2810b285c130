"""The policy: a Megatron model on this layout that answers log-likelihoods, takes updates, and gives its weights out.

Shape legend: N sequences in a micro-batch, T packed tokens of it, S = T / context-parallel size on this rank.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from gspo_megatron.algorithm.loss_metrics import add_metrics
from gspo_megatron.algorithm.losses import LossOutput
from gspo_megatron.algorithm.packing import PackedTokens, pack, pad_to, sequence_multiple
from gspo_megatron.backend.checkpoint import PendingSave, load_policy, save_policy
from gspo_megatron.backend.context import ContextParallel
from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.model import build_model
from gspo_megatron.backend.moe_health import RoutingMonitor
from gspo_megatron.backend.optimizer import build_optimizer, wrap_for_training
from gspo_megatron.backend.parameters import global_parameters, place_of_rank, places_of_all_ranks
from gspo_megatron.backend.reference import ReferenceWeights
from gspo_megatron.config import Config, ConfigError
from gspo_megatron.weights.engine_layout import one_message_groups
from gspo_megatron.weights.export import HFBucket, export_buckets
from gspo_megatron.weights.families import FAMILIES, Family, unsupported
from gspo_megatron.weights.hf_files import HFReader, read_hf_config, torch_dtype
from gspo_megatron.weights.load import check_files, load_parameters
from gspo_megatron.weights.megatron_files import MegatronReader
from gspo_megatron.weights.plan import Place, blocks_of, hf_dtypes, hf_shapes
from gspo_megatron.weights.reshard import SENDERS, ReshardPlan, plan_reshard
from gspo_megatron.weights.rules import ModelShape

MicroBatchLoss = Callable[[int, Tensor], LossOutput]
"""(index of the micro-batch, log-probs [S] of this rank's tokens with gradient) -> loss sum, count, metrics; with a
`regularizer.entropy` [2, S]: log-probs and entropies.

The tokens are those at `mesh.context.positions(cu_seqlens)`: all T in order without context parallelism."""


class UpdateResult(NamedTuple):
    metrics: dict[str, Tensor]
    """Sums over all micro-batches, data- and context-parallel ranks (`*_min`, `*_max`: extremes), known to all ranks.
    `loss_sum` and `loss_count` are among them."""
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float


class Policy:
    """Collective: all methods must be called by all trainer ranks, with as many micro-batches on each."""

    def __init__(self, config: Config, mesh: Mesh, train: bool = True):
        """Builds the model and fills it from `config.model.hf`. Raises ConfigError for a checkpoint that doesn't
        fit."""
        self.mesh = mesh
        hf = read_hf_config(config.model.hf)
        self.family = family_of(hf, config.model.hf)
        self.shape = ModelShape.from_hf(hf)
        self.dtype = torch_dtype(config.train.dtype)
        chunks = build_model(hf, config, mesh)
        self._place = place_of_rank(mesh, chunks)
        reader = open_weights(config, self.family, self.shape, self._place)
        blocks = blocks_of(self.family, self.shape, self._place)
        load_parameters(global_parameters(chunks, self._place), blocks, reader)
        self.chunks = wrap_for_training(chunks, config)
        self.params = global_parameters(self.chunks, self._place)
        replay, watched = config.train.routing_replay, config.health.routing or config.train.routing_replay
        num_experts = self.shape.num_experts if watched else 0
        self._routing = RoutingMonitor(self.chunks, mesh, self.shape.num_layers, num_experts, replay)
        self._reference = ReferenceWeights(self.params) if config.regularizer.kl else None
        self._optimizer, self._scheduler = build_optimizer(self.chunks, config) if train else (None, None)
        self.hf_shapes = hf_shapes(self.family, self.shape)
        self.hf_dtypes = hf_dtypes(self.family, self.shape, self.dtype, torch.float32)
        self._places = places_of_all_ranks(mesh, self._place)
        self._bucket_bytes = int(config.weights.bucket_mib * 2**20)
        self._plans: dict[str, ReshardPlan] = {}

    def log_likelihoods(self, micro_batches: Sequence[PackedTokens], record_routing: bool = False) -> list[Tensor]:
        """Log-probs of all trained tokens, fp32 [T] a micro-batch, nats, 0 elsewhere; whole micro-batches, on all
        pipeline stages and context-parallel ranks.

        `record_routing` keeps the routers' choices, which the updates of the same micro-batches compare with, or
        replay.
        """
        recording = self._routing.recording() if record_routing else contextlib.nullcontext()
        with torch.no_grad(), recording:
            outputs = self._run(micro_batches, forward_only=True)
        bounds = [batch.cu_seqlens for batch in micro_batches]
        num_tokens = sum(batch.labels.numel() for batch in micro_batches) // self.mesh.context.size
        if self.mesh.is_last_stage:
            shards = torch.cat(outputs)
        else:
            shards = torch.empty(num_tokens, dtype=torch.float32, device=self.mesh.device)
        shards = self.mesh.from_last_stage(shards, "log-likelihoods of the last pipeline stage")
        with self.mesh.waiting_for("log-likelihoods of context-parallel ranks"):
            return self.mesh.context.gather(shards, bounds)

    def reference_log_likelihoods(self, micro_batches: Sequence[PackedTokens]) -> list[Tensor]:
        """As `log_likelihoods`, of the weights that the policy had at the start; wants `regularizer.kl` above 0."""
        with self._reference.in_place():
            return self.log_likelihoods(micro_batches)

    def sequence_log_likelihoods(self, micro_batches: Sequence[PackedTokens]) -> list[Tensor]:
        """log pi(y_i | x_i) of every sequence, fp32 [N] a micro-batch, nats, summed over its response tokens; on all
        pipeline stages."""
        sums = []
        for batch, log_probs in zip(micro_batches, self.log_likelihoods(micro_batches), strict=True):
            totals = [response.sum(dtype=torch.float64) for response in batch.split(log_probs)]
            sums.append(torch.stack(totals).float() if totals else log_probs.new_zeros(0))
        return sums

    def update(self, micro_batches: Sequence[PackedTokens], loss: MicroBatchLoss) -> UpdateResult:
        """One optimizer update on the mini-batch that all ranks' micro-batches make up.

        Raises FloatingPointError where the gradient is not finite; the weights are then of no use.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        with self._routing.updating():
            outputs = self._run(micro_batches, forward_only=False, loss=loss)
        metrics = self._gather_metrics(outputs)
        _, grad_norm, _ = self._optimizer.step()
        if not torch.isfinite(torch.as_tensor(grad_norm)):
            raise FloatingPointError(
                f"{self.mesh.describe()}: gradient norm is {grad_norm}, loss {metrics['loss_sum']}"
            )
        learning_rate = self._optimizer.param_groups[0]["lr"] if self._optimizer.param_groups else 0.0
        self._scheduler.step(1)
        return UpdateResult(metrics, float(grad_norm), float(learning_rate))

    def routing_metrics(self) -> dict[str, float]:
        """`RoutingMonitor.metrics` of the updates since the last call; empty without experts or `health.routing`."""
        return self._routing.metrics()

    def save(self, directory: Path) -> None:
        """Write weights, optimizer, schedule and generators into the existing, empty `directory`."""
        pending = self.begin_save(directory)
        pending.write()
        with self.mesh.waiting_for("other ranks writing a checkpoint"):
            pending.finish(timeout_s=0)

    def begin_save(self, directory: Path) -> PendingSave:
        """The copying part of `save`: call `write` or `start` of what comes back, then `finish`."""
        with self.mesh.waiting_for("other ranks planning a checkpoint"):
            return save_policy(directory, self.chunks, self._optimizer, self._scheduler, self.mesh)

    def load(self, directory: Path, same_layout: bool) -> None:
        """Take up what `save` wrote, on this or another layout; generators only on the same one."""
        with self.mesh.waiting_for("other ranks reading a checkpoint"):
            load_policy(directory, self.chunks, self._optimizer, self._scheduler, self.mesh, same_layout)

    @property
    def hf_tensor_specs(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name -> dtype and shape of all that `hf_tensors` gives."""
        return {name: (self.hf_dtypes[name], shape) for name, shape in self.hf_shapes.items()}

    def reshard_plan(self, senders: str = "first", dtype: torch.dtype | None = None) -> ReshardPlan:
        """Which rank brings what to which sender; `dtype` in place of the tensors' own. No message is sent."""
        dtypes = dict.fromkeys(self.hf_shapes, dtype) if dtype else self.hf_dtypes
        ranks = SENDERS[senders](self._places)
        together = one_message_groups(self.hf_shapes, self.family.engine_name)
        return plan_reshard(self.family, self.shape, self._places, dtypes, ranks, self._bucket_bytes, together)

    def hf_tensors(self, senders: str = "first") -> Iterator[tuple[str, Tensor]]:
        """All weights as whole HF tensors, each on one sender: the `first` rank, one rank of each of the pipeline
        `stages`, or `all` ranks. Other ranks get none, but must run the iterator to its end."""
        for bucket in self.hf_buckets(senders):
            yield from zip(bucket.names, bucket.tensors, strict=True)

    def hf_buckets(self, senders: str = "first") -> Iterator[HFBucket]:
        """As `hf_tensors`, by whole buckets; one is valid until the next is asked for."""
        with self.mesh.waiting_for("weights of other ranks"):
            yield from export_buckets(self.params, self._plan(senders), None, self.mesh.device)

    def sending_order(self, senders: str) -> list[int]:
        """The rank that gets each bucket of `hf_buckets`, over all ranks, in an order in which none waits for a
        later."""
        return [bucket.sender for bucket in self._plan(senders).buckets]

    def _plan(self, senders: str) -> ReshardPlan:
        if senders not in self._plans:
            self._plans[senders] = self.reshard_plan(senders)
        return self._plans[senders]

    def _run(
        self, micro_batches: Sequence[PackedTokens], forward_only: bool, loss: MicroBatchLoss | None = None
    ) -> list:
        """One pass of Megatron's schedule over the micro-batches; the last stage's outputs in their order."""
        padded = self._pad_for_schedule(micro_batches)
        shards = [shard_of(batch, self.mesh.context, self.mesh.device) for batch in padded]

        def forward_step(iterator: Iterator[tuple[int, Shard]], model):
            index, shard = next(iterator)
            original = micro_batches[index] if index < len(micro_batches) else None
            with self._routing.watch(model, original, padded[index]):
                log_probs = model(
                    shard.input_ids, shard.position_ids, None, labels=shard.labels, loss_mask=shard.loss_mask,
                    packed_seq_params=shard.packed_seq_params,
                )  # fmt: skip

            def finish(log_probs: Tensor, non_loss_data: bool = False):
                if non_loss_data:
                    return log_probs
                if index >= len(micro_batches):
                    return log_probs.sum() * 0.0, torch.zeros((), dtype=torch.int, device=log_probs.device), {}
                out = loss(index, log_probs)
                metrics = {**out.metrics, "loss_sum": out.loss_sum.detach().double(), "loss_count": out.count.double()}
                return out.loss_sum, out.count.to(torch.int), metrics

            return log_probs, finish

        iterators = [iter(enumerate(shards)) for _ in self.chunks]
        virtual = len(self.chunks) > 1
        with self.mesh.waiting_for("other ranks in the forward pass" if forward_only else "other ranks in an update"):
            outputs = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if virtual else iterators[0],
                model=self.chunks if virtual else self.chunks[0],
                num_microbatches=len(padded),
                seq_length=max(batch.labels.numel() for batch in padded),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        if not forward_only:
            return outputs[: len(micro_batches)]
        lengths = [batch.labels.numel() // self.mesh.context.size for batch in micro_batches]
        return [values[:length] for values, length in zip(outputs, lengths, strict=False)]

    def _pad_for_schedule(self, micro_batches: Sequence[PackedTokens]) -> list[PackedTokens]:
        """With virtual stages, the micro-batches at one length, and more of padding up to a number that runs.

        Megatron exchanges shapes that vary by a batched transfer (`P2PCommunicator._communicate_shapes`), which mixes
        up the two directions where both neighbours are one rank, and blocks where there are as many micro-batches as
        stages. With one length it exchanges none. Updates take the length of the pass that recorded their routing.
        """
        if len(self.chunks) == 1:
            return list(micro_batches)
        parallel, group = self.mesh.parallel, self.chunks[0].config.microbatch_group_size_per_vp_stage
        filler = pack([], alignment=parallel.tensor * parallel.context, sequence_multiple=sequence_multiple(parallel))
        padded = [*micro_batches, *[filler] * (-len(micro_batches) % group)]
        length = max(*(batch.labels.numel() for batch in padded), self._routing.recorded_length(micro_batches))
        return [pad_to(batch, length) for batch in padded]

    def _gather_metrics(self, outputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Reduce over micro-batches, data- and context-parallel ranks, then tell the other pipeline stages.

        Minima travel as negated maxima, so that there are two all-reduces, whatever the number of metrics.
        """
        totals: dict[str, Tensor] = {}
        for metrics in outputs:
            totals = add_metrics(totals, metrics)
        names = self._share_names(sorted(totals))
        values = torch.zeros(len(names), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.is_last_stage:
            signs = torch.tensor([-1.0 if n.endswith("_min") else 1.0 for n in names], dtype=torch.float64)
            extreme = torch.tensor([n.endswith(("_min", "_max")) for n in names], device=self.mesh.device)
            signed = torch.stack([totals[n].double() for n in names]) * signs.to(self.mesh.device)
            maxima = signed.clone()
            with self.mesh.waiting_for("metrics of data-parallel ranks"):
                dist.all_reduce(signed, group=self.mesh.data_with_context)
                dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.mesh.data_with_context)
            values = torch.where(extreme, maxima, signed) * signs.to(self.mesh.device)
        values = self.mesh.from_last_stage(values, "metrics of the last pipeline stage")
        return dict(zip(names, values.unbind(), strict=True))

    def _share_names(self, names: list[str]) -> list[str]:
        if self.mesh.pipeline.size() == 1:
            return names
        box = [names]
        last = dist.get_global_rank(self.mesh.pipeline, self.mesh.pipeline.size() - 1)
        with self.mesh.waiting_for("names of metrics of the last pipeline stage"):
            dist.broadcast_object_list(box, src=last, group=self.mesh.pipeline, device=self.mesh.device)
        return box[0]


def open_weights(config: Config, family: Family, shape: ModelShape, place: Place) -> HFReader | MegatronReader:
    """Where the run starts from. Raises ConfigError where what a rank reads is not of this model, or damaged; all of it
    was looked at before any process group started (`checks.py`)."""
    if config.model.megatron:
        return MegatronReader(config.model.megatron, family, shape)
    reader = HFReader(config.model.hf)
    check_files(reader, family, shape, place)
    return reader


class Shard(NamedTuple):
    """This rank's part of a packed micro-batch on its device; tensors are [1, S]."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    packed_seq_params: PackedSeqParams
    """Of the whole micro-batch: attention and rotary embedding divide by the context-parallel size themselves."""


def shard_of(batch: PackedTokens, context: ContextParallel, device: torch.device) -> Shard:
    """Raises ValueError for a sequence that can't be cut over the context-parallel ranks."""
    positions = context.positions(batch.cu_seqlens)
    whole = (batch.input_ids, batch.position_ids, batch.labels, batch.loss_mask)
    bounds, longest = batch.cu_seqlens.to(device), batch.max_seqlen
    return Shard(
        *(values[positions][None].to(device) for values in whole),
        packed_seq_params=PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
    )


def family_of(hf: dict, directory: str) -> Family:
    """The family of the checkpoint's architecture. Raises ConfigError for one that is not supported."""
    architecture = (hf.get("architectures") or ["(none)"])[0]
    if architecture not in FAMILIES:
        raise ConfigError(f"model.hf: {directory}: {unsupported(architecture)}")
    return FAMILIES[architecture]
