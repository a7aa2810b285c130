"""What the engines are that a weight sync writes to: ranks, parameters, layout, and whether they fit the model."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gspo_megatron.config import ConfigError
from gspo_megatron.rollout.buckets import TensorSpec
from gspo_megatron.rollout.client import SGLangClient
from gspo_megatron.rollout.preflight import ServerFacts
from gspo_megatron.rollout.proof import Checksums, Layout
from gspo_megatron.weights.engine_layout import EngineGeometry, engine_layout
from gspo_megatron.weights.hf_files import read_hf_config

NAMES_SHOWN = 10
_DTYPES = {"float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPES["half"] = torch.float16


@dataclass
class Engine:
    """One server. Learned again after it was restarted."""

    client: SGLangClient
    info: dict[str, Any]
    """/server_info and /model_info."""
    ranks: list[set[str]]
    """[engine rank] -> names of the parameters that it holds."""
    layout: Layout = field(default_factory=dict)
    """Of the parameters whose bytes are known."""

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def started(self) -> Any:
        """Differs between a server and the one that is started in its place."""
        return self.info.get("startup_time")

    @property
    def on_gpu(self) -> bool:
        return self.info.get("device") != "cpu"

    @property
    def parameters(self) -> set[str]:
        return set().union(*self.ranks)

    @property
    def num_unknown(self) -> int:
        """Parameters, over all ranks, whose bytes are not known."""
        return sum(len(names - self.layout.keys()) for names in self.ranks)

    def least_bytes(self, dtypes: Mapping[str, torch.dtype]) -> int:
        """Bytes of all ranks' parameters whose layout is known, without what is filled up with zeros."""
        pieces = (piece for ranks in self.layout.values() for rank in ranks for piece in rank if piece.hf)
        return sum(dtypes[piece.hf].itemsize * torch.Size(piece.shape).numel() for piece in pieces)

    def label(self, rank: int) -> str:
        return f"{self.url} rank {rank} of {len(self.ranks)}"


class Model:
    """What will be sent, and how engines name and cut it."""

    def __init__(self, expected: Mapping[str, TensorSpec], engine_name: Callable[[str], str], model_dir: Path | None):
        self.expected, self.engine_name = dict(expected), engine_name
        self.dtypes = {name: dtype for name, (dtype, _) in expected.items()}
        self._shapes = {name: tuple(shape) for name, (_, shape) in expected.items()}
        self._hf_config = read_hf_config(model_dir) if model_dir else None

    def learn(self, client: SGLangClient) -> Engine:
        """Ask a server what it is. Raises RequestError where it does not answer, ConfigError for another model."""
        info = {**client.server_info(), **client.model_info()}
        self._check(client.url, info)
        ranks = [set(checksums) for checksums in rank_checksums(client.weights_checker("checksum"))]
        engine = Engine(client, info, ranks)
        # a quantised engine answers checksums of other bytes than were sent
        if self._hf_config is not None and not info.get("quantization"):
            geometry = EngineGeometry.of(self._hf_config, info)
            if geometry.tensor == len(ranks):
                engine.layout = engine_layout(self._shapes, self.engine_name, geometry, sorted(engine.parameters))
        return engine

    def _check(self, url: str, info: Mapping[str, Any]) -> None:
        ours = (self._hf_config or {}).get("architectures")
        if ours and info.get("architectures") and info["architectures"] != ours:
            raise ConfigError(
                f"rollout.servers: {url} serves {', '.join(info['architectures'])} and model.hf is {', '.join(ours)};"
                " start it with the model of model.hf"
            )
        vocabulary = (self._hf_config or {}).get("vocab_size")
        theirs = ServerFacts(url, dict(info)).vocab_size()
        if vocabulary and theirs and vocabulary != theirs:
            raise ConfigError(
                f"rollout.servers: {url} serves {info['model_path']} with a vocabulary of {theirs}, model.hf has"
                f" {vocabulary}; start it with the model of model.hf"
            )
        found = _DTYPES.get(str(info.get("dtype")))
        wanted = Counter(self.dtypes.values()).most_common(1)[0][0] if self.dtypes else None
        if found is not None and wanted is not None and found != wanted:
            name = str(wanted).removeprefix("torch.")
            raise ConfigError(
                f"rollout.servers: {url} holds its weights as {info['dtype']} and the trainer sends {name}: they would"
                f" be rounded; start it with --dtype {name}, or change train.dtype"
            )

    def misfits(self, engine: Engine) -> str:
        """Tensors without a parameter there, or parameters without a tensor; empty where all fit.

        SGLang answers success for a name that it does not know, so this is where such names are found.
        """
        targets = {self.engine_name(name): name for name in self.expected}
        unknown = [f"{name} (as {target})" for target, name in targets.items() if target not in engine.parameters]
        if unknown:
            return f"the engines have no parameter for {shown(unknown)}"
        for rank, parameters in enumerate(engine.ranks):
            uncovered = sorted(parameters - targets.keys())
            if uncovered:
                return f"no tensor sent fills these parameters of {engine.label(rank)}: {shown(uncovered)}"
        return ""


def rank_checksums(answer: Mapping[str, Any]) -> list[Checksums]:
    """[engine rank] -> parameter -> checksum, from what /weights_checker answers."""
    ranks = sorted(answer["ranks"], key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
    return [rank["checksums"] for rank in ranks]


def shown(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
