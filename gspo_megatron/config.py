"""Every setting of a run, as frozen dataclasses: this file is the reference of the configuration.

A YAML file has one section a field of `Config` (`model:`, `parallel:`, ...). The docstring under a field gives its
meaning and its unit. `config_loader.py` fills these classes and `checks.py` judges combinations. No torch here, so that
`python -m gspo_megatron check` answers at once on a login node.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from gspo_megatron.algorithm_config import (
    LOSS_CONFIGS,
    AdvantageConfig,
    CorrectionConfig,
    GRPOConfig,
    GSPOConfig,
    GSPOTokenConfig,
    LengthRewardConfig,
    LossConfig,
    RegularizerConfig,
    RepetitionConfig,
    SamplingConfig,
    SoftOverlongConfig,
    VerbosityConfig,
)

__all__ = [
    "LOSS_CONFIGS", "AdvantageConfig", "Config", "ConfigError", "CorrectionConfig", "GRPOConfig", "GSPOConfig",
    "GSPOTokenConfig", "LossConfig", "RegularizerConfig", "SamplingConfig",
]  # fmt: skip

LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
"""Hosts in URLs of servers that run on this machine."""


@dataclass(frozen=True)
class RunConfig:
    dir: str = ""
    """Where the run writes everything: config.yaml, metrics.jsonl, rollouts/, hf/. Required."""
    seed: int = 1
    """Seeds the order of prompts, the servers' sampling, and Megatron's generators."""
    overwrite: bool = False
    """Replace what an earlier run left in `run.dir`. Without it a run goes on from the last checkpoint there; one that
    was ended before its first starts again, and what it left is set aside (metrics.jsonl.1); other results are
    refused."""
    allow_changed: tuple[str, ...] = ()
    """Keys (`optimizer.lr`) or sections (`optimizer`) that may differ from those of the checkpoint that a run goes on
    from. Layout, steps, checkpoints, metrics writers, servers and timeouts may always."""


@dataclass(frozen=True)
class ModelConfig:
    hf: str = ""
    """Directory of the Hugging Face checkpoint to start from (config.json, tokenizer, *.safetensors). Required."""
    megatron: str = ""
    """Directory of a `torch_dist` checkpoint of that model (`tools/convert_hf_to_megatron.py`, a run's
    checkpoints/step_N, or Megatron-LM's own) to take the weights from instead. `hf` then gives config.json and
    tokenizer; its weights are not read by the trainer, only by servers that it launches."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the tokenizer, which some models need (Kimi-K2). Servers take
    `rollout.launch.args: {trust-remote-code: true}`."""


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel axes, in ranks. Data parallelism is world size / (tensor * pipeline * context)."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Model chunks a pipeline rank holds (interleaved schedule)."""
    context: int = 1
    expert: int = 1
    """Ranks over which the experts of one layer are spread; lies across the data-parallel ranks."""
    expert_tensor: int = 1
    """Tensor-parallel size inside an expert."""
    sequence_parallel: bool = True
    """Split activations between the tensor-parallel regions; has an effect only where `tensor` > 1."""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 100
    """Rollout steps; each makes `updates_per_rollout` optimizer updates."""
    updates_per_rollout: int = 4
    """Mini-batches into which every rollout batch is split (4 in the paper)."""
    tokens_per_micro_batch: int = 16384
    """Token budget of one packed micro-batch on one data-parallel rank, prompts included."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Type of parameters and activations; log-probs, ratios, advantages and gradient sums are fp32 in any case."""
    timeout_s: float = 1800.0
    """Bound on every collective between trainer ranks, in seconds; must cover the longest rollout."""
    routing_replay: bool = False
    """Make updates choose the experts that the pass for log pi_old chose, as GRPO on mixture-of-experts models needs
    it. There for comparison: GSPO does without. Wants loss.old_log_probs=recompute."""


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-6
    min_lr: float = 0.0
    """Where the cosine and linear schedules end."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    """Optimizer updates (not rollout steps) of linear warm-up from 0."""
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Bound on the global gradient norm; 0 switches it off."""


@dataclass(frozen=True)
class LaunchConfig:
    """SGLang servers that rank 0 starts on its own node and stops at the end."""

    count: int = 1
    device: Literal["cpu", "cuda"] = "cuda"
    tensor_parallel: int = 1
    """Devices one server takes."""
    first_device: int = 0
    """Index of the first GPU that the servers may use; server i takes the `tensor_parallel` ones from
    first_device + i * tensor_parallel on."""
    port: int = 0
    """Port of the first server, the others follow; 0 takes free ones."""
    ready_timeout_s: float = 300.0
    """How long a server may take until it answers, in seconds."""
    restarts: int = 3
    """How often a server that ended by itself is started again, each; it gets requests when it has the current
    weights. The run stops at the end after these."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `sglang.launch_server`, `{mem-fraction-static: 0.8}`; `true` gives a bare flag."""


@dataclass(frozen=True)
class RolloutConfig:
    servers: tuple[str, ...] = ()
    """URLs of running SGLang servers, `http://host:port`. Either this, or `launch`, or `replay`."""
    launch: LaunchConfig | None = None
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    """Group size G of the group advantage; at least 2."""
    max_response_tokens: int = 1024
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: float = 1.0
    """Nucleus sampling of the servers. Below 1 their log-probs are not those of the distribution they sample from, and
    the trainer does not model it: refused."""
    top_k: int = 0
    """Top-k sampling of the servers, 0 is off; refused as top_p."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response; empty takes eos_token_id of generation_config.json, else of config.json."""
    concurrency: int = 256
    """Requests under way at once on one server."""
    request_timeout_s: float = 600.0
    """Bound on one generation request, in seconds."""
    retries: int = 4
    """Further tries of a failed request, with back-off, on another server where there is one."""
    save: bool = False
    """Write every step's samples to run.dir/rollouts/step_N.jsonl."""
    replay: str = ""
    """Directory of such files to train from instead of asking servers."""
    max_logprob_gap: float = 0.5
    """Stop when rollout/logprob_gap_mean (nats per token) exceeds this: the engine does not run this policy."""


@dataclass(frozen=True)
class WeightsConfig:
    transport: Literal["distributed", "tensor", "disk", "delta"] = "distributed"
    """How weights reach the servers. `distributed`: a collective group of the sending rank and all engine ranks;
    `tensor`: memory that servers on the same machine map (shared memory, or CUDA IPC); `disk`: a checkpoint that all
    trainer ranks write and all servers read; `delta`: as `disk`, and only what changed goes to the servers' machines.
    """
    dir: str = ""
    """Where `disk` and `delta` write, on a file system that the trainer's ranks share under this path, and for `disk`
    the servers too; room for two checkpoints. Empty takes run.dir/weights."""
    engine_dir: str = ""
    """Where `delta` keeps the checkpoint that servers load, under this path on their machines. Empty takes `engine` in
    `weights.dir`."""
    appliers: int = 0
    """Machines on which `tools/apply_weight_delta.py` keeps that checkpoint; 0 has the trainer do it, where servers see
    its disk."""
    bucket_mib: float = 512.0
    """Size of one flattened bucket, in MiB."""
    host: str = ""
    """Address at which the servers reach the sending rank; empty takes 127.0.0.1 when all servers are local,
    else this machine's host name."""
    timeout_s: float = 600.0
    """Bound on every step of a sync, in seconds."""
    pause: Literal["abort", "retract", "in_place"] = "abort"
    """What becomes of requests that are still under way when a sync begins: `abort` ends them, `retract` computes them
    again under the new weights, `in_place` would go on with the old cache and is an error then. A step's own responses
    have all come by that time."""
    checked_share: float = 0.02
    """Share of the engines' parameters, by bytes, whose checksums a sync compares with those of what was sent; the
    share goes round, so that all have their turn. The first sync and those after a restart compare all. 0 compares
    none, for engines that hold their weights in another form."""
    prove_coverage: bool = True
    """At the first sync overwrite the engine's weights with noise and sync again, so that a parameter that no
    bucket reaches is found before the first rollout. Costs one more sync, once."""


@dataclass(frozen=True)
class DataConfig:
    train: str = ""
    """`*.jsonl` (one object a line with `prompt`, and what the reward reads, say `answer`), or
    `reasoning_gym:TASK` with the task's settings in `options`. Required unless replaying."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a reasoning-gym task; `size` problems are made."""
    shuffle: bool = True
    chat_template: bool = False
    """Wrap prompts by the tokenizer's chat template (always done where `prompt` is a list of messages)."""
    max_prompt_tokens: int = 2048
    """A longer prompt is refused when the data are read."""


@dataclass(frozen=True)
class RewardConfig:
    name: str = ""
    """A registered reward (`reasoning_gym`, `exact_match`, `math_verify`) or `package.module:function`.
    Required unless replaying."""
    timeout_s: float = 10.0
    """Bound on scoring one response, in seconds; the scoring process is killed past it and the reward is 0."""
    workers: int = 1
    """Scoring processes on rank 0."""
    soft_overlong: SoftOverlongConfig | None = None
    """Terms that are added to the reward and logged one by one as `reward/<term>`; each is off without its section."""
    length: LengthRewardConfig | None = None
    repetition: RepetitionConfig | None = None
    verbosity: VerbosityConfig | None = None


@dataclass(frozen=True)
class MetricsConfig:
    writers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ()
    """Writers beside metrics.jsonl, which is always written."""
    project: str = "gspo_megatron"
    """Project or experiment name for wandb, trackio and mlflow."""


@dataclass(frozen=True)
class HealthConfig:
    """Whether a run is about to fail. Every alarm is a metric `health/alarm_<name>`, 0 or 1, with `health/alarms` their
    number in the step; those that go on or off are printed. An alarm stops nothing."""

    routing: bool = True
    """Watch the experts that routers choose: `moe/expert_change_*`, `moe/load_imbalance*` and `moe/idle_experts`. The
    changes need loss.old_log_probs=recompute, whose pass they are measured from."""
    max_expert_change: float = 0.3
    """Alarm `expert_change`: moe/expert_change_last above this (share of the choices of the last mini-batch's pass).
    0 switches it off, as all below."""
    max_load_imbalance: float = 10.0
    """Alarm `load_imbalance`: moe/load_imbalance above this (tokens of the busiest expert over the mean)."""
    min_ess: float = 0.5
    """Alarm `ess`: gspo/ess below this (effective share of the tokens under their importance weights)."""
    max_clip_fraction: float = 0.95
    """Alarm `clip_fraction`: gspo/clip_fraction_sequences above this, so that next to no sequence has a gradient."""
    max_log_ratio_std: float = 0.3
    """Alarm `log_ratio`: gspo/log_ratio_std above this, in nats per token (sequences, log s). Long responses stay near
    1e-3, those of two tokens reach 0.1."""
    max_token_log_ratio_std: float = 1.0
    """Alarm `token_log_ratio`: gspo/token_log_ratio_std above this, in nats (tokens, log r)."""
    max_grad_norm: float = 100.0
    """Alarm `grad_norm`: grad_norm, the mean over a step's updates before clipping, above this."""
    max_logprob_gap: float = 0.1
    """Alarm `logprob_gap`: rollout/logprob_gap_mean above this, in nats per token; rollout.max_logprob_gap stops."""
    max_zero_std: float = 0.9
    """Alarm `zero_std`: share of groups with equal rewards above this, so that next to no sample has an advantage."""
    max_truncated: float = 0.5
    """Alarm `truncated`: rollout/truncated_fraction above this."""


@dataclass(frozen=True)
class ExportConfig:
    """The policy in Hugging Face format, written by all ranks at once and read back before it gets its name."""

    hf_final: bool = True
    """Write the trained policy to run.dir/hf at the end."""
    hf_every: int = 0
    """Steps from one export to run.dir/hf_step_N to the next; 0 writes none. The last step's is that of `hf_final`."""
    keep: int = 0
    """Newest run.dir/hf_step_N that are kept; 0 keeps all."""
    shard_mib: float = 5120.0
    """Size of one safetensors file, in MiB; each rank writes files of its own, and a file ends with a tensor."""
    mtp: Literal["keep", "drop"] = "keep"
    """Multi-token-prediction layers of `model.hf` (DeepSeek-V3, GLM-4.5), which are not trained: written as they are,
    but for their copies of the embedding and the output layer, or left out."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run needs to go on after its end, in run.dir/checkpoints. The same command goes on from the last one."""

    save: bool = True
    """Write checkpoints at all. Without them SIGTERM and SIGUSR1 end a run at once."""
    every: int = 20
    """Steps from one checkpoint to the next; 0 writes one at the end and on SIGTERM or SIGUSR1 only."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    keep_every: int = 0
    """Checkpoints at multiples of this number of steps are kept for good; 0 keeps none of them."""
    keep_hours: float = 0.0
    """Checkpoints of the last so many hours are kept too, however many they are: to return to before a fault that was
    noticed late. 0 keeps none of them."""
    async_save: bool = False
    """Train on while the files are written: the step waits only until the tensors are copied to host memory. The next
    checkpoint, a signal and the end wait for the one under way."""
    fall_back: bool = False
    """Where the last checkpoint is damaged, go on from the newest whole one before it, instead of refusing."""


@dataclass(frozen=True)
class MegatronConfig:
    """Pass-through to Megatron-Core's own dataclasses; keys are checked against their fields, and a key that one of our
    sections or the model's config.json decides is refused."""

    transformer: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron.core.transformer.TransformerConfig."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron.core.optimizer.OptimizerConfig."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron.core.distributed.DistributedDataParallelConfig."""


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    loss: LossConfig = field(default_factory=GSPOConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    regularizer: RegularizerConfig = field(default_factory=RegularizerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


class ConfigError(ValueError):
    """Bad input from the user; `faults` holds one line each: key, value, what is allowed, what to do."""

    def __init__(self, faults: str | list[str]):
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))
