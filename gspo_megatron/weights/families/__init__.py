"""Model families, each one table in a module of its own."""

from gspo_megatron.weights.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from gspo_megatron.weights.families.glm4_moe import GLM4_MOE
from gspo_megatron.weights.families.gpt_oss import GPT_OSS
from gspo_megatron.weights.families.llama import LLAMA
from gspo_megatron.weights.families.mixtral import MIXTRAL
from gspo_megatron.weights.families.names import canonical_name
from gspo_megatron.weights.families.qwen2 import QWEN2
from gspo_megatron.weights.families.qwen2_moe import QWEN2_MOE
from gspo_megatron.weights.families.qwen3 import QWEN3
from gspo_megatron.weights.families.qwen3_moe import QWEN3_MOE
from gspo_megatron.weights.families.table import Family, Row

_ALL = (QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, LLAMA, MIXTRAL, GLM4_MOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3)
FAMILIES: dict[str, Family] = {family.architecture: family for family in _ALL}
"""HF architecture -> family."""

LACKING = {
    "Qwen3NextForCausalLM": "Megatron-Core has its gated delta layers for Transformer Engine with flash-linear-attention "
    "only, and on 0.16.1 neither for packed sequences nor for context parallelism",
}
"""Architectures that were looked into and can't be built on all supported versions of Megatron-Core -> why."""


def unsupported(architecture: str) -> str:
    """What to tell the user about an architecture that is not one of `FAMILIES`."""
    reason = f" ({LACKING[architecture]})" if architecture in LACKING else ""
    return f"architecture {architecture} is not supported{reason}; supported are {', '.join(FAMILIES)}"


__all__ = ["FAMILIES", "LACKING", "Family", "Row", "canonical_name", "unsupported"]
