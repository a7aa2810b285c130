"""Lets Megatron-Core run on a machine without CUDA, over gloo.

Megatron-Core asks `torch.cuda` for devices, streams, events and generators wherever it goes. Where no CUDA device
exists, `prepare_device()` answers those questions for the CPU; where one exists it only selects this rank's device. The
numerics of Megatron's own modules are untouched. Tested with megatron-core 0.16.1 and 0.19.2.
"""

import contextlib
import functools
import os

import torch

_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like", "as_tensor", "rand",
    "randn", "randint",
)  # fmt: skip


def prepare_device() -> torch.device:
    """Select this rank's CUDA device (LOCAL_RANK), or install the CPU adapter. Idempotent."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        return device
    if not getattr(torch.cuda, "_gspo_megatron_adapter", False):
        _answer_for_cuda()
        _redirect_factories()
        _say_cuda_tensor_types()
        _patch_megatron()
        torch.cuda._gspo_megatron_adapter = True
    return torch.device("cpu")


def collective_backend(device: torch.device) -> str:
    """NCCL on CUDA with gloo for host tensors, gloo alone on the CPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


class _Stream:
    """All work on the CPU is done when a call returns, so streams and events have nothing to order."""

    def __init__(self, *args, **kwargs):
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def wait_stream(self, stream):
        return None

    def wait_event(self, event):
        return None

    def synchronize(self):
        return None

    def record_event(self, event=None):
        return event or _Event()


class _Event:
    def __init__(self, *args, **kwargs):
        self.recorded = False

    def record(self, stream=None):
        self.recorded = True

    def wait(self, stream=None):
        return None

    def synchronize(self):
        return None

    def query(self):
        return True

    def elapsed_time(self, end):
        return 0.0


def _answer_for_cuda() -> None:
    cpu, stream, cuda = torch.device("cpu"), _Stream(), torch.cuda

    def nothing(*args, **kwargs):
        return None

    cuda.current_device = lambda: cpu
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = nothing
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _redirect_factories() -> None:
    """`torch.zeros(..., device="cuda")` and the like give CPU tensors."""

    def redirected(factory):
        @functools.wraps(factory)
        def on_cpu(*args, **kwargs):
            if str(kwargs.get("device") or "").startswith("cuda"):
                kwargs["device"] = torch.device("cpu")
            kwargs.pop("pin_memory", None)  # there is no pinned memory without a GPU
            return factory(*args, **kwargs)

        return on_cpu

    for name in _FACTORIES:
        setattr(torch, name, redirected(getattr(torch, name)))


def _say_cuda_tensor_types() -> None:
    """Megatron's optimizers sort parameters by comparing `tensor.type()` with `torch.cuda.FloatTensor` and others."""
    cpu_type = torch.Tensor.type

    def cuda_type(self, *args, **kwargs):
        answer = cpu_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    torch.Tensor.type = cuda_type


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 looks it up without Transformer Engine too
        moe_utils.te_general_gemm = None

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        # Megatron's own gives numpy only for CUDA tensors; the all-to-all needs its split sizes as numbers.
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    mappings._gather_along_first_dim = _unequal_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _unequal_reduce_scatter(mappings._reduce_scatter_along_first_dim)


def _unequal_gather(equal_gather):
    """Megatron's `_gather_along_first_dim`, which under expert tensor parallelism gathers unequal numbers of tokens.

    gloo gathers equal sizes only: every rank pads to the largest, and the padding is cut out afterwards.
    """

    def gather(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return equal_gather(input_, group, None, use_global_buffer)
        largest = max(output_split_sizes)
        padded = _padded_rows(input_, largest)
        gathered = padded.new_empty(group.size() * largest, *padded.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, padded, group=group)
        parts = gathered.split(largest)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    return gather


def _unequal_reduce_scatter(equal_reduce_scatter):
    """Megatron's `_reduce_scatter_along_first_dim`, likewise."""

    def reduce_scatter(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return equal_reduce_scatter(input_, group, None, use_global_buffer)
        largest = max(input_split_sizes)
        padded = torch.cat([_padded_rows(part, largest) for part in input_.split(list(input_split_sizes))])
        reduced = padded.new_empty(largest, *padded.shape[1:])
        torch.distributed.reduce_scatter_tensor(reduced, padded, group=group)
        return reduced[: input_split_sizes[group.rank()]].contiguous()

    return reduce_scatter


def _padded_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    padded = tensor.new_zeros(num_rows, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    return padded
