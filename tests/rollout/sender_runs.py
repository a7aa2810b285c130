"""Runs on trainer ranks: weight syncs that several of them send, with faults on one of them."""

from unittest import mock

from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.policy import Policy
from gspo_megatron.config import Config, ModelConfig, ParallelConfig, TrainConfig, WeightsConfig
from gspo_megatron.rollout.errors import WeightSyncError
from gspo_megatron.rollout.senders import Crew
from gspo_megatron.rollout.transports.distributed import DistributedTransport
from gspo_megatron.rollout.weight_sync import WeightSync

FAULTY = 2
"""The rank on which faults are made."""


def sync(layout: dict, directory: str, urls: list[str], faults: list[str]) -> dict:
    """A sync for every one of `faults` (empty: none), as versions 1 and up; `errors` by sync, `sent` bytes of rank 0's
    reports, `senders`, and how often this rank sent."""
    mesh = Mesh.create(ParallelConfig(**layout), seed=1, timeout_s=60)
    config = Config(
        model=ModelConfig(hf=directory),
        parallel=mesh.parallel,
        train=TrainConfig(dtype="fp32"),
        weights=WeightsConfig(bucket_mib=0.05, timeout_s=60, checked_share=1.0),
    )
    policy = Policy(config, mesh, train=False)
    order = policy.sending_order("stages")
    crew = Crew(config.weights, "gloo", order, lambda: policy.hf_buckets("stages"), mesh.world)
    weight_sync = None
    if mesh.rank == 0:
        weight_sync = WeightSync(
            config.weights, urls, backend="gloo", expected=policy.hf_tensor_specs,
            engine_name=policy.family.engine_name, model_dir=directory, crew=crew,
        )  # fmt: skip
    result: dict = {"errors": [], "reports": [], "senders": sorted(set(order)), "num_buckets": len(order), "calls": 0}
    send_bucket = DistributedTransport.send_bucket

    def counted(self, bucket):
        result["calls"] += 1
        fault = faults[version - 1] if mesh.rank == FAULTY else ""
        if fault == "raises":
            raise ConnectionResetError("no way to the engines")
        if fault == "changes bytes":
            bucket.flat[:8].bitwise_not_()
        send_bucket(self, bucket)

    def once(version: int) -> None:
        if mesh.rank:
            crew.follow()
            return
        with crew.lead():
            if version == 1:
                weight_sync.connect()
            result["reports"].append(weight_sync.run((), version))

    with mock.patch.object(DistributedTransport, "send_bucket", counted):
        for version in range(1, len(faults) + 1):
            try:
                once(version)
                result["errors"].append("")
            except WeightSyncError as error:
                result["errors"].append(str(error))
    crew.close()
    if weight_sync is not None:
        weight_sync.close()
    mesh.close()
    return result
