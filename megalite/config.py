"""What a run is made of: one frozen pydantic model per component, each with its local checks.

Does not read files (config_load), does not compare sections with each other or with the world
size (config_check), does not spread layers over stages (config_stages). Knows no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_SEED = 2**63 - 1


class Section(BaseModel):
    """Base of every config section: frozen, unknown keys refused, no silent type changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The transformer. Sizes are whole-model sizes, never per rank."""

    family: Literal["llama"] = "llama"
    num_layers: int = Field(ge=1, le=100_000)
    hidden_size: int = Field(ge=1, le=2**24)
    num_heads: int = Field(ge=1, le=2**20)
    num_kv_heads: int | None = Field(default=None, ge=1)  # None: num_heads (no grouped queries)
    head_dim: int | None = Field(default=None, ge=1)  # None: hidden_size / num_heads
    ffn_hidden_size: int = Field(ge=1, le=2**24)
    vocab_size: int = Field(ge=1, le=2**31 - 1)  # the true vocabulary, unpadded
    vocab_pad_multiple: int = Field(default=128, ge=1)  # never depends on tp
    rope_theta: float = Field(default=10000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    tie_embeddings: bool = False
    init_std: float = Field(default=0.02, gt=0)

    @property
    def kv_heads(self) -> int:
        """Key and value heads: num_kv_heads, or one for each query head."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Elements per attention head: head_dim, or an equal share of the hidden size."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

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
    embedding_layers: float = Field(default=0.0, ge=0)  # embedding's cost in layer-equivalents
    head_layers: float = Field(default=0.0, ge=0)  # head and loss, in layer-equivalents
    overlap_tp: bool = True  # input-gradient collective in flight during the weight gradient


class PipelineConfig(Section):
    """Order of work in the pipeline."""

    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None  # None: by pp and vpp


class OptimizerConfig(Section):
    """AdamW, its learning-rate schedule, clipping, and where its state lives."""

    lr: float = Field(default=3e-4, ge=0)
    min_lr: float = Field(default=0.0, ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int | None = Field(default=None, ge=1)  # None: train.steps
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)  # not applied to 1-D parameters
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


class DataConfig(Section):
    """Where tokens come from and how they are cut into samples."""

    path: str | None = Field(default=None, min_length=1)  # PREFIX of PREFIX.bin and PREFIX.idx
    tokenizer: str | None = Field(default=None, min_length=1)  # sentencepiece, generated samples
    seq_length: int = Field(ge=1, le=2**31 - 1)
    split: tuple[float, float] = (0.98, 0.02)  # train, validation: shares of the token stream
    document_masks: bool = False  # documents do not attend to each other

    @field_validator("path")
    @classmethod
    def _path_is_a_prefix(cls, value: str | None) -> str | None:
        if value is not None and value.endswith((".bin", ".idx")):
            raise ValueError(f"names the pair PREFIX.bin, PREFIX.idx; write {value[:-4]!r}")
        return value

    @field_validator("split")
    @classmethod
    def _split_adds_up(cls, value: tuple[float, float]) -> tuple[float, float]:
        train, validation = value
        if train <= 0 or validation < 0 or abs(train + validation - 1) > 1e-9:
            raise ValueError(
                f"needs a positive train share and shares that add up to 1, got {train:g} + "
                f"{validation:g} = {train + validation:g}; use for example [0.98, 0.02]"
            )
        return value


class TrainConfig(Section):
    """The step: how long, how much, in which numbers."""

    steps: int = Field(ge=0)
    global_batch: int = Field(ge=1, le=10_000_000)  # sequences per step
    micro_batch: int = Field(default=1, ge=1)  # sequences per microbatch
    seed: int = Field(default=1234, ge=0, le=MAX_SEED)
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    recompute: Literal["none", "selective", "full"] = "none"
    loss_chunk_tokens: int = Field(default=0, ge=0)  # 0: loss over whole microbatches
    timeout_s: float = Field(default=600.0, ge=1, le=1_000_000)  # of a collective


class EvalConfig(Section):
    """Validation during training."""

    interval: int = Field(default=0, ge=0)  # steps; 0: never
    batches: int = Field(default=8, ge=1)  # global batches per evaluation


class CheckpointConfig(Section):
    """When state is written and where a run starts from."""

    interval: int = Field(default=0, ge=0)  # steps; 0: only at the end and on a signal
    resume: Literal["auto", "never", "must"] = "auto"


class LogConfig(Section):
    """Console and metrics."""

    interval: int = Field(default=1, ge=1)  # steps between console lines


class RunConfig(Section):
    """Everything one run needs; written resolved into its run folder."""

    # a folder name below `out`, so no separators and no leading dot
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    out: str = Field(default="runs", min_length=1)  # folder that holds the run folders
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
