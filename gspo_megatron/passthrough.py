"""`megatron.{transformer,optimizer,ddp}` against Megatron-Core's own dataclasses, without importing Megatron or torch:
their fields are read from the installed source, so that `check` answers at once and on a machine without a GPU."""

import ast
import difflib
import functools
import importlib.util
import numbers
from pathlib import Path
from typing import Any

from gspo_megatron.config import MegatronConfig

CLASSES = {
    "transformer": ("transformer/transformer_config.py", "TransformerConfig"),
    "optimizer": ("optimizer/optimizer_config.py", "OptimizerConfig"),
    "ddp": ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
}
"""Section -> file below megatron/core and class."""

_HF = "the model's config.json decides it"
_STALE = "parameters would be whole only in the next forward pass, and weights are sent to the servers before it"
_TRAINER = "the trainer sets it, its value is part of how the loss is scaled or the batch is laid out"

REFUSED: dict[str, dict[str, str]] = {
    "transformer": {
        **dict.fromkeys(
            "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels layernorm_epsilon "
            "add_bias_linear add_qkv_bias gated_linear_unit activation_func num_moe_experts moe_ffn_hidden_size "
            "moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor "
            "moe_router_enable_expert_bias moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq "
            "normalization qk_layernorm rotary_interleaved multi_latent_attention softmax_type softmax_scale "
            "moe_router_num_groups moe_router_group_topk window_size mtp_num_layers layernorm_zero_centered_gamma "
            "apply_residual_connection_post_layernorm attention_output_gate qk_l2_norm".split(),
            _HF,
        ),
        "tensor_model_parallel_size": "set parallel.tensor",
        "pipeline_model_parallel_size": "set parallel.pipeline",
        "virtual_pipeline_model_parallel_size": "set parallel.virtual_pipeline",
        "context_parallel_size": "set parallel.context",
        "expert_model_parallel_size": "set parallel.expert",
        "expert_tensor_parallel_size": "set parallel.expert_tensor",
        "sequence_parallel": "set parallel.sequence_parallel",
        "moe_enable_routing_replay": "set train.routing_replay",
        **dict.fromkeys(
            "bf16 fp16 params_dtype pipeline_dtype enable_autocast autocast_dtype".split(), "set train.dtype"
        ),
        **dict.fromkeys(
            "variable_seq_lengths calculate_per_token_loss batch_p2p_comm finalize_model_grads_func grad_scale_func "
            "no_sync_func grad_sync_func param_sync_func timers moe_router_force_load_balancing moe_token_dropping "
            "moe_expert_capacity_factor moe_pad_expert_input_to_capacity".split(),
            _TRAINER,
        ),
        **dict.fromkeys(
            "hidden_dropout attention_dropout moe_input_jitter_eps".split(),
            "must be 0: with noise in the forward pass pi_theta and pi_old differ at equal weights",
        ),
    },
    "optimizer": {
        "lr": "set optimizer.lr",
        "min_lr": "set optimizer.min_lr",
        "weight_decay": "set optimizer.weight_decay",
        "clip_grad": "set optimizer.clip_grad",
        "adam_beta1": "set optimizer.beta1",
        "adam_beta2": "set optimizer.beta2",
        "adam_eps": "set optimizer.eps",
        "optimizer": "Adam is the only optimizer",
        **dict.fromkeys("bf16 fp16 params_dtype".split(), "set train.dtype"),
        **dict.fromkeys("use_distributed_optimizer timers".split(), _TRAINER),
        **dict.fromkeys("overlap_param_gather overlap_param_gather_with_optimizer_step".split(), _STALE),
        **dict.fromkeys(
            "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis".split(),
            "a loss scale belongs to fp16, which train.dtype does not offer",
        ),
    },
    "ddp": {
        "use_distributed_optimizer": _TRAINER,
        "grad_reduce_in_fp32": "gradients are summed in fp32 in any case",
        "average_in_collective": _TRAINER,
        "overlap_param_gather": _STALE,
        **dict.fromkeys(
            "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy".split(),
            "sharded data parallelism is not built here",
        ),
    },
}
"""Section -> field -> what decides it, or which key of ours to set."""

AUXILIARY = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
_PLAIN = {
    "bool",
    "int",
    "float",
    "str",
    "Optional",
    "Union",
    "List",
    "list",
    "Tuple",
    "tuple",
    "Dict",
    "dict",
    "Literal",
}


def passthrough_faults(megatron: MegatronConfig, core: Path | None = None) -> list[str]:
    """Faults of the three mappings, one line each. `core`: directory of megatron.core, default the installed one."""
    faults = []
    for section, (file, cls) in CLASSES.items():
        values = getattr(megatron, section)
        if not values:
            continue
        directory = core or _installed_core()
        if directory is None:
            faults.append(
                f"megatron.{section}: cannot be checked, megatron-core is not installed; install it, or drop it"
            )
            continue
        fields = class_fields(directory / file, cls)
        for key, value in values.items():
            fault = _fault(section, key, value, cls, fields)
            if fault:
                faults.append(f"megatron.{section}.{key}: {fault}")
    return faults


def _fault(section: str, key: str, value: Any, cls: str, fields: dict[str, ast.expr]) -> str | None:
    if key in REFUSED[section]:
        return f"{value!r} is refused: {REFUSED[section][key]}"
    if key in AUXILIARY and section == "transformer":
        numbers_given = value if isinstance(value, list) else [value]
        if any(number != 0 for number in numbers_given):
            return (
                f"{value!r} is refused, only 0 works: with gradients divided by the number of sequences Megatron "
                "scales the router's auxiliary loss by local tokens, so that its weight would depend on the layout"
            )
    if key not in fields:
        near = difflib.get_close_matches(key, fields, n=1)
        return f"{value!r} is for no field of Megatron's {cls}" + (f", did you mean {near[0]}?" if near else "")
    if key == "pipeline_model_parallel_layout" and isinstance(value, str):
        return None  # its type has a class too; topology.py judges the text
    return _type_fault(value, fields[key], cls)


def _type_fault(value: Any, annotation: ast.expr, cls: str) -> str | None:
    text = ast.unparse(annotation)
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    if names - _PLAIN or any(isinstance(node, ast.Attribute) for node in ast.walk(annotation)):
        return f"{value!r} is refused: {cls} wants a Python object here ({text}), which a file cannot give"
    if not _fits(value, annotation):
        return f"{value!r} does not fit Megatron's {cls}, whose field is {text}"
    return None


def _fits(value: Any, annotation: ast.expr) -> bool:
    """Whether a YAML value fits a type annotation made of plain types."""
    if isinstance(annotation, ast.Constant):
        return value is None
    if isinstance(annotation, ast.BinOp):
        return _fits(value, annotation.left) or _fits(value, annotation.right)
    if isinstance(annotation, ast.Subscript):
        name = annotation.value.id if isinstance(annotation.value, ast.Name) else ""
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if name == "Literal":
            return value in [item.value for item in inner if isinstance(item, ast.Constant)]
        if name in ("Optional", "Union"):
            return (name == "Optional" and value is None) or any(_fits(value, item) for item in inner)
        if name in ("List", "list", "Tuple", "tuple"):
            return isinstance(value, list) and all(any(_fits(entry, item) for item in inner) for entry in value)
        return isinstance(value, dict)
    name = annotation.id if isinstance(annotation, ast.Name) else ""
    if name == "float":
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    return type(value).__name__ == name.lower()


@functools.cache
def class_fields(file: Path, cls: str) -> dict[str, ast.expr]:
    """Field -> annotation of a dataclass in a source file, inherited fields included, private ones left out.

    Raises ValueError where the file or class is missing: then this Megatron-Core is none of the supported versions.
    """
    if not file.is_file():
        raise ValueError(f"megatron-core: {file} not found; supported are versions >=0.16.1,<0.20")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    definition = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls), None)
    if definition is None:
        raise ValueError(f"megatron-core: no class {cls} in {file}; supported are versions >=0.16.1,<0.20")
    fields: dict[str, ast.expr] = {}
    for base in definition.bases:
        if isinstance(base, ast.Name) and base.id != "object":
            fields |= class_fields(_file_of(tree, file, base.id), base.id)
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            fields[node.target.id] = node.annotation
    return fields


def _file_of(tree: ast.Module, file: Path, name: str) -> Path:
    """The file that defines class `name` for module `tree`: itself, or the one that it is imported from."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            if node.level:
                root = file.parents[node.level - 1]
                parts = (node.module or "").split(".")
            else:
                parts = node.module.split(".")[2:]  # megatron.core.x.y -> x.y
                root = next(parent for parent in file.parents if parent.name == "core")
            return root.joinpath(*parts).with_suffix(".py")
    return file


def _installed_core() -> Path | None:
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    return Path(spec.origin).parent if spec and spec.origin else None
