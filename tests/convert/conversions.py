"""Runs conversions in processes of their own, as they make a process group."""

from collections.abc import Sequence

from tests.ranks import run_ranks


def to_megatron(options: Sequence, num_ranks: int = 1) -> list[str]:
    """`gspo_megatron.convert_to_megatron.convert` for each; raises RuntimeError with its traceback."""
    return run_ranks(_to_megatron, num_ranks, list(options))[0]


def _to_megatron(options: Sequence) -> list[str]:
    from gspo_megatron.convert_to_megatron import convert

    return [convert(each) for each in options]
