"""Mixtral: experts on all layers, under names of its own; `w1` is the gate, `w3` the up, `w2` the down projection."""

from typing import Any

from gspo_megatron.weights.families.table import (
    DECODER, ENGINE_QKV, Family, L, M, Row, experts, hidden, mlp, moe_ffn,
)  # fmt: skip
from gspo_megatron.weights.rules import replicated

_MOE = f"{L}.block_sparse_moe"


def _faults(config: dict[str, Any]) -> list[str]:
    window = config.get("sliding_window")
    return (
        [] if window is None else [f"config.json has sliding_window: {window}, which is not supported; set it to null"]
    )


MIXTRAL = Family(
    "MixtralForCausalLM",
    (
        *DECODER,
        Row((f"{_MOE}.gate.weight",), f"{M}.mlp.router.weight", replicated(experts, hidden)),
        *mlp(f"{_MOE}.experts.{{E}}", f"{M}.mlp.experts.local_experts.{{E}}", moe_ffn, names=("w1", "w3", "w2")),
    ),
    engine_fusions=(
        ENGINE_QKV,
        (r"\.block_sparse_moe\.experts\.\d+\.w[13]\.weight", ".block_sparse_moe.experts.w13_weight"),
        (r"\.block_sparse_moe\.experts\.\d+\.w2\.weight", ".block_sparse_moe.experts.w2_weight"),
    ),
    faults=_faults,
)
