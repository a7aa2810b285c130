"""Which parameters of which engines a sync proves, and whether engines still hold them a step later."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gspo_megatron.rollout.client import SGLangClient
from gspo_megatron.rollout.engines import Engine, rank_checksums, shown
from gspo_megatron.rollout.errors import RequestError, WeightSyncError
from gspo_megatron.rollout.proof import Checksums, Expected, Rotation, layout_bytes, skipped

MARK_BYTES = 64 * 2**20
"""Size, in bytes on a rank, up to which a parameter's checksum is asked for after every step."""


@dataclass
class Proof:
    """Of one sync. `sample`: URL -> engine parameters. `by_kind`: their expected checksums, once for all servers that
    cut parameters alike."""

    engines: Mapping[str, Engine]
    sample: Mapping[str, Sequence[str]]
    by_kind: Mapping[tuple, Expected]
    num_checked: int = 0

    @property
    def expected(self) -> list[Expected]:
        """All that want to see the tensors on their way out."""
        return list(self.by_kind.values())

    def ask(self, client: SGLangClient) -> list[Checksums]:
        """[engine rank] what a server says of its sample. Raises RequestError."""
        return ask(self.engines[client.url], self.sample[client.url])

    def differing(self, answers: Mapping[str, list[Checksums]]) -> str:
        """Which parameters of which rank are not what was sent; empty where all are, which `num_checked` counts."""
        sent = {kind: expected.checksums() for kind, expected in self.by_kind.items()}
        self.num_checked = 0
        for url, found in answers.items():
            engine = self.engines[url]
            for rank, checksums in enumerate(sent.get(_kind(engine), [])):
                wrong = [
                    f"{name} (it has {found[rank].get(name)}, sent was {values[0]})"
                    for name, values in checksums.items()
                    if found[rank].get(name) not in values
                ]
                if wrong:
                    return f"{engine.label(rank)} does not hold what was sent: {shown(wrong)}"
                self.num_checked += len(checksums)
        return ""


class Prover:
    """`share`: of the parameters' bytes, 0 to 1, that a sync proves when it does not prove everything."""

    def __init__(self, share: float, dtypes: Mapping[str, torch.dtype]):
        self._share, self._dtypes, self._rotation = share, dtypes, Rotation(share)
        self._marks: dict[str, list[Checksums]] = {}
        """URL -> [engine rank] the checksum of one parameter, as the last sync left it."""

    def begin(self, engines: Mapping[str, Engine], everything: bool) -> Proof:
        """Before the tensors of a sync go out."""
        sample = self._sample(engines, everything)
        by_kind: dict[tuple, Expected] = {}
        for url, names in sample.items():
            engine = engines[url]
            if names and _kind(engine) not in by_kind:
                by_kind[_kind(engine)] = Expected(engine.layout, names, self._dtypes, engine.on_gpu)
        return Proof(engines, sample, by_kind)

    def _sample(self, engines: Mapping[str, Engine], everything: bool) -> dict[str, list[str]]:
        if not self._share:
            return {url: [] for url in engines}
        if everything:
            return {url: list(engine.layout) for url, engine in engines.items()}
        first = next(iter(engines.values()))
        taken = self._rotation.take(layout_bytes(first.layout, self._dtypes))
        return {url: [name for name in taken if name in engine.layout] for url, engine in engines.items()}

    def remember(self, proof: Proof, answers: Mapping[str, list[Checksums]]) -> None:
        """What `check_unchanged` compares with, from now on."""
        self._marks = {}
        for url, found in answers.items():
            name = self._telling(proof.engines[url], proof.sample[url])
            self._marks[url] = [{name: rank[name]} for rank in found] if name else []

    def check_unchanged(self, engines: Mapping[str, Engine], version: int) -> None:
        """Raises WeightSyncError where a server has other weights than the last sync left there, or another version.

        Whoever else writes to a server is found this way, also under the same version number. A server that does not
        answer, or was started anew, is left to others to find.
        """
        for url, mark in self._marks.items():
            try:
                found = engines[url].client.weight_version()
                checksums = ask(engines[url], list(mark[0])) if mark else []
            except RequestError:
                continue
            pairs = zip(mark, checksums, strict=True) if mark else ()
            changed = sorted({name for old, new in pairs for name in old if old[name] != new.get(name)})
            if found.isdecimal() and (found != str(version) or changed):
                other = f" and other {shown(changed)}" if changed else ""
                raise WeightSyncError(
                    f"{url} no longer holds what this run sent as weight version {version}: it reports version"
                    f" {found}{other}; does another run send weights to it?"
                )

    def _telling(self, engine: Engine, sample: Sequence[str]) -> str:
        """A large parameter of the sample, which no two steps leave the same, that is soon hashed; or nothing."""
        sizes = layout_bytes({name: engine.layout[name] for name in sample}, self._dtypes)
        return max((name for name in sizes if sizes[name] <= MARK_BYTES), key=sizes.get, default="")


def ask(engine: Engine, sample: Sequence[str]) -> list[Checksums]:
    """[engine rank] the server's checksums of these parameters. Raises RequestError."""
    if not sample:
        return []
    answer = engine.client.weights_checker("checksum", skip=skipped(sorted(engine.parameters), sample))
    return [{name: rank.get(name, "none") for name in sample} for rank in rank_checksums(answer)]


def _kind(engine: Engine) -> tuple:
    return len(engine.ranks), engine.info.get("ep_size", 1), engine.on_gpu, tuple(engine.layout)
