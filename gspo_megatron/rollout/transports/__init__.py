"""How the bytes of weights reach the engines' ranks; `weights.transport` names one."""

from collections.abc import Callable

from gspo_megatron.rollout.transports.base import Bucket, Setting, WeightTransport
from gspo_megatron.rollout.transports.distributed import DistributedTransport
from gspo_megatron.rollout.transports.tensor import TensorTransport

__all__ = ["TRANSPORTS", "Bucket", "Setting", "WeightTransport"]

TRANSPORTS: dict[str, Callable[[Setting], WeightTransport]] = {
    "distributed": DistributedTransport,
    "tensor": TensorTransport,
}
"""`weights.transport` -> class."""
