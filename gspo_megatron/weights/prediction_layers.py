"""Multi-token-prediction layers (DeepSeek-V3, arXiv 2412.19437, section 2.2), which the trainer carries along
untrained.

They are in the files behind the last layer, `model.layers.{num_layers}` and up. Engines draft with them and verify with
the model, so that untrained ones cost acceptance and never change what is sampled. They have copies of the embedding
and the output layer, which are trained: those are written as the model has them.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from gspo_megatron.weights.hf_files import HFReader, read_hf_config

KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
_COPIES = {".embed_tokens.weight": "model.embed_tokens.weight", ".shared_head.head.weight": "lm_head.weight"}


class PredictionLayers:
    """Those in the files of the checkpoint `directory`; none where its config.json says so, or it has no weights."""

    def __init__(self, directory: str | Path):
        config = read_hf_config(directory)
        first = config["num_hidden_layers"]
        number = next((config[key] for key in KEYS if config.get(key)), 0)
        self._reader = HFReader(directory) if number and any(Path(directory).glob("*.safetensors")) else None
        self._names = sorted(n for n in self._reader.names if _layer(n) >= first) if self._reader else []
        self.number = len({_layer(name) for name in self._names})
        tied = bool(config.get("tie_word_embeddings"))
        self._copies: dict[str, list[str]] = {}
        for name in self._names:
            source = next((source for ending, source in _COPIES.items() if name.endswith(ending)), None)
            if source is not None:
                source = "model.embed_tokens.weight" if tied else source
                self._copies.setdefault(source, []).append(name)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._reader.shape(name) for name in self._names}

    @property
    def reader(self) -> HFReader | None:
        """Of the files that have them; None where there are none."""
        return self._reader

    @property
    def copies(self) -> dict[str, str]:
        """Name -> the trained tensor that it is a copy of."""
        return {copy: source for source, names in self._copies.items() for copy in names}

    def added_to(self, tensors: Iterable[tuple[str, Tensor]], rank: int, size: int) -> Iterator[tuple[str, Tensor]]:
        """`tensors`, with the copies of those that have some, then the share of rank `rank` of `size` of the others,
        read from the files one by one."""
        for name, tensor in tensors:
            yield name, tensor
            for copy in self._copies.get(name, ()):
                yield copy, tensor
        copies = {copy for names in self._copies.values() for copy in names}
        for name in [name for name in self._names if name not in copies][rank::size]:
            shape = self._reader.shape(name)
            yield name, self._reader.read(name, (0,) * len(shape), shape)


def _layer(name: str) -> int:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def with_number(config: dict[str, Any], number: int) -> dict[str, Any]:
    """config.json of a checkpoint that has `number` of these layers."""
    return config | {key: number for key in KEYS if config.get(key)}
