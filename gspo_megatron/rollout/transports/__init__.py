"""How the bytes of weights reach the engines' ranks; `weights.transport` names one."""

from collections.abc import Callable

from gspo_megatron.rollout.transports.base import Bucket, Setting, WeightTransport
from gspo_megatron.rollout.transports.delta import DeltaTransport
from gspo_megatron.rollout.transports.disk import DiskTransport
from gspo_megatron.rollout.transports.distributed import DistributedTransport
from gspo_megatron.rollout.transports.tensor import TensorTransport

__all__ = ["TRANSPORTS", "Bucket", "DiskTransport", "Setting", "WeightTransport"]

TRANSPORTS: dict[str, Callable[[Setting], WeightTransport | DiskTransport]] = {
    "distributed": DistributedTransport,
    "tensor": TensorTransport,
    "disk": DiskTransport,
    "delta": DeltaTransport,
}
"""`weights.transport` -> class."""
