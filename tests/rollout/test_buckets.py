"""The layout of flat buckets is the one SGLang cuts."""

import pytest
import torch

from gspo_megatron.rollout.buckets import BucketWriter


def allocate(size):
    return torch.empty(size, dtype=torch.uint8)


def pack(tensors, capacity):
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = BucketWriter(capacity, expected, allocate)
    buckets = [(bucket, bucket.flat.clone()) for bucket in writer.buckets(tensors.items())]
    return writer, buckets


def unpack(buckets):
    """As SGLang's FlattenedTensorBucket does: no gaps, and each offset a multiple of the item size."""
    tensors = {}
    for bucket, flat in buckets:
        offset = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            assert offset % dtype.itemsize == 0
            size = torch.Size(shape).numel() * dtype.itemsize
            tensors[name] = flat[offset : offset + size].view(dtype).reshape(shape)
            offset += size
        assert offset == flat.numel()
    return tensors


@pytest.mark.parametrize("capacity", [1, 64, 100, 10**6])
def test_tensors_come_back_bit_for_bit(capacity):
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16),  # 30 bytes: fp32 can't follow in the same bucket
        "b": torch.randn(7),
        "transposed": torch.randn(4, 6).T,
        "sliced": torch.randn(8, 8)[::2, 1:5],
        "scalar": torch.tensor(3.0),
        "bias": torch.randn(5, dtype=torch.float64),
    }
    writer, buckets = pack(tensors, capacity)
    found = unpack(buckets)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert writer.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert all(flat.numel() <= capacity or len(bucket.names) == 1 for bucket, flat in buckets)
    assert len(buckets) == (len(tensors) if capacity == 1 else len(buckets))


def test_a_tensor_that_comes_twice_is_refused():
    writer = BucketWriter(100, {"a": (torch.float32, (2,))}, allocate)
    with pytest.raises(ValueError, match="a comes a second time"):
        list(writer.buckets([("a", torch.ones(2)), ("a", torch.ones(2))]))


def test_an_empty_bucket_size_is_refused():
    with pytest.raises(ValueError, match="weights.bucket_mib"):
        BucketWriter(0, {}, allocate)


@pytest.mark.parametrize("capacity", [1, 40, 10**6])
def test_what_must_be_together_is_in_one_bucket_however_it_comes(capacity):
    tensors = {name: torch.randn(size) for name, size in {"q": 6, "x": 3, "kv": 9, "y": 5, "p": 2, "r": 7}.items()}
    group, other = frozenset({"q", "kv"}), frozenset({"p", "r"})
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = BucketWriter(capacity, expected, allocate, {"q": group, "kv": group, "p": other, "r": other})

    def stream():
        buffer = torch.empty(9)  # one for all, as an export's bucket
        for name, tensor in tensors.items():
            view = buffer[: tensor.numel()]
            yield name, view.copy_(tensor)

    buckets = [(bucket, bucket.flat.clone()) for bucket in writer.buckets(stream())]
    found = unpack(buckets)
    assert found.keys() == tensors.keys() == writer.sent.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    for names in (set(bucket.names) for bucket, _ in buckets):
        assert all(pair <= names or not pair & names for pair in (group, other))


def test_a_part_of_what_must_be_together_is_refused():
    pair = frozenset({"q", "kv"})
    spec = (torch.float32, (2,))
    writer = BucketWriter(100, {"q": spec, "kv": spec}, allocate, {"q": pair, "kv": pair})
    with pytest.raises(ValueError, match="q came without"):
        list(writer.buckets([("q", torch.ones(2))]))
    twice = BucketWriter(100, {"q": spec, "kv": spec}, allocate, {"q": pair, "kv": pair})
    with pytest.raises(ValueError, match="q comes a second time"):
        list(twice.buckets([("q", torch.ones(2)), ("q", torch.ones(2))]))
