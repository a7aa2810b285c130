"""gpt-oss, unquantised: biases everywhere, a learned sink a head, sliding windows on every other layer, and the experts
of a layer stacked in one tensor [experts, in, out], gate and up projection taking turns column by column."""

from typing import Any

from gspo_megatron.weights.families.table import (
    DECODER, ENGINE_QKV, MA, QKV_BIAS, A, Family, L, M, Row, experts, hidden, moe_ffn, num_heads,
)  # fmt: skip
from gspo_megatron.weights.rules import (
    column_vector,
    replicated,
    stacked_gated,
    stacked_gated_bias,
    stacked_row,
    vector,
)

_E, _ME = f"{L}.mlp.experts", f"{M}.mlp.experts.local_experts.{{E}}"


def _faults(config: dict[str, Any]) -> list[str]:
    alpha = config.get("swiglu_alpha", 1.702)
    return [] if alpha == 1.702 else [f"config.json has swiglu_alpha: {alpha}, Megatron's quick GELU has 1.702"]


GPT_OSS = Family(
    "GptOssForCausalLM",
    (
        *DECODER, QKV_BIAS,
        Row((f"{A}.o_proj.bias",), f"{MA}.linear_proj.bias", vector(hidden)),
        Row((f"{A}.sinks",), f"{MA}.core_attention.softmax_offset", column_vector(num_heads)),
        Row((f"{L}.mlp.router.weight",), f"{M}.mlp.router.weight", replicated(experts, hidden)),
        Row((f"{L}.mlp.router.bias",), f"{M}.mlp.router.bias", vector(experts)),
        Row((f"{_E}.gate_up_proj[{{E}}]",), f"{_ME}.linear_fc1.weight", stacked_gated(moe_ffn)),
        Row((f"{_E}.gate_up_proj_bias[{{E}}]",), f"{_ME}.linear_fc1.bias", stacked_gated_bias(moe_ffn)),
        Row((f"{_E}.down_proj[{{E}}]",), f"{_ME}.linear_fc2.weight", stacked_row(hidden, moe_ffn)),
        Row((f"{_E}.down_proj_bias[{{E}}]",), f"{_ME}.linear_fc2.bias", vector(hidden)),
    ),
    engine_fusions=(
        ENGINE_QKV,
        (r"\.mlp\.experts\.gate_up_proj(_bias)?$", r".mlp.experts.w13_weight\1"),
        (r"\.mlp\.experts\.down_proj(_bias)?$", r".mlp.experts.w2_weight\1"),
    ),
    models=("attention_bias",),
    faults=_faults,
)  # fmt: skip
