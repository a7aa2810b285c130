"""Model families, each one table in a module of its own."""

from gspo_megatron.weights.families.names import canonical_name
from gspo_megatron.weights.families.qwen3 import QWEN3
from gspo_megatron.weights.families.qwen3_moe import QWEN3_MOE
from gspo_megatron.weights.families.table import Family, Row

FAMILIES: dict[str, Family] = {family.architecture: family for family in (QWEN3, QWEN3_MOE)}
"""HF architecture -> family."""

__all__ = ["FAMILIES", "Family", "Row", "canonical_name"]
