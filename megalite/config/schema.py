"""The schema of a run's settings: one frozen pydantic model per section, with its local checks.

Does not read files (config.load), does not compare sections with each other or with the world
size (checks.settings), does not spread layers over stages (run.stages). Knows no torch.
"""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from megalite.config.families import family_defaults
from megalite.config.shares import parse_split

MAX_SEED = 2**63 - 1

Activation = Literal["swiglu", "gelu_tanh"]


class Section(BaseModel):
    """Base of every config section: frozen, unknown keys refused, no silent type changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The transformer. Sizes are whole-model sizes, never per rank.

    Defaults written here are llama's; `families.py` has those of the other families.
    """

    family: Literal["llama", "gpt2", "qwen2", "qwen3", "mistral"] = "llama"
    num_layers: int = Field(ge=1, le=100_000)
    hidden_size: int = Field(ge=1, le=2**24)
    num_heads: int = Field(ge=1, le=2**20)
    num_kv_heads: int | None = Field(default=None, ge=1)  # None: num_heads (no grouped queries)
    head_dim: int | None = Field(default=None, ge=1)  # None: hidden_size / num_heads
    ffn_hidden_size: int = Field(ge=1, le=2**24)
    vocab_size: int = Field(ge=1, le=2**31 - 1)  # the true vocabulary, unpadded
    vocab_pad_multiple: int = Field(default=128, ge=1)  # never depends on tp
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # layernorm has a bias
    norm_eps: float = Field(default=1e-5, gt=0)
    positions: Literal["rope", "learned"] = "rope"
    max_positions: int = Field(default=1024, ge=1, le=2**31 - 1)  # rows of learned positions
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_fraction: float = Field(default=1.0, gt=0, le=1)  # share of each head that is turned
    rope_scaling: Literal["llama3"] | None = None  # None: frequencies as they are
    rope_factor: float = Field(default=8.0, ge=1)  # low frequencies are divided by it
    rope_low_freq_factor: float = Field(default=1.0, gt=0)
    rope_high_freq_factor: float = Field(default=4.0, gt=0)
    rope_original_max_position: int = Field(default=8192, ge=1)  # length trained before scaling
    activation: Activation = "swiglu"  # swiglu has a third matrix, the gate
    qkv_bias: bool = False
    linear_bias: bool = False  # of the output projection and the feed-forward block
    qk_norm: bool = False  # RMSNorm over each query and key head
    sliding_window: int | None = Field(default=None, ge=1)  # tokens seen, itself included
    tie_embeddings: bool = False
    embedding_dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)  # of attention weights
    residual_dropout: float = Field(default=0.0, ge=0, lt=1)  # ahead of each residual sum
    init_std: float = Field(default=0.02, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _family_gives_defaults(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return family_defaults(str(values.get("family", "llama"))) | values

    @property
    def kv_heads(self) -> int:
        """Key and value heads: num_kv_heads, or one for each query head."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Elements per attention head: head_dim, or an equal share of the hidden size."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_size(self) -> int:
        """Elements of each head that positions turn: 0 with learned positions."""
        return round(self.head_size * self.rope_fraction) if self.positions == "rope" else 0

    @property
    def gated(self) -> bool:
        """True if the feed-forward block has a gate: a third matrix."""
        return self.activation == "swiglu"

    @property
    def has_dropout(self) -> bool:
        """True if training draws any dropout masks."""
        return max(self.embedding_dropout, self.attention_dropout, self.residual_dropout) > 0

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding as stored: vocab_size rounded up to vocab_pad_multiple."""
        multiple = self.vocab_pad_multiple
        return -(-self.vocab_size // multiple) * multiple


class ParallelConfig(Section):
    """The layout: how many ranks each axis has, and how layers are spread over stages."""

    tp: int = Field(default=1, ge=1, le=2**20)
    pp: int = Field(default=1, ge=1, le=2**12)
    vpp: int = Field(default=1, ge=1, le=2**12)  # model chunks per pipeline rank
    dp: int | None = Field(default=None, ge=1, le=2**20)  # None: what the world size leaves
    sequence_parallel: bool = False
    # layers of each of the pp * vpp stages, in model order; None: as even as possible
    stage_layers: list[Annotated[int, Field(ge=0)]] | None = None
    # "cost": the head counts as many layers as its FLOPs are worth; "layers": as given below
    balance: Literal["layers", "cost"] = "layers"
    embedding_layers: float = Field(default=0.0, ge=0)  # embedding's cost in layer-equivalents
    head_layers: float = Field(default=0.0, ge=0)  # head and loss, in layer-equivalents
    overlap_tp: bool = True  # input-gradient collective in flight during the weight gradient


class PipelineConfig(Section):
    """Order of work in the pipeline."""

    # a name of `megalite schedule`, "family:...", "file:PATH" or "auto"; None: by pp, vpp and tp
    schedule: str | None = Field(default=None, min_length=1)
    trace_step: int | None = Field(default=None, ge=1)  # step whose time line is recorded
    # for "auto": most activations a rank may hold, in its own of one microbatch; None: pp of them
    max_activations: float | None = Field(default=None, gt=0)


class GroupConfig(Section):
    """Optimizer settings for the parameters whose name matches a pattern.

    `match` is a shell pattern over global parameter names ("*.bias", "embedding.weight"). Every
    group that matches applies, in order: a later one overrides what it sets.
    """

    match: str = Field(min_length=1)
    lr_scale: float | None = Field(default=None, ge=0)  # times the schedule's rate; 0: frozen
    weight_decay: float | None = Field(default=None, ge=0)
    algorithm: Literal["adamw"] | None = None  # for a matrix that Muon would take

    @model_validator(mode="after")
    def _sets_something(self) -> GroupConfig:
        if self.lr_scale is None and self.weight_decay is None and self.algorithm is None:
            raise ValueError("sets nothing; give lr_scale, weight_decay or algorithm")
        return self


class OptimizerConfig(Section):
    """The algorithm, its learning-rate schedule, clipping, and where its state lives."""

    # muon: hidden matrices by Muon, everything else by AdamW with the same rate
    name: Literal["adamw", "muon"] = "adamw"
    # apex: AdamW by NVIDIA's FusedAdam, where it is installed; fused: by the backend's own kernel
    adam: Literal["fused", "apex"] = "fused"
    lr: float = Field(default=3e-4, ge=0)
    min_lr: float = Field(default=0.0, ge=0)
    lr_schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    # instead of warmup_steps; warm-up and decay in tokens take at least a step's
    warmup_tokens: int | None = Field(default=None, ge=1)
    decay_steps: int | None = Field(default=None, ge=1)  # end of the decay; None: the run's
    decay_tokens: int | None = Field(default=None, ge=1)  # instead of decay_steps
    # wsd: warm-up, stable, and at the end a decay of this length and shape
    wsd_decay_steps: int | None = Field(default=None, ge=1)
    wsd_decay_tokens: int | None = Field(default=None, ge=1)
    wsd_decay_shape: Literal["linear", "cosine", "1-sqrt"] = "1-sqrt"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)  # not applied to 1-D parameters
    groups: list[GroupConfig] = []  # exceptions by parameter name
    ema_decay: float | None = Field(default=None, gt=0, lt=1)  # None: no average of the weights
    moment_dtype: Literal["float32", "bfloat16"] = "float32"  # as stored; computed in fp32
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # as sent; summed in fp32
    # Dynamic loss scaling, of train.dtype=float16 only.
    loss_scale: float = Field(default=65536.0, ge=1, le=2.0**64)  # initial
    loss_scale_min: float = Field(default=1.0, gt=0, le=2.0**64)
    loss_scale_interval: int = Field(default=1000, ge=1)  # good steps before it grows
    loss_scale_hysteresis: int = Field(default=2, ge=1)  # bad steps before it backs off
    loss_scale_backoff: float = Field(default=0.5, gt=0, lt=1)  # growth is its inverse
    # Muon only.
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    muon_nesterov: bool = True
    muon_steps: int = Field(default=5, ge=1, le=30)  # Newton-Schulz iterations
    muon_scale: Literal["adamw_rms", "spectral"] = "adamw_rms"  # size of an update
    muon_dtype: Literal["float32", "bfloat16"] = "float32"  # of the iteration
    clip_grad: float | None = Field(default=1.0, gt=0)  # None: no clipping
    non_finite: Literal["stop", "skip"] = "stop"
    max_skips: int = Field(default=10, ge=1)  # consecutive skipped steps before the run stops
    zero: Literal[0, 1] = 1
    bucket_mb: float = Field(
        default=40.0, gt=0, le=1_000_000
    )  # gradient bucket, MiB of fp32 gradients
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True

    @field_validator("zero", mode="before")
    @classmethod
    def _zero_is_a_number(cls, value: object) -> object:
        # Literal compares with ==, so that true and 1.0 would pass as 1.
        if type(value) is not int:
            raise ValueError("needs 0 or 1")
        return value


def _from_home(value: str) -> str:
    path = expanduser(value)
    if path.startswith("~"):
        raise ValueError("names no user's home; write the whole path")
    return path


def _prefix(value: str) -> str:
    if value.endswith((".bin", ".idx")):
        raise ValueError(f"names the pair PREFIX.bin, PREFIX.idx; write {value[:-4]!r}")
    return value


PathText = Annotated[str, Field(min_length=1), AfterValidator(_from_home)]  # ~ is expanded
Prefix = Annotated[PathText, AfterValidator(_prefix)]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]


class SourceConfig(Section):
    """One source of a blend. Weights are relative: 7 and 3 are the same as 0.7 and 0.3."""

    path: Prefix  # PREFIX of PREFIX.bin and PREFIX.idx
    weight: float = Field(default=1.0, ge=0)  # share of samples, to 1/65,536; 0: validation only
    name: SetName | None = None  # in messages and validation sets; None: the last part of path


class DataConfig(Section):
    """The sources of tokens, and how they are cut into samples."""

    path: Prefix | None = None  # PREFIX of PREFIX.bin and PREFIX.idx
    sources: list[SourceConfig] = []  # a blend, instead of path
    tokenizer: PathText | None = None  # sentencepiece, generated samples
    seq_length: int = Field(ge=1, le=2**31 - 1)
    # train, validation and perhaps test: shares of each source's token stream; also "969,30,1"
    split: tuple[float, ...] = (0.98, 0.02)
    document_masks: bool = False  # documents do not attend to each other
    workers: int = Field(default=1, ge=0, le=64)  # threads that read ahead; 0: none
    prefetch: int = Field(default=2, ge=1, le=1024)  # steps that they may be ahead

    @field_validator("split", mode="before")
    @classmethod
    def _split_into_shares(cls, value: object) -> tuple[float, ...]:
        return parse_split(value)


class TrainConfig(Section):
    """Length of the run, batch of a step, number formats, recomputation and loss."""

    steps: int = Field(ge=0)  # or `tokens`, from which it then follows
    tokens: int | None = Field(default=None, ge=1)  # the run's length in tokens instead of steps
    global_batch: int = Field(ge=1, le=10_000_000)  # sequences per step
    # a batch that grows from `start` by `increment` to global_batch, over so much of the data
    batch_ramp_start: int | None = Field(default=None, ge=1)
    batch_ramp_increment: int | None = Field(default=None, ge=1)
    batch_ramp_samples: int | None = Field(default=None, ge=1)
    batch_ramp_tokens: int | None = Field(default=None, ge=1)
    micro_batch: int = Field(default=1, ge=1)  # sequences per microbatch
    seed: int = Field(default=1234, ge=0, le=MAX_SEED)
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    tf32: bool = False  # float32 matrix products in TF32 (GPUs)
    recompute: Literal["none", "selective", "full", "stage"] = "none"
    loss_chunk_tokens: int = Field(default=0, ge=0)  # 0: loss over whole microbatches
    z_loss: float = Field(default=0.0, ge=0, le=1)  # adds z_loss * log-sum-exp^2 for each token
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)  # share spread over the vocabulary
    # a loss far above the median of the last `window` ones: see train/policies.py
    loss_spike: Literal["off", "stop", "skip"] = "off"
    loss_spike_threshold: float = Field(default=10.0, gt=0)  # in deviations of the window
    loss_spike_window: int = Field(default=64, ge=8, le=10_000)  # steps; no verdict until full
    deterministic: bool = False  # only algorithms that give the same bits on every run
    timeout_s: float = Field(default=600.0, ge=1, le=1_000_000)  # of a collective

    @model_validator(mode="before")
    @classmethod
    def _steps_follow_from_tokens(cls, values: object) -> object:
        # 0 until checks.settings.resolve, which knows the tokens of a step, fills them in.
        if isinstance(values, dict) and values.get("tokens") is not None:
            return {"steps": 0, **values}
        return values


class EvalSetConfig(Section):
    """A dataset that is only evaluated, whole."""

    name: SetName
    path: Prefix


class EvalConfig(Section):
    """Validation during training, and at its end."""

    interval: int = Field(default=0, ge=0)  # steps; 0: never; past the end: reported at the start
    # global batches of each set, the same ones every time; None: all of the set
    batches: int | None = Field(default=None, ge=1)
    weights: Literal["model", "ema"] = "model"  # ema: the average that optimizer.ema_decay keeps
    sets: list[EvalSetConfig] = []  # beside what data.split leaves for validation


class CheckpointConfig(Section):
    """Saves of a run, the checkpoints that stay, and the state that a run starts from.

    It saves by the first of both intervals that is due, at the end and on a signal.
    """

    # steps; 0: not by steps, and if 0 is written, by time only where interval_s is, too; past the
    # end: reported at the start
    interval: int = Field(default=0, ge=0)
    interval_s: float = Field(default=1800.0, ge=0)  # seconds since the last save; 0: not by time
    keep: int = Field(default=3, ge=1)  # newest checkpoints that stay
    # of each so many steps the first stays, too; 1: all stay; 0: off
    keep_every: int = Field(default=0, ge=0)
    # a validation set: a save before each evaluation, of which the lowest loss of it stays, too
    keep_best: str | None = Field(default=None, min_length=1)
    resume: Literal["auto", "never", "must"] = "auto"
    # run or checkpoint folder whose weights a new run starts from, with a fresh optimizer
    load_weights: PathText | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_interval_is_none_by_time(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("interval") == 0:
            return {"interval_s": 0.0, **values}
        return values


class WandbConfig(Section):
    """Weights & Biases, on where `project` is set. A key is no setting: wandb finds its own."""

    project: str | None = Field(default=None, min_length=1)
    mode: Literal["auto", "online", "offline"] = "auto"  # auto: online where it has a key
    entity: str | None = Field(default=None, min_length=1)
    group: str | None = Field(default=None, min_length=1)
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = []
    timeout_s: float = Field(default=15.0, ge=1, le=600)  # of its start; training does not wait


class LogConfig(Section):
    """Console and metrics."""

    # steps between console lines; the last step has one; past the end: reported at the start
    interval: int = Field(default=1, ge=1)
    format: Literal["megalite", "megatron"] = "megalite"  # of console lines
    # steps; 0: never; past the end: reported at the start
    param_stats_interval: int = Field(default=0, ge=0)
    hardware: PathText | None = None  # file with the device's peak
    tensorboard: bool = False
    wandb: WandbConfig = WandbConfig()


class KernelsConfig(Section):
    """The kernels for norms, activations, attention, loss and update: see docs/kernels.md."""

    # auto: triton on CUDA devices of capability 8.0 and up, else plain torch (reference);
    # interpret: triton on the CPU, for tests, with TRITON_INTERPRET=1 in the environment
    backend: Literal["auto", "triton", "reference", "interpret"] = "auto"
    # auto: the backend's own; sdpa: torch's flash or cuDNN attention; fa3, fa4: FlashAttention 3 or
    # 4, where it is installed
    attention: Literal["auto", "sdpa_flash", "sdpa_cudnn", "fa3", "fa4"] = "auto"
    norm: Literal["auto", "apex"] = "auto"  # of RMSNorm; apex: NVIDIA's, where it is installed


class RunConfig(Section):
    """Everything one run needs; written resolved into its run folder."""

    # a folder name below `out`, so no separators and no leading dot
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    out: PathText = "runs"  # folder that holds the run folders
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig
    train: TrainConfig
    kernels: KernelsConfig = KernelsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.out) / self.name
