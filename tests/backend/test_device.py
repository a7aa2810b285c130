"""The CPU adapter, in a process of its own, since it changes torch for good."""

import pytest
from device_runs import factories, installed_twice, megatron_patches

from tests.ranks import run_ranks


def test_installing_it_twice_changes_nothing():
    first, second, device = run_ranks(installed_twice, 1)[0]
    assert first == second and device == "cpu" and len(first) > 30


def test_cuda_devices_give_cpu_tensors():
    found = run_ranks(factories, 1)[0]
    assert found.pop("untouched") == ["cpu", "meta"]
    assert len(found) == 13
    for name, (device, equal) in found.items():
        assert device == "cpu" and equal, name


def test_megatron_gets_what_it_asks_for():
    found = run_ranks(megatron_patches, 1)[0]
    assert found["types"] == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", "torch.cuda.LongTensor"]
    assert found["converted"] == "torch.float64"
    assert found["splits"] == ("ndarray", [3, 4]) and found["without"] is None and found["kept"]
    assert found["seeded"] == found["seeded_again"] != found["next"]
    assert found["current_device"] == "cpu" and found["same_object"]


@pytest.mark.parametrize("kind, expected", [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
def test_collectives_by_device(kind, expected):
    import torch

    from gspo_megatron.backend.device import collective_backend

    assert collective_backend(torch.device(kind)) == expected
