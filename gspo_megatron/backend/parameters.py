"""Where this rank stands in the model, and its parameters by names counted over the whole model."""

import re

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.weights.families import canonical_name
from gspo_megatron.weights.plan import Place


def place_of_rank(mesh: Mesh, chunks: Sequence[GPTModel]) -> Place:
    """What of the model this rank holds: `chunks` as `build_model` gave them, not wrapped.

    Layers are numbered by Megatron itself (`TransformerLayer.layer_number`), for uneven and virtual stages too.
    """
    per_rank = (chunks[0].config.num_moe_experts or 0) // mesh.parallel.expert
    first_expert = mesh.expert.rank() * per_rank
    return Place(
        rank=mesh.rank,
        tensor_rank=mesh.tensor.rank(),
        tensor_size=mesh.tensor.size(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tensor_size=mesh.parallel.expert_tensor,
        layers=tuple(layer.layer_number - 1 for chunk in chunks for layer in chunk.decoder.layers),
        experts=tuple(range(first_expert, first_expert + per_rank)),
        has_embedding=chunks[0].pre_process,
        has_output=chunks[-1].post_process,
        dense_replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        expert_replica=parallel_state.get_expert_data_parallel_rank(),
    )


def places_of_all_ranks(mesh: Mesh, place: Place) -> list[Place]:
    """Every rank's place, by rank. Collective."""
    places: list[Place] = [place] * mesh.world_size
    with mesh.waiting_for("the places of all ranks"):
        dist.all_gather_object(places, place, group=mesh.world)
    return places


def global_parameters(chunks: Sequence[nn.Module], place: Place) -> dict[str, Tensor]:
    """Canonical name with global layer and expert numbers -> this rank's parameter, over all its model chunks.

    Buffers that a checkpoint has, say a router's expert_bias, are among them.
    """

    def expert(match: re.Match) -> str:
        return f".local_experts.{place.experts[int(match[1])]}."

    params, first = {}, 0
    for chunk in chunks:
        num_layers = 0
        for name, param in _weights(chunk):
            name = canonical_name(re.sub(r"^(module\.)+", "", name))
            name = re.sub(r"\.local_experts\.(\d+)\.", expert, name)
            match = re.match(r"decoder\.layers\.(\d+)\.", name)
            if match:
                num_layers = max(num_layers, int(match[1]) + 1)
                name = f"decoder.layers.{place.layers[first + int(match[1])]}.{name[match.end() :]}"
            params[name] = param
        first += num_layers
    return params


def _weights(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from chunk.named_parameters()
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer
