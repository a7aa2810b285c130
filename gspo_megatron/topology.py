"""Which sizes of the parallel axes a model can have, and how many layers each pipeline stage gets. No torch here.

The rules are Megatron-Core's; files are below megatron/core.
"""

import re
from collections.abc import Iterable

from gspo_megatron.config import Config, ParallelConfig
from gspo_megatron.layout import layout_of, world_step
from gspo_megatron.model_files import ModelInfo
from gspo_megatron.weights.families import FAMILIES

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"
"""Fields of TransformerConfig that cut a pipeline unevenly, given by `megatron.transformer`."""


class SplitError(ValueError):
    """Layers that can't be spread over the stages; the message is a fault line."""


def pipeline_layers(parallel: ParallelConfig, transformer: dict, num_layers: int) -> list[list[int]]:
    """[pipeline stage][model chunk] number of layers.

    As `get_num_layers_to_build` in transformer/transformer_block.py. Raises SplitError where that would stop.
    """
    given = [key for key in (FIRST, LAST) if transformer.get(key) is not None]
    accounted = [key for key in (EMBEDDING, LOSS) if transformer.get(key)]
    layout = transformer.get(LAYOUT)
    if sum(map(bool, (given, accounted, layout))) > 1:
        names = ", ".join([*given, *accounted, *([LAYOUT] if layout else [])])
        raise SplitError(f"megatron.transformer: {names} cut the pipeline in different ways; give one of them")
    if layout:
        return _from_layout(parallel, str(layout), num_layers)
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    sizes = _uneven(stages, transformer, num_layers) if given else _even(stages, chunks, accounted, num_layers)
    for stage, size in enumerate(sizes):
        if size % chunks:
            raise SplitError(
                f"parallel.virtual_pipeline: {chunks} with pipeline {stages} does not divide the {size} layers of "
                f"stage {stage} (of the model's {num_layers} layers); use {alternatives(divisors(size))}"
            )
    layers = [[size // chunks] * chunks for size in sizes]
    layers[0][0] -= EMBEDDING in accounted
    layers[-1][-1] -= LOSS in accounted
    if min(layers[0][0], layers[-1][-1]) < 0:
        raise SplitError(
            f"parallel.virtual_pipeline: {chunks} leaves no layer slot for {' and '.join(accounted)}; lower it"
        )
    return layers


def _even(stages: int, chunks: int, accounted: list[str], num_layers: int) -> list[int]:
    total = num_layers + len(accounted)
    if total % stages:
        beside = f" and {len(accounted)} more for {' and '.join(accounted)}" if accounted else ""
        raise SplitError(
            f"parallel.pipeline: {stages} does not divide the model's {num_layers} layers{beside}; "
            f"use {alternatives(divisors(total))}, or cut unevenly by megatron.transformer.{FIRST} and {LAST}"
        )
    return [total // stages] * stages


def _uneven(stages: int, transformer: dict, num_layers: int) -> list[int]:
    first, last = transformer.get(FIRST), transformer.get(LAST)
    ends = [value for value in (first, last) if value is not None]
    middle, left = stages - len(ends), num_layers - sum(ends)
    where = f"megatron.transformer.{FIRST if first is not None else LAST}"
    if min(ends) < 1 or stages < 2:
        raise SplitError(f"{where}: {ends[0]} must be at least 1, on a pipeline of at least 2 stages (now {stages})")
    if left < 0 or bool(left) != bool(middle) or (middle and left % middle):
        raise SplitError(
            f"{where}: of the model's {num_layers} layers {left} are left for {middle} other stages, which must be a "
            "positive multiple of their number (none where there are none); change it, or parallel.pipeline"
        )
    sizes = [left // middle] * middle if middle else []
    return ([] if first is None else [first]) + sizes + ([] if last is None else [last])


def _from_layout(parallel: ParallelConfig, layout: str, num_layers: int) -> list[list[int]]:
    """As transformer/pipeline_parallel_layer_layout.py: `E` embedding, `t` layer, `L` loss, `|` ends a chunk."""
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    where, parts = f"megatron.transformer.{LAYOUT}: {layout!r}", text.split("|")
    wanted = parallel.pipeline * parallel.virtual_pipeline
    flat = "".join(parts)
    if set(flat) - set("EtL"):
        raise SplitError(f"{where} may hold E, t, L, |, (...)*n and x*n only; write it with these")
    if len(parts) != wanted:
        raise SplitError(
            f"{where} has {len(parts)} chunks, but parallel.pipeline * virtual_pipeline is {wanted}; make them equal"
        )
    if flat != f"E{'t' * num_layers}L":
        raise SplitError(
            f"{where} must start with E, end with L and have {num_layers} t between them, as the model has layers"
        )
    return [
        [parts[chunk * parallel.pipeline + stage].count("t") for chunk in range(parallel.virtual_pipeline)]
        for stage in range(parallel.pipeline)
    ]


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def alternatives(values: list[int]) -> str:
    """`1, 2 or 4`; of many the smallest twelve."""
    names = [str(value) for value in values[:12]]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _tensor_divisors(model: ModelInfo) -> list[int]:
    """Tensor-parallel sizes that the attention and the dense layers can be cut into.

    With fewer key-value heads than ranks Megatron gathers them and every rank keeps the one it needs, so that then the
    ranks must be a multiple of those heads (transformer/attention.py, get_query_key_value_tensors).
    """
    shape = model.shape
    widths = [shape.shared_ffn, shape.ffn if not shape.num_experts or shape.dense_layers else 0]
    return [
        size
        for size in divisors(shape.num_heads)
        if (shape.num_kv_heads % size == 0 or size % shape.num_kv_heads == 0)
        and shape.hidden % size == 0
        and all(width % size == 0 for width in widths)
    ]


def model_faults(config: Config, model: ModelInfo) -> Iterable[str]:
    """Sizes of the model that the axes must divide."""
    shape, parallel = model.shape, config.parallel
    axes = [(parallel.tensor, _tensor_divisors(model), "tensor")]
    what = {
        "tensor": f"the model's {shape.num_heads} heads, {shape.num_kv_heads} key-value heads and "
        f"hidden size {shape.hidden}" + (f", feed-forward size {shape.ffn}" if not shape.num_experts else ""),
        "expert": f"the model's {shape.num_experts} experts",
        "expert_tensor": f"an expert's feed-forward size {shape.moe_ffn}",
    }
    if shape.num_experts:
        axes.append((parallel.expert, divisors(shape.num_experts), "expert"))
        axes.append((parallel.expert_tensor, divisors(shape.moe_ffn), "expert_tensor"))
        if parallel.expert_tensor > 1 and FAMILIES[model.architecture].has_expert_biases:
            yield (
                f"parallel.expert_tensor: {parallel.expert_tensor} is refused, {model.architecture}'s experts have biases, "
                "which Megatron adds once a rank; use 1"
            )
        if parallel.tensor > 1 and not parallel.sequence_parallel:
            yield (
                f"parallel.sequence_parallel: false is refused with parallel.tensor {parallel.tensor}: Megatron trains "
                "experts under tensor parallelism only with sequence parallelism; set it to true, or tensor to 1"
            )
    else:
        for axis in ("expert", "expert_tensor"):
            size = getattr(parallel, axis)
            if size > 1:
                yield f"parallel.{axis}: {size} is refused, {model.architecture} has no experts; use 1"
    for size, allowed, axis in axes:
        if size >= 1 and size not in allowed:
            yield f"parallel.{axis}: {size} does not divide {what[axis]}; use {alternatives(allowed)}"
    if min(parallel.pipeline, parallel.virtual_pipeline) >= 1:
        yield from _pipeline_faults(parallel, config.megatron.transformer, shape.num_layers)


def _pipeline_faults(parallel: ParallelConfig, transformer: dict, num_layers: int) -> Iterable[str]:
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield (
            f"parallel.virtual_pipeline: {parallel.virtual_pipeline} is refused on a pipeline of one stage; set "
            "parallel.pipeline to at least 2, or virtual_pipeline to 1"
        )
        return
    try:
        pipeline_layers(parallel, transformer, num_layers)
    except SplitError as error:
        yield str(error)
    group = transformer.get("microbatch_group_size_per_vp_stage")
    if group is not None and group < parallel.pipeline:
        yield (
            f"megatron.transformer.microbatch_group_size_per_vp_stage: {group} is below parallel.pipeline "
            f"({parallel.pipeline}); use at least {parallel.pipeline}, or drop it"
        )


def world_faults(config: Config, world: int) -> Iterable[str]:
    parallel = config.parallel
    step = world_step(parallel)
    if world < 1 or world % step:
        dense = parallel.tensor * parallel.pipeline * parallel.context
        experts = parallel.expert * parallel.expert_tensor * parallel.pipeline
        below, over = world // step * step, (world // step + 1) * step
        nearest = f"{below} or {over}" if below else str(over)
        yield (
            f"world size: {world} is not a multiple of parallel.tensor * pipeline * context = {dense} and of "
            f"parallel.expert * expert_tensor * pipeline = {experts}; use {nearest} ranks, or other sizes"
        )
        return
    if config.train.updates_per_rollout < 1:
        return
    layout = layout_of(config, world)
    if layout.sequences_per_update < layout.data:
        yield (
            f"rollout.prompts_per_step: {config.rollout.prompts_per_step} gives {layout.sequences_per_update} "
            f"sequences an update, fewer than the {layout.data} data-parallel ranks; raise it, or lower "
            "train.updates_per_rollout"
        )
