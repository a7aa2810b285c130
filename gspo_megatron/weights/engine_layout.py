"""How an engine rank's parameter is composed of Hugging Face tensors: fused, stacked, cut and padded.

Pure data: a parameter is a list of pieces whose bytes, one after the other, are the parameter's. Rules go by the
parameter's name, which a family's `engine_fusions` give; they are held against SGLang 0.5.23's checksums, with one and
two tensor-parallel ranks, in `tests/rollout/test_transports.py`. A parameter that no rule knows has no pieces: it can't
be proven, and is reported as such.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VOCABULARY_MULTIPLE = 64
"""SGLang pads the vocabulary's rows to a multiple of this, so that all tensor ranks hold as many."""

CPU_FFN_MULTIPLE = 32
"""Its CPU engines pad a rank's part of a feed-forward layer's inner size to a multiple of this."""
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class Piece:
    """A block of the HF tensor `hf`, with zeros after it in every dimension up to `padded`; without a name, zeros."""

    hf: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    padded: tuple[int, ...] = ()
    """The shape with its zeros; empty where there are none."""


@dataclass(frozen=True)
class EngineGeometry:
    """Ranks of one server, and what its cuts depend on. `expert` ranks lie across the `tensor` ranks."""

    tensor: int
    expert: int
    num_heads: int
    num_kv_heads: int
    num_experts: int
    ffn_multiple: int = 1
    """The inner size of feed-forward layers is padded to a multiple of this times `tensor`."""

    @classmethod
    def of(cls, hf_config: Mapping[str, Any], info: Mapping[str, Any]) -> "EngineGeometry":
        """From the model's config.json and a server's /server_info."""
        text = {**hf_config, **(hf_config.get("text_config") or {})}
        heads = int(text.get("num_attention_heads", 0))
        experts = next((int(text[key]) for key in _NUM_EXPERTS if key in text), 0)
        kv_heads = int(text.get("num_key_value_heads", heads))
        ffn_multiple = CPU_FFN_MULTIPLE if info.get("device") == "cpu" else 1
        return cls(int(info["tp_size"]), int(info.get("ep_size", 1)), heads, kv_heads, experts, ffn_multiple)


@dataclass(frozen=True)
class _Parameter:
    name: str
    hf: Sequence[str]
    """In the order of the names' first appearance."""
    shapes: Mapping[str, tuple[int, ...]]
    geometry: EngineGeometry


Rule = Callable[[_Parameter, int], list[Piece] | None]


def engine_layout(
    shapes: Mapping[str, tuple[int, ...]],
    engine_name: Callable[[str], str],
    geometry: EngineGeometry,
    parameters: Iterable[str],
) -> dict[str, list[list[Piece]]]:
    """Engine parameter -> [tensor rank] -> its pieces in the order of its memory.

    Only of the `parameters` given (all that a server has), and without those that no rule knows.
    """
    sources: dict[str, list[str]] = defaultdict(list)
    for name in shapes:
        sources[engine_name(name)].append(name)
    found = {}
    for name in parameters:
        parameter = _Parameter(name, sources.get(name, ()), shapes, geometry)
        ranks = [_pieces(parameter, rank) for rank in range(geometry.tensor)]
        if all(ranks):
            found[name] = ranks
    return found


def _pieces(parameter: _Parameter, rank: int) -> list[Piece] | None:
    for pattern, rule in RULES:
        if re.search(pattern, parameter.name):
            return rule(parameter, rank)
    if parameter.geometry.tensor == 1 and len(parameter.hf) == 1:
        return _whole(parameter, rank)
    return None


def _cut(hf: str, shape: Sequence[int], dim: int, index: int, count: int) -> Piece | None:
    """Part `index` of `count` along `dim`, the whole of other dimensions."""
    if shape[dim] % count:
        return None
    size = shape[dim] // count
    start, part = [0] * len(shape), list(shape)
    start[dim], part[dim] = index * size, size
    return Piece(hf, tuple(start), tuple(part))


def _ffn_cut(hf: str, shape: Sequence[int], dim: int, index: int, count: int, multiple: int) -> Piece:
    """As `_cut`, where the ranks' parts are a multiple, and the last ones are filled up with zeros."""
    each = -(-shape[dim] // (multiple * count)) * multiple
    start, part, padded = [0] * len(shape), list(shape), list(shape)
    held = max(0, min(each, shape[dim] - index * each))
    start[dim], part[dim], padded[dim] = (index * each if held else 0), held, each
    return Piece(hf, tuple(start), tuple(part), tuple(padded) if held < each else ())


def _whole(parameter: _Parameter, rank: int) -> list[Piece] | None:
    if len(parameter.hf) != 1:
        return None
    shape = parameter.shapes[parameter.hf[0]]
    return [Piece(parameter.hf[0], (0,) * len(shape), tuple(shape))]


def _along(dim: int) -> Rule:
    def rule(parameter: _Parameter, rank: int) -> list[Piece] | None:
        if len(parameter.hf) != 1:
            return None
        piece = _cut(parameter.hf[0], parameter.shapes[parameter.hf[0]], dim, rank, parameter.geometry.tensor)
        return [piece] if piece else None

    return rule


def _vocabulary(parameter: _Parameter, rank: int) -> list[Piece] | None:
    if len(parameter.hf) != 1:
        return None
    name, ranks = parameter.hf[0], parameter.geometry.tensor
    rows, hidden = parameter.shapes[name]
    multiple = VOCABULARY_MULTIPLE
    if -(-rows // multiple) * multiple % ranks:
        multiple *= ranks
    each = -(-rows // multiple) * multiple // ranks
    held = max(0, min(each, rows - rank * each))
    pieces = [Piece(name, (rank * each, 0), (held, hidden))] if held else []
    return pieces + ([Piece("", (0, 0), (each - held, hidden))] if held < each else [])


def _qkv(parameter: _Parameter, rank: int) -> list[Piece] | None:
    by_kind = {re.search(r"\.([qkv])_proj\.", name)[1]: name for name in parameter.hf}
    if set(by_kind) != set("qkv"):
        return None
    tensor, kv_heads = parameter.geometry.tensor, parameter.geometry.num_kv_heads
    parts = min(tensor, kv_heads)
    if tensor % parts or kv_heads % parts:
        return None
    # with fewer KV heads than ranks, neighbours hold the same head
    places = {"q": (rank, tensor), "k": (rank * parts // tensor, parts), "v": (rank * parts // tensor, parts)}
    pieces = [_cut(by_kind[kind], parameter.shapes[by_kind[kind]], 0, *places[kind]) for kind in "qkv"]
    return pieces if all(pieces) else None


def _gate_up(parameter: _Parameter, rank: int) -> list[Piece] | None:
    names = [name for kind in ("gate", "up") for name in parameter.hf if f".{kind}_proj." in name]
    if len(names) != 2 or len(parameter.hf) != 2:
        return None
    ranks, multiple = parameter.geometry.tensor, parameter.geometry.ffn_multiple
    return [_ffn_cut(name, parameter.shapes[name], 0, rank, ranks, multiple) for name in names]


def _down(parameter: _Parameter, rank: int) -> list[Piece] | None:
    if len(parameter.hf) != 1:
        return None
    name, geometry = parameter.hf[0], parameter.geometry
    return [_ffn_cut(name, parameter.shapes[name], 1, rank, geometry.tensor, geometry.ffn_multiple)]


_EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+?)(?:_proj)?\.weight$")
_EXPERT_KIND = {"gate": 0, "w1": 0, "up": 1, "w3": 1, "down": 0, "w2": 0}


def _experts(dim: int) -> Rule:
    """Stacked experts, expert by expert; each cut along `dim`, gate before up."""

    def rule(parameter: _Parameter, rank: int) -> list[Piece] | None:
        geometry = parameter.geometry
        places = {}
        for name in parameter.hf:
            match = _EXPERT.search(name)
            if match is None or match[2] not in _EXPERT_KIND:
                return None
            places[int(match[1]), _EXPERT_KIND[match[2]]] = name
        kinds = 1 + max((kind for _, kind in places), default=0)
        if geometry.tensor % geometry.expert or geometry.num_experts % geometry.expert:
            return None
        cuts, each = geometry.tensor // geometry.expert, geometry.num_experts // geometry.expert
        first = rank // cuts * each
        wanted = [(expert, kind) for expert in range(first, first + each) for kind in range(kinds)]
        if not wanted or any(place not in places for place in wanted):
            return None
        names = [places[place] for place in wanted]
        multiple = geometry.ffn_multiple * (geometry.tensor // cuts)
        return [_ffn_cut(name, parameter.shapes[name], dim, rank % cuts, cuts, multiple) for name in names]

    return rule


def _stacked(*kinds: str) -> Rule:
    """Whole tensors one after the other, on every rank."""

    def rule(parameter: _Parameter, rank: int) -> list[Piece] | None:
        names = [name for kind in kinds for name in parameter.hf if f".{kind}." in name]
        if len(names) != len(kinds) or len(parameter.hf) != len(kinds):
            return None
        shapes = [tuple(parameter.shapes[name]) for name in names]
        return [Piece(name, (0,) * len(shape), shape) for name, shape in zip(names, shapes, strict=True)]

    return rule


RULES: tuple[tuple[str, Rule], ...] = (
    (r"\.self_attn\.qkv_proj\.(weight|bias)$", _qkv),
    (r"\.self_attn\.fused_qkv_a_proj_with_mqa\.weight$", _stacked("q_a_proj", "kv_a_proj_with_mqa")),
    (r"\.self_attn\.(q_proj|q_b_proj|kv_b_proj)\.weight$", _along(0)),
    (r"\.(kv_a_proj_with_mqa\.weight|e_score_correction_bias)$", _whole),
    (r"\.experts\.w13_weight$", _experts(0)),
    (r"\.experts\.w2_weight$", _experts(1)),
    (r"\.gate_up_proj\.weight$", _gate_up),
    (r"\.self_attn\.o_proj\.weight$", _along(1)),
    (r"\.down_proj\.weight$", _down),
    (r"^(model\.embed_tokens|lm_head)\.weight$", _vocabulary),
    (r"(layernorm|norm)\.weight$", _whole),
    (r"\.(mlp|block_sparse_moe)\.(gate|shared_expert_gate)\.weight$", _whole),
)
"""Pattern of an engine's parameter -> rule; the first that matches."""

ONE_MESSAGE = (r"\.fused_qkv_a_proj_with_mqa\.",)
"""Parameters that SGLang fills only from a call that has all their tensors: one that comes without the others is
dropped when the call ends, and no error says so (`deepseek_weight_loader.py`, cached_a_proj)."""


def one_message_groups(names: Iterable[str], engine_name: Callable[[str], str]) -> dict[str, frozenset[str]]:
    """HF name -> all names that must be in one message with it; tensors that may come alone are not in it."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        target = engine_name(name)
        if any(re.search(pattern, target) for pattern in ONE_MESSAGE):
            groups[target].append(name)
    return {name: frozenset(group) for group in groups.values() for name in group}
