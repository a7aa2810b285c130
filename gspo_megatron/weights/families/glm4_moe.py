"""GLM-4.5 and 4.6 (mixture of experts): dense first layers, shared experts, a sigmoid router whose selection bias stays
fp32, rotary embedding on a part of each head. Multi-token-prediction layers are carried along
(`weights/prediction_layers.py`)."""

from gspo_megatron.weights.families.table import (
    DECODER, DENSE_LAYERS, EXPERTS, QK_NORMS, QKV_BIAS, ROUTER, Family, L, M, Row, experts, mlp, on_moe_layers,
    shared_ffn, sigmoid_router_faults,
)  # fmt: skip
from gspo_megatron.weights.rules import vector

_QKV_BIAS = QKV_BIAS.where(lambda shape, layer: shape.attention_bias)
_QK_NORMS = tuple(row.where(lambda shape, layer: shape.qk_norm) for row in QK_NORMS)

GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    (
        *DECODER, _QKV_BIAS, *_QK_NORMS, ROUTER,
        Row(
            (f"{L}.mlp.gate.e_score_correction_bias",), f"{M}.mlp.router.expert_bias", vector(experts), on_moe_layers,
            keep_fp32=True,
        ),
        *EXPERTS,
        *mlp(f"{L}.mlp.shared_experts", f"{M}.mlp.shared_experts", shared_ffn, on_moe_layers),
        *DENSE_LAYERS,
    ),
    models=("attention_bias", "partial_rotary_factor"),
    faults=sigmoid_router_faults,
)  # fmt: skip
