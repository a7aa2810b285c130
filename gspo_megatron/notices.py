"""Hides what libraries say on every start and what means nothing here, so that what a user reads is meant for them."""

import logging
import re
import warnings

_ON_CPU = (
    # Megatron-Core looks for GPU libraries that a CPU has no use for.
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    r"No CUDA runtime is found",  # by a torch that was built for GPUs
    # Both generators are one where there is no GPU.
    r"CPU RNG state changed within GPU RNG context",
)
_ALWAYS = (
    r"GPTModel IS DEPRECATED",
    r"full_param_layout not provided",  # DDP of megatron-core 0.19 computes it, as it should
    # names that Megatron-Core still uses and torch renames
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
    r"`load_state_dict` is deprecated and will be removed in future versions",
    # how megatron-core 0.19 reads the common part of a checkpoint, by each rank for itself
    r"torch\.distributed is disabled, unavailable or uninitialized, assuming the intent is to load in a single process",
    r"The argument order of load has been changed",
    r"MCore's async save is deprecated",  # said by every save, asynchronous or not
    r"full scope is deprecated\. Use empty cuda_graph",
    r"MimoModelConfig is experimental",
    r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # torch's own autograd hooks reading `grad` of Megatron's non-leaf views
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)


def hide_known_notices(on_gpu: bool) -> None:
    """Call before megatron is imported. Warnings that are not listed in this file come through."""
    patterns = _ALWAYS if on_gpu else _ALWAYS + _ON_CPU
    for pattern in patterns:
        warnings.filterwarnings("ignore", message=f".*{pattern}")
    known = re.compile("|".join(patterns))
    if logging.lastResort is not None:
        logging.lastResort.addFilter(lambda record: not known.search(record.getMessage()))
