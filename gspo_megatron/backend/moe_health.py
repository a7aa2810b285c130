"""Which experts the routers choose: how many choices an update changes, how evenly experts are used, and their replay.

Shape legend: S tokens of a micro-batch that this rank's routers see, E experts, K chosen for a token, L layers.

A hook on each of Megatron's `TopKRouter`s (transformer/moe/router.py; its forward gives probabilities and a bool map
[S, E]) sees the passes that `RoutingMonitor.watch` is around. Recomputation in the backward pass is outside, so that
nothing counts twice. The pass that gives log pi_old leaves one bit an expert of each trained position; an update's
pass compares with it. Layers are spread over stages and tokens over tensor (sequence parallelism), context and data
ranks: each rank counts its own, and one all-reduce a step adds the counts up.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor, nn

from gspo_megatron.algorithm.packing import PackedTokens
from gspo_megatron.backend.mesh import Mesh


class Rows(NamedTuple):
    """Which of a router's S rows count, int64 on its device."""

    total: int
    """S."""
    trained: Tensor
    """Positions that predict a response token that is trained on."""
    real: Tensor
    """Positions of prompts and responses: all but padding."""


class _Recorded(NamedTuple):
    """A micro-batch of the pass that gave log pi_old."""

    packed: PackedTokens
    """Kept so that its identity stays its own."""
    rows: Rows
    chosen: dict[int, Tensor]
    """Layer -> [trained, ceil(E / 8)] uint8, one bit an expert."""
    experts: dict[int, Tensor]
    """Layer -> [S, K] int16 in the router's order; with replay only."""


class RoutingMonitor:
    """Collective as `Policy`'s methods; `metrics` must be called by all ranks after as many updates on each.

    `num_layers` is the whole model's. With `num_experts` 0 nothing is watched: a dense model, or nobody asked.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], mesh: Mesh, num_layers: int, num_experts: int, replay: bool = False
    ):
        self._mesh, self._num_experts, self._replay = mesh, num_experts, replay
        self.enabled = num_experts > 0
        self._routers = {
            id(chunk): [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            for chunk in (chunks if self.enabled else ())
        }
        for router in itertools.chain(*self._routers.values()):
            router.register_forward_hook(self._after_router)
        self._load = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=mesh.device)
        self._bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=mesh.device)
        self._popcount = torch.tensor([n.bit_count() for n in range(256)], dtype=torch.uint8, device=mesh.device)
        self._recorded: dict[int, _Recorded] = {}
        self._current: _Recorded | None = None
        self._mode: Literal["record", "update"] | None = None
        self._changed: list[Tensor] = []
        self._choices: list[int] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around the pass that gives log pi_old: keeps what is chosen, for the updates that follow until `metrics`."""
        self._recorded.clear()
        with self._watching("record"):
            yield

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Around an update's pass: counts tokens per expert, and compares micro-batches that were recorded."""
        if not self.enabled:
            yield
            return
        self._changed.append(torch.zeros((), dtype=torch.int64, device=self._mesh.device))
        self._choices.append(0)
        with self._watching("update"):
            yield

    @contextlib.contextmanager
    def _watching(self, mode: Literal["record", "update"]) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = None
            self._clear_replay()

    def recorded_length(self, micro_batches: Sequence[PackedTokens]) -> int:
        """Rows T to which recorded micro-batches were padded, times the ranks that share them; 0 for unrecorded ones.

        Sequence parallelism cuts T into equal slices, so that a token is on the same rank again only with the same T.
        """
        found = [self._recorded[id(batch)] for batch in micro_batches if id(batch) in self._recorded]
        return max((recorded.rows.total for recorded in found), default=0) * self._ranks_of_a_micro_batch

    @contextlib.contextmanager
    def watch(self, model: nn.Module, original: PackedTokens | None, padded: PackedTokens) -> Iterator[None]:
        """Around one micro-batch's forward pass through a chunk. `original`: what it was before it was padded for the
        schedule, None for one of padding only. Raises ValueError where its choices are to be replayed and nothing was
        recorded."""
        if self._mode is None or not self.enabled:
            yield
            return
        routers = self._routers[id(model)]  # none in a stage of dense layers, which pads as the other stages do
        self._current = self._find(original, padded)
        if self._replay:
            self._prepare_replay(routers, self._current, original is None)
        try:
            yield
        finally:
            self._current = None
            for router in routers if self._replay and self._mode == "update" else ():
                # a recomputation in the backward pass takes the choices in the order of the forward passes
                router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def metrics(self) -> dict[str, float]:
        """The numbers of the updates since the last call, the same on all ranks; forgets what was recorded.

        `moe/expert_change_*`: share of (trained position, layer, expert) choices of the pass that gave log pi_old that
        an update's pass, before its own step, no longer makes: in the first, the last, and all mini-batches. Missing
        where nothing was recorded. `moe/load_imbalance`: tokens of the busiest expert over the mean, mean over layers
        (`_max`: the worst layer), over all real tokens of the updates; 1 is even, E / K is all tokens to the same ones.
        `moe/idle_experts`: share of (layer, expert) without a token.
        """
        if not self.enabled:
            return {}
        choices = torch.tensor(self._choices, dtype=torch.int64)
        changed = torch.stack(self._changed).cpu() if self._changed else choices
        counts = torch.cat([self._load.cpu().flatten(), changed, choices])
        with self._mesh.waiting_for("the counts of expert choices of other ranks"):
            dist.all_reduce(counts, group=self._mesh.world)
        load, changed, choices = counts.split([self._load.numel(), len(changed), len(choices)])
        self._reset()
        load_metrics = _load_metrics(load.view(-1, self._num_experts))
        return {**load_metrics, **_change_metrics(changed.tolist(), choices.tolist())}

    def _reset(self) -> None:
        self._recorded.clear()
        self._load.zero_()
        self._changed, self._choices = [], []

    @property
    def _ranks_of_a_micro_batch(self) -> int:
        """Ranks over which the positions of a micro-batch are cut."""
        return self._mesh.context.size * (self._mesh.tensor.size() if self._mesh.parallel.sequence_parallel else 1)

    def _rows(self, batch: PackedTokens) -> Rows:
        """This rank's part of a (padded) micro-batch: context-parallel chunks, then a slice of the tensor rank."""
        positions = self._mesh.context.positions(batch.cu_seqlens)
        tensor = self._mesh.tensor
        if self._mesh.parallel.sequence_parallel:
            positions = positions.chunk(tensor.size())[tensor.rank()]
        real = torch.zeros(batch.labels.numel(), dtype=torch.bool)
        for start, response in zip(batch.cu_seqlens.tolist(), batch.response_slices, strict=False):
            real[start : response.stop + 1] = True
        rows = [mask[positions].nonzero()[:, 0] for mask in (batch.loss_mask, real)]
        if tensor.rank() > 0 and not self._mesh.parallel.sequence_parallel:
            rows = [index[:0] for index in rows]  # all tensor ranks see all tokens: one counts
        return Rows(positions.numel(), *(index.to(self._mesh.device) for index in rows))

    def _find(self, original: PackedTokens | None, padded: PackedTokens) -> _Recorded:
        if self._mode == "update" and id(original) in self._recorded:
            return self._recorded[id(original)]
        new = _Recorded(original or padded, self._rows(padded), {}, {})
        if self._mode == "record" and original is not None:
            # another chunk of this rank may have met it already
            return self._recorded.setdefault(id(original), new)
        return new

    def _after_router(self, router: TopKRouter, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        current = self._current
        if current is None:
            return
        layer, chosen = router.layer_number - 1, output[1]
        with torch.no_grad():
            bits = self._pack(chosen.index_select(0, current.rows.trained))
            if self._mode == "record":
                current.chosen[layer] = bits
                if self._replay:
                    current.experts[layer] = router.router_replay.get_recorded_indices().to(torch.int16)
                return
            self._load[layer] += chosen.index_select(0, current.rows.real).sum(0)
            if layer in current.chosen:
                lost = current.chosen[layer] & ~bits
                self._changed[-1] += self._popcount[lost.long()].sum()
                self._choices[-1] += current.rows.trained.numel() * router.topk

    def _pack(self, chosen: Tensor) -> Tensor:
        """[rows, E] bool -> [rows, ceil(E / 8)] uint8."""
        missing = -chosen.shape[1] % 8
        if missing:
            chosen = nn.functional.pad(chosen, (0, missing))
        return (chosen.unflatten(1, (chosen.shape[1] // 8, 8)) * self._bits).sum(-1, dtype=torch.uint8)

    def _prepare_replay(self, routers: Sequence[TopKRouter], known: _Recorded, is_padding: bool) -> None:
        """Megatron's RouterReplay of each router (transformer/moe/router_replay.py): record, or choose as recorded."""
        for router in routers:
            replay, experts = router.router_replay, known.experts.get(router.layer_number - 1)
            if self._mode == "record":
                replay.set_router_replay_action(RouterReplayAction.RECORD)
                continue
            if experts is None and not is_padding:
                raise ValueError(
                    "train.routing_replay: an update of micro-batches whose expert choices were not recorded by "
                    "`log_likelihoods(..., record_routing=True)`"
                )
            if experts is None:  # padding only, which any expert may have
                experts = torch.arange(router.topk, device=self._mesh.device).expand(known.rows.total, -1)
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            if router.config.recompute_granularity is None:
                replay.target_topk_idx = experts.long()
            else:
                replay.set_target_indices(experts.long())  # kept for the recomputation too

    def _clear_replay(self) -> None:
        for router in itertools.chain(*self._routers.values()) if self._replay else ():
            router.router_replay.clear_indices()
            router.router_replay.clear_router_replay_action()


def _load_metrics(load: Tensor) -> dict[str, float]:
    """`load` [L, E] tokens per expert; layers without experts have none."""
    load = load[load.sum(1) > 0].double()
    if not len(load):
        return {}
    imbalance = load.amax(1) / load.mean(1)
    return {
        "moe/load_imbalance": float(imbalance.mean()),
        "moe/load_imbalance_max": float(imbalance.amax()),
        "moe/idle_experts": float((load == 0).double().mean()),
    }


def _change_metrics(changed: list[int], choices: list[int]) -> dict[str, float]:
    """Of every update of the step: choices changed, and choices recorded."""
    metrics = {}
    if sum(choices):
        metrics["moe/expert_change_mean"] = sum(changed) / sum(choices)
        for name, index in (("first", 0), ("last", -1)):
            if choices[index]:
                metrics[f"moe/expert_change_{name}"] = changed[index] / choices[index]
    return metrics
