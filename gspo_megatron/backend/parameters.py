"""Where this rank stands in the model, and its parameters by names counted over the whole model."""

import re

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.weights.families import canonical_name
from gspo_megatron.weights.plan import Place


def place_of_rank(mesh: Mesh, config: TransformerConfig) -> Place:
    """What of the model this rank holds."""
    offset = get_transformer_layer_offset(config)
    per_rank = (config.num_moe_experts or 0) // mesh.parallel.expert
    first_expert = mesh.expert.rank() * per_rank
    return Place(
        rank=mesh.rank,
        tensor_rank=mesh.tensor.rank(),
        tensor_size=mesh.tensor.size(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tensor_size=mesh.parallel.expert_tensor,
        layers=tuple(range(offset, offset + get_num_layers_to_build(config))),
        experts=tuple(range(first_expert, first_expert + per_rank)),
        has_embedding=mesh.is_first_stage,
        has_output=mesh.is_last_stage,
        dense_replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        expert_replica=parallel_state.get_expert_data_parallel_rank(),
    )


def places_of_all_ranks(mesh: Mesh, place: Place) -> list[Place]:
    """Every rank's place, by rank. Collective."""
    places: list[Place] = [place] * mesh.world_size
    with mesh.waiting_for("the places of all ranks"):
        dist.all_gather_object(places, place, group=mesh.world)
    return places


def global_parameters(model: nn.Module, place: Place) -> dict[str, Tensor]:
    """Canonical name with global layer and expert numbers -> this rank's parameter."""

    def layer(match: re.Match) -> str:
        return f"decoder.layers.{place.layers[int(match[1])]}."

    def expert(match: re.Match) -> str:
        return f".local_experts.{place.experts[int(match[1])]}."

    params = {}
    for name, param in model.named_parameters():
        name = canonical_name(re.sub(r"^(module\.)+", "", name))
        name = re.sub(r"\.local_experts\.(\d+)\.", expert, name)
        params[re.sub(r"^decoder\.layers\.(\d+)\.", layer, name)] = param
    return params
