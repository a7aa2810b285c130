"""How much memory a rank needs, per pipeline stage, before anything is started.

Bytes per parameter (Megatron-LM, docs/source/api-guide/dist_optimizer.md, "Theoretical memory consumption"): a bf16
parameter 2 and its fp32 gradient 4 on every rank, the fp32 master weight and Adam's two fp32 moments 12, spread over
the ranks that hold copies: 6 + 12 / d. With fp32 parameters 4 + 4 + 8 / d, there is no further master weight. d is the
data-parallel size times context for the dense part, and the number of copies of an expert for experts.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4: what each operation saves for its backward
pass, divided by the tensor-parallel size where sequence parallelism is on), with three changes: no T^2 term, as the
attention core recomputes its scores; grouped-query attention's narrower keys and values; and per expert layer the
router's fp32 scores and, for each of the k chosen experts, a token's row before and after the exchange, and after the
expert, and the expert's inner activations. Stage i of p pipeline stages holds p - i micro-batches at once (1F1B
schedule, Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1); with v virtual stages 2 (p - i - 1) + (v - 1) p + 1
chunks of 1/v of its layers (interleaved schedule, section 2.2.2; Megatron-Core's get_pp_rank_microbatches).

Not counted: the CUDA context and NCCL buffers (2 to 4 GiB a GPU), the allocator's fragmentation (a tenth is usual), and
uneven routing: tokens are taken as spread evenly over experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gspo_megatron.config import Config, ParallelConfig
from gspo_megatron.layout import Layout
from gspo_megatron.model_files import ModelInfo
from gspo_megatron.topology import pipeline_layers
from gspo_megatron.weights.families import FAMILIES
from gspo_megatron.weights.plan import Place, num_elements
from gspo_megatron.weights.rules import ModelShape

GIB = 2**30
LOGITS_CHUNK_TOKENS = 512
"""Tokens of which logits are held at once, in fp32: the logits, their softmax and their gradient. As in
backend/log_likelihood.py (a test holds them equal)."""


@dataclass(frozen=True)
class Parameters:
    """Number of parameters; of one rank, or of the whole model."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank of a pipeline stage."""

    stage: str
    parameters: Parameters
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    weight_sync: float
    """Buffers of a transfer to the servers: a bucket, and the tensors it is gathered from."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.weight_sync


def count_parameters(
    model: ModelInfo,
    tensor: int = 1,
    expert: int = 1,
    expert_tensor: int = 1,
    layers: Sequence[int] | None = None,
    embedding: bool = True,
    output: bool = True,
) -> Parameters:
    """Parameters of a rank that holds these layers (from 0 on; default all), with the embedding and the output layer or
    not."""
    shape = model.shape
    place = Place(
        rank=0,
        tensor_rank=0,
        tensor_size=tensor,
        expert_tensor_rank=0,
        expert_tensor_size=expert_tensor,
        layers=tuple(range(shape.num_layers) if layers is None else layers),
        experts=tuple(range(shape.num_experts // expert)),
        has_embedding=embedding,
        has_output=output,
        dense_replica=0,
        expert_replica=0,
        mtp_layers=tuple(range(shape.mtp_layers if output else 0)),
    )
    dense, experts = num_elements(FAMILIES[model.architecture], shape, place)
    return Parameters(dense=dense, experts=experts)


def layer_activation_bytes(config: Config, model: ModelInfo, tokens: int) -> float:
    """What one layer saves for the backward pass of `tokens` tokens on this rank's tensor-parallel part."""
    shape, parallel = model.shape, config.parallel
    size = 4 if config.train.dtype == "fp32" else 2
    tensor = parallel.tensor
    rows = tokens / (tensor if parallel.sequence_parallel else 1)
    norms = 4 * rows * shape.hidden * size  # the inputs of both norms, and their outputs
    attention = _attention_elements(shape, tokens / tensor, rows) * size
    softmax_sums = tokens * shape.num_heads / tensor * 4
    if not shape.num_experts:
        feed_forward = tokens * 3 * shape.ffn / tensor * size
        return norms + attention + softmax_sums + feed_forward
    chosen = rows * model.experts_per_token
    router = rows * shape.num_experts * 4 * 3  # scores, probabilities and the map of the chosen
    exchanged = 3 * chosen * shape.hidden * size
    inner = 3 * chosen * shape.moe_ffn * size  # both halves of the gate, and their product
    inner += tokens * 3 * shape.shared_ffn / tensor * size
    return norms + attention + softmax_sums + router + exchanged + inner


def _attention_elements(shape: ModelShape, tokens: float, rows: float) -> float:
    """What attention saves; `tokens` divided by the tensor ranks, `rows` as many as sequence parallelism leaves."""
    if shape.kv_lora:
        query, value = shape.num_heads * (shape.qk_nope + shape.qk_rope), shape.num_heads * shape.v_head
        latents = 2 * (shape.q_lora + shape.kv_lora) + shape.qk_rope  # before and after their norms
        # q as projected and rotated, k and v as projected, k with its rotary part, v and the output by themselves
        return tokens * (2 * query + shape.num_heads * shape.qk_nope + value + query + 2 * value) + rows * latents
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # q, k, v as projected, q and k once more after their norm and after the rotation, and the attention's output
    return tokens * ((query + 2 * key) + 2 * (query + key) + query)


def _micro_batches_in_flight(parallel: ParallelConfig, stage: int) -> float:
    """Whole micro-batches of which a stage keeps activations."""
    behind, virtual = parallel.pipeline - stage - 1, parallel.virtual_pipeline
    if virtual == 1:
        return behind + 1
    return (2 * behind + (virtual - 1) * parallel.pipeline + 1) / virtual


def _activation_bytes(config: Config, model: ModelInfo, layers: int, in_flight: float) -> float:
    shape, parallel = model.shape, config.parallel
    size = 4 if config.train.dtype == "fp32" else 2
    tokens = config.train.tokens_per_micro_batch // parallel.context
    one = layer_activation_bytes(config, model, tokens)
    if config.megatron.transformer.get("recompute_granularity") != "full":
        return layers * one * in_flight
    transformer = config.megatron.transformer
    block = transformer.get("recompute_num_layers") or 1
    rows = tokens / (parallel.tensor if parallel.sequence_parallel else 1)
    boundary = rows * shape.hidden * size
    if transformer.get("recompute_method") == "block":  # the first `block` layers are recomputed, the others are not
        block = min(block, layers)
        return in_flight * (block * boundary + (layers - block) * one) + (one if block else 0)
    # uniform: the input of each group of `block` layers is kept, and one group at a time is computed again
    return in_flight * -(-layers // block) * boundary + block * one


def _layers_of_stage(config: Config, model: ModelInfo, stage: int) -> list[int]:
    """Numbers of its layers: a token meets the first chunk of all stages, then the second of all, and so on."""
    sizes = pipeline_layers(config.parallel, config.megatron.transformer, model.shape.num_layers)
    first, found = 0, []
    for chunk in range(config.parallel.virtual_pipeline):
        for number, chunks in enumerate(sizes):
            if number == stage:
                found += range(first, first + chunks[chunk])
            first += chunks[chunk]
    return found


def stage_memory(config: Config, model: ModelInfo, layout: Layout, stage: int) -> Memory:
    """Memory of a rank of pipeline stage `stage` (from 0 on)."""
    first, last = stage == 0, stage == layout.pipeline - 1
    layers = _layers_of_stage(config, model, stage)
    parameters = count_parameters(
        model, layout.tensor, layout.expert, layout.expert_tensor, layers, embedding=first, output=last
    )
    size, state = (4, 8) if config.train.dtype == "fp32" else (2, 12)
    optimizer = (
        state * parameters.dense / (layout.data * layout.context) + state * parameters.experts / layout.expert_data
    )
    chunk = min(LOGITS_CHUNK_TOKENS, config.train.tokens_per_micro_batch)
    logits = 3 * 4 * chunk * model.shape.padded_vocab(layout.tensor) / layout.tensor
    whole = size * count_parameters(model).total
    name = "only" if layout.pipeline == 1 else "first" if first else "last" if last else "middle"
    return Memory(
        stage=name,
        parameters=parameters,
        weights=size * parameters.total,
        gradients=4 * parameters.total,
        optimizer=optimizer,
        activations=_activation_bytes(config, model, len(layers), _micro_batches_in_flight(config.parallel, stage)),
        logits=logits if last else 0,
        weight_sync=0 if config.rollout.replay else 2 * min(config.weights.bucket_mib * 2**20, whole),
    )


def estimate(config: Config, model: ModelInfo, layout: Layout) -> list[Memory]:
    """Memory of a rank of the first, of the fullest middle, and of the last pipeline stage."""
    rows = [stage_memory(config, model, layout, stage) for stage in range(layout.pipeline)]
    middle = [max(rows[1:-1], key=lambda row: row.total)] if layout.pipeline > 2 else []
    return [rows[0], *middle, *rows[1:][-1:]]


def memory_text(config: Config, model: ModelInfo, layout: Layout) -> str:
    """The estimate as a table, in GiB a rank; in MiB for models so small that GiB would show zeros."""
    whole, rows = count_parameters(model), estimate(config, model, layout)
    unit, divisor = ("GiB", GIB) if max(row.total for row in rows) >= GIB else ("MiB", 2**20)
    head = f"{'stage':<8}{'parameters':>14}{'weights':>10}{'gradients':>11}{'optimizer':>11}{'activations':>13}"
    head += f"{'logits':>9}{'sync':>8}{'total':>9}"
    lines = [
        f"estimated memory of a rank in {unit}, of a model of {_count(whole.total)} parameters "
        f"({_count(whole.experts)} in experts)",
        head,
    ]
    for row in rows:
        values = (row.weights, row.gradients, row.optimizer, row.activations, row.logits, row.weight_sync, row.total)
        widths = (10, 11, 11, 13, 9, 8, 9)
        cells = "".join(f"{value / divisor:>{width}.2f}" for value, width in zip(values, widths, strict=True))
        lines.append(f"{row.stage:<8}{row.parameters.total:>14,}{cells}")
    lines.append("not counted: CUDA context and NCCL (2 to 4 GiB a GPU), fragmentation, uneven routing")
    return "\n".join(lines)


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
