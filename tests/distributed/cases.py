"""The layouts and micro-batch splits that must give what one rank gives."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    world: int
    parallel: dict[str, int] = field(default_factory=dict)
    """Fields of ParallelConfig; what is left of `world` is data parallel."""
    micro_batches: int = 1
    """Least number of micro-batches a rank and mini-batch."""
    transformer: dict[str, Any] = field(default_factory=dict)
    """`megatron.transformer`, for pipelines that are not cut evenly."""
    family: str = "qwen3_moe"
    """Of the tiny model, as `make_tiny_model` names it."""

    @property
    def name(self) -> str:
        short = {
            "tensor": "tp", "pipeline": "pp", "virtual_pipeline": "vpp", "context": "cp", "expert": "ep",
            "expert_tensor": "etp",
        }  # fmt: skip
        axes = [f"{short[axis]}{size}" for axis, size in self.parallel.items()]
        if self.data > 1:
            axes.append(f"dp{self.data}")
        uneven = [f"{key}={value}" for key, value in self.transformer.items()]
        split = [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        family = [self.family] if self.family != "qwen3_moe" else []
        return ", ".join([*family, " x ".join(axes) or "one rank", *uneven, *split])

    @property
    def data(self) -> int:
        dense = 1
        for axis in ("tensor", "pipeline", "context"):
            dense *= self.parallel.get(axis, 1)
        return self.world // dense


def case(
    world: int, micro_batches: int = 1, transformer: dict[str, Any] | None = None, family: str = "qwen3_moe",
    **parallel: int,
) -> Case:  # fmt: skip
    return Case(world, parallel, micro_batches, transformer or {}, family)


TP, PP, CP, EP, ETP = ({axis: 2} for axis in ("tensor", "pipeline", "context", "expert", "expert_tensor"))
VPP = PP | {"virtual_pipeline": 2}

SPLITS = [case(1, micro_batches=number) for number in (2, 5, 8)]
"""Of the 8 sequences in a mini-batch; the reference is one micro-batch of all 8."""

SINGLE_AXES = [
    case(2, **TP), case(2, **PP), case(2, **VPP), case(2, **CP), case(2, **EP), case(2, **ETP), case(2),
]  # fmt: skip

PAIRS = [
    *(case(4, **TP, **other) for other in (PP, VPP, CP)),
    # expert axes lie across the ranks of the dense ones
    *(case(2, **TP, **other) for other in (EP, ETP)),
    *(case(4, **PP, **other) for other in (CP, EP, ETP)),
    *(case(4, **VPP, **other) for other in (CP, EP, ETP)),
    *(case(2, **CP, **other) for other in (EP, ETP)),
    *(case(4, **axes) for axes in (TP, PP, VPP, CP, EP, ETP)),  # with data parallelism
    case(4, **EP, **ETP),
]

LARGER = [
    case(3, pipeline=3, transformer={"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}),
    case(2, pipeline=2, transformer={"num_layers_in_first_pipeline_stage": 1}),
    case(
        3, pipeline=3,
        transformer={"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    ),
    case(2, pipeline=2, transformer={"pipeline_model_parallel_layout": "Et|tttL"}),
    case(2, pipeline=2, virtual_pipeline=2, transformer={"pipeline_model_parallel_layout": "Et|tt|t|L"}),
    case(4, tensor=4),
    case(4, pipeline=4),
    case(4, context=4),
    case(4, expert=4),
    case(4, expert_tensor=4),
    case(4),
    case(4, tensor=2, expert=4),
    case(4, context=2, expert=4),
    # more micro-batches than sequences: some hold padding only
    case(4, **EP, micro_batches=5),
    case(4, **CP, micro_batches=5),
    case(2, **PP, micro_batches=5),
    case(2, **VPP, micro_batches=5),
    case(8, **TP, **PP, **CP),
    case(8, **TP, **CP, **EP),
    case(8, **TP, **CP, **EP, micro_batches=5),
    case(8, **TP, **VPP, **CP),
    case(8, **TP, **EP, **ETP),
    case(8, **PP, **EP, **ETP),
    case(8),
]  # fmt: skip

CASES = SPLITS + SINGLE_AXES + PAIRS + LARGER

OTHER_FAMILIES = (
    "qwen3", "qwen2", "llama", "qwen2_moe", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
"""Each runs on every axis and on all dense axes at once; qwen3_moe on everything above."""
DENSE_FAMILIES = ("qwen3", "qwen2", "llama")


def family_cases(family: str) -> list[Case]:
    axes = [] if family in DENSE_FAMILIES else [EP] if family == "gpt_oss" else [EP, ETP]
    expert_axes = [case(2, family=family, **axis) for axis in axes]  # biases of experts can't be cut (Megatron)
    return [
        *(case(2, family=family, **axis) for axis in (TP, PP, VPP, CP)), *expert_axes,
        case(1, micro_batches=5, family=family), case(8, family=family, **TP, **PP, **CP),
    ]  # fmt: skip


FAMILY_CASES = [one for family in OTHER_FAMILIES for one in family_cases(family)]
