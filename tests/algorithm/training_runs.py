"""What a trainer rank runs for test_in_training.py."""

from gspo_megatron.config_loader import load_config
from gspo_megatron.trainer import train


def train_from(path: str, overrides: list[str]) -> None:
    train(load_config(path, overrides))


def by_position(advantages, rewards, responses):
    """Token advantages that rise along the response to the sample's own."""
    return [[a * (t + 1) / len(ids) for t in range(len(ids))] for a, ids in zip(advantages, responses, strict=True)]
