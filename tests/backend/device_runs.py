"""What is looked at in a process that has the CPU adapter."""

import torch

from gspo_megatron.backend.device import prepare_device


def _patched() -> dict[str, int]:
    """Identity of everything that the adapter replaces."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    cuda = "current_device Stream Event current_stream default_stream stream synchronize empty_cache get_rng_state"
    names = [(torch.cuda, name) for name in [*cuda.split(), "set_rng_state", "manual_seed", "manual_seed_all"]]
    names += [(torch.cuda.nvtx, "range_push"), (torch.cuda.nvtx, "range_pop")]
    names += [(torch.Tensor, "cuda"), (torch.Tensor, "type"), (torch.nn.Module, "cuda")]
    factories = "tensor zeros ones empty full arange empty_like zeros_like ones_like as_tensor rand randn randint"
    names += [(torch, name) for name in factories.split()]
    names += [(random, "_set_cuda_rng_state"), (random, "_get_cuda_rng_state")]
    names += [(token_dispatcher, "maybe_move_tensor_to_cpu")]
    return {f"{owner.__name__}.{name}": id(getattr(owner, name)) for owner, name in names}


def installed_twice():
    untouched = _patched()
    prepare_device()
    first = _patched()
    device = prepare_device()
    second = _patched()
    assert not [name for name, identity in first.items() if identity == untouched[name]], "everything is replaced"
    return first, second, str(device)


def factories() -> dict:
    prepare_device()
    like = torch.ones(2, 3)
    calls = {
        "tensor": ([[1, 2]],), "zeros": (2, 3), "ones": (2, 3), "empty": (2, 0), "full": ((2,), 7), "arange": (5,),
        "empty_like": (torch.empty(0),), "zeros_like": (like,), "ones_like": (like,), "as_tensor": ([1.5],),
        "rand": (3,), "randn": (3,), "randint": (0, 9, (4,)),
    }  # fmt: skip
    found = {}
    for name, arguments in calls.items():
        torch.manual_seed(1)
        on_cuda = getattr(torch, name)(*arguments, device=torch.device("cuda", 0))
        torch.manual_seed(1)
        by_string = getattr(torch, name)(*arguments, device="cuda")
        torch.manual_seed(1)
        plain = getattr(torch, name)(*arguments)
        same = torch.equal(on_cuda, plain) and torch.equal(by_string, plain) and on_cuda.dtype == plain.dtype
        found[name] = (str(on_cuda.device), same)
    found["untouched"] = [str(torch.zeros(2, device=device).device) for device in ("cpu", "meta")]
    return found


def megatron_patches() -> dict:
    prepare_device()
    from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu

    sizes, module, tensor = torch.tensor([3, 4]), torch.nn.Linear(2, 2), torch.ones(2)
    splits = maybe_move_tensor_to_cpu(sizes, as_numpy=True)
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    seeded = torch.rand(2).tolist()
    after = torch.rand(2).tolist()
    torch.cuda.set_rng_state(state)
    return {
        "types": [torch.ones(1, dtype=kind).type() for kind in (torch.float32, torch.bfloat16, torch.int64)],
        "converted": str(torch.ones(1).type(torch.float64).dtype),
        "splits": (type(splits).__name__, splits.tolist()),
        "without": maybe_move_tensor_to_cpu(None, as_numpy=True),
        "kept": maybe_move_tensor_to_cpu(sizes) is sizes,
        "seeded": seeded,
        "next": after,
        "seeded_again": torch.rand(2).tolist(),
        "current_device": str(torch.cuda.current_device()),
        "same_object": module.cuda() is module and tensor.cuda() is tensor,
    }
