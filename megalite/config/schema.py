"""The schema of a run's settings: one frozen pydantic model per section, with its local checks.

Does not read files (config.load), does not compare sections with each other or with the world
size (checks.settings), does not spread layers over stages (run.stages). Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
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

Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu2"]


Rotation = Literal["global", "local", "none"]
LayerName = Literal["full", "window", "full_nope", "window_nope"]
# Each name: True if attention has the sliding window, True if positions turn queries and keys.
_LAYERS: dict[LayerName, tuple[bool, bool]] = {
    "full": (False, True),
    "window": (True, True),
    "full_nope": (False, False),
    "window_nope": (True, False),
}


@dataclass(frozen=True)
class LayerKind:
    """The traits of one layer's attention that other layers may not share.

    window: tokens that a token attends to; None: all before it. rotation: the tables that turn
    queries and keys: those of most layers, those of layers with a window, or none.
    """

    window: int | None
    rotation: Rotation


class Section(BaseModel):
    """Base of every config section: frozen, unknown keys refused, no silent type changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The transformer. Sizes are whole-model sizes, never per rank.

    The defaults are those of llama; `families.py` has those of the other families.

    Example:
        [model]
        family = "llama"
        num_layers = 4
        hidden_size = 128
        num_heads = 4
        num_kv_heads = 2
        ffn_hidden_size = 344
        vocab_size = 512
    """

    # the family that gives the defaults of the other model settings
    family: Literal[
        "llama",
        "gpt2",
        "qwen2",
        "qwen3",
        "mistral",
        "smollm3",
        "olmo2",
        "olmo3",
        "gemma3",
        "phi3",
        "granite",
        "gpt_neox",
    ] = "llama"
    num_layers: int = Field(ge=1, le=100_000)  # transformer layers of the whole model
    hidden_size: int = Field(ge=1, le=2**24)  # elements of a token's hidden state
    num_heads: int = Field(ge=1, le=2**20)  # query heads; tp divides them
    # key and value heads, a divisor of num_heads; none: num_heads (no grouped queries)
    num_kv_heads: int | None = Field(default=None, ge=1)
    # elements of a head; none: hidden_size / num_heads
    head_dim: int | None = Field(default=None, ge=1)
    ffn_hidden_size: int = Field(ge=1, le=2**24)  # width of the feed-forward block
    vocab_size: int = Field(ge=1, le=2**31 - 1)  # tokens of the true vocabulary, without padding
    # rows of embedding and head are padded to a multiple of it, whatever tp is
    vocab_pad_multiple: int = Field(default=128, ge=1)
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # norm of each layer; layernorm has a bias
    norm_zero_centered: bool = False  # norms multiply by 1 + weight, and weights start as 0
    # added to the mean square or variance before the root
    norm_eps: float = Field(default=1e-5, gt=0)
    # rope rotates queries and keys; learned adds a trained row for each position
    positions: Literal["rope", "learned"] = "rope"
    # rows of learned positions, the longest sequence; only with positions = "learned"
    max_positions: int = Field(default=1024, ge=1, le=2**31 - 1)
    rope_theta: float = Field(default=10000.0, gt=0)  # base of the rotation's wavelengths
    # base of the rotation in layers with a window, not scaled; none: as in the others
    rope_local_theta: float | None = Field(default=None, gt=0)
    # share of each head's elements that is rotated
    rope_fraction: float = Field(default=1.0, gt=0, le=1)
    # slows rotation for long contexts: linear all of it, llama3 and yarn low frequencies; none: not
    rope_scaling: Literal["linear", "llama3", "yarn"] | None = None
    rope_factor: float = Field(default=8.0, ge=1)  # slowed frequencies are divided by it
    # llama3: pairs with fewer turns in the original length are divided by the factor
    rope_low_freq_factor: float = Field(default=1.0, gt=0)
    # llama3: pairs with more turns in the original length stay; blended between
    rope_high_freq_factor: float = Field(default=4.0, gt=0)
    # yarn: pairs with more turns in the original length stay; blended between
    rope_beta_fast: float = Field(default=32.0, gt=0)
    # yarn: pairs with fewer turns in the original length are divided by the factor
    rope_beta_slow: float = Field(default=1.0, gt=0)
    rope_truncate: bool = True  # yarn: the blend begins and ends at whole pairs
    # yarn: factor of rotated queries and keys; none: 0.1 ln(rope_factor) + 1
    rope_attention_factor: float | None = Field(default=None, gt=0)
    # llama3, yarn: tokens of the context length before scaling
    rope_original_max_position: int = Field(default=8192, ge=1)
    # function of the feed-forward block; swiglu and geglu have a third matrix, the gate; gelu and
    # geglu are exact, those in _tanh approximate; relu2 is squared ReLU
    activation: Activation = "swiglu"
    qkv_bias: bool = False  # biases of the query, key and value projections
    attention_out_bias: bool = False  # bias of attention's output projection
    mlp_bias: bool = False  # biases of the feed-forward block
    qk_norm: bool = False  # RMSNorm of queries and keys, before they are rotated
    # what that norm is over: each head, or all heads of the projection together
    qk_norm_over: Literal["head", "projection"] = "head"
    # norm of what enters attention and feed-forward block, of what leaves them, or both
    norm_place: Literal["before", "after", "both"] = "before"
    # attention and feed-forward block read the same residual stream, and both add to it
    parallel_residual: bool = False
    # tokens that a token attends to, itself included; none: all before it
    sliding_window: int | None = Field(default=None, ge=1)
    # kinds of the layers, repeated over the model: full attention or the window, _nope without
    # rotation; none: all alike, with the window if there is one
    layers: list[LayerName] | None = Field(default=None, min_length=1)
    tie_embeddings: bool = False  # the head uses the embedding's weight
    # factor of token embeddings, rounded to train.dtype; none: the root of hidden_size
    embedding_multiplier: float | None = Field(default=1.0, gt=0)
    # factor of what attention and feed-forward block add to the residual stream
    residual_multiplier: float = Field(default=1.0, gt=0)
    # factor of attention scores; none: 1 / sqrt(elements of a head)
    attention_multiplier: float | None = Field(default=None, gt=0)
    logits_scaling: float = Field(default=1.0, gt=0)  # logits are divided by it
    # probability of dropping an element of the embedding's output
    embedding_dropout: float = Field(default=0.0, ge=0, lt=1)
    # probability of dropping an attention weight
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    # probability of dropping an element before each residual sum
    residual_dropout: float = Field(default=0.0, ge=0, lt=1)
    # deviation of initial weights; output projections use init_std / sqrt(2 num_layers)
    init_std: float = Field(default=0.02, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _family_gives_defaults(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return family_defaults(str(values.get("family", "llama"))) | values

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _scaling_is_one_for_all_lengths(cls, value: object) -> object:
        if value in ("dynamic", "longrope", "su"):
            raise ValueError(
                f"{value} turns a token by another angle in texts of another length, which "
                "megalite does not have; allowed: linear, llama3, yarn"
            )
        return value

    @property
    def layer_names(self) -> list[LayerName]:
        """The name of every layer's kind, in order."""
        alike: LayerName = "full" if self.sliding_window is None else "window"
        names = self.layers or [alike]
        return [names[layer % len(names)] for layer in range(self.num_layers)]

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a layer, by its global index."""
        windowed, rotated = _LAYERS[self.layer_names[layer]]
        rotation: Rotation = "none"
        if rotated and self.positions == "rope":
            rotation = "local" if windowed and self.rope_local_theta is not None else "global"
        return LayerKind(self.sliding_window if windowed else None, rotation)

    @property
    def kinds(self) -> list[LayerKind]:
        """The kind of every layer, in order."""
        return [self.kind_of(layer) for layer in range(self.num_layers)]

    @property
    def norm_offset(self) -> float:
        """The number that norms add to their weights."""
        return 1.0 if self.norm_zero_centered else 0.0

    @property
    def embedding_factor(self) -> float:
        """The factor of token embeddings, before it is rounded."""
        given = self.embedding_multiplier
        return self.hidden_size**0.5 if given is None else given

    @property
    def attention_factor(self) -> float:
        """The factor of attention scores."""
        given = self.attention_multiplier
        return self.head_size**-0.5 if given is None else given

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
        return self.activation in ("swiglu", "geglu", "geglu_tanh")

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
    """The layout: how many ranks each axis has, and how layers are spread over stages.

    Example:
        [parallel]          # 8 ranks
        tp = 2
        pp = 2
        vpp = 2
        dp = 2
        sequence_parallel = true
    """

    # tensor-parallel ranks, which share each layer; keep it within a node
    tp: int = Field(default=1, ge=1, le=2**20)
    # pipeline-parallel ranks, which share the layers in order
    pp: int = Field(default=1, ge=1, le=2**12)
    # model chunks on each pipeline rank; above 1 the schedule interleaves them
    vpp: int = Field(default=1, ge=1, le=2**12)
    # data-parallel replicas; none: world size / (tp * pp)
    dp: int | None = Field(default=None, ge=1, le=2**20)
    # split norms and residuals over tp by tokens, to save memory; needs tp > 1
    sequence_parallel: bool = False
    # layers of each of the pp * vpp stages, in model order; none: as even as possible
    stage_layers: list[Annotated[int, Field(ge=0)]] | None = None
    # layers: the head counts as head_layers; cost: as many layers as its FLOPs are worth
    balance: Literal["layers", "cost"] = "layers"
    # cost of the embedding in layers, when layers are spread over stages
    embedding_layers: float = Field(default=0.0, ge=0)
    # cost of head and loss in layers, when layers are spread over stages
    head_layers: float = Field(default=0.0, ge=0)
    overlap_tp: bool = True  # send input gradients while weight gradients are computed


class PipelineConfig(Section):
    """Order of work in the pipeline.

    Example:
        [pipeline]
        schedule = "interleaved"
        trace_step = 10
    """

    # a name of `megalite schedule`, "family:...", "file:PATH" or "auto"; none: chosen by pp, vpp,
    # tp and recompute
    schedule: str | None = Field(default=None, min_length=1)
    # step whose time line is recorded, for `megalite schedule --from-run`; none: no step
    trace_step: int | None = Field(default=None, ge=1)
    # for "auto": most activations a rank may hold, in its share of one microbatch; none: pp of them
    max_activations: float | None = Field(default=None, gt=0)


class GroupConfig(Section):
    """Optimizer settings for the parameters whose name matches a pattern.

    `match` is a shell pattern over global parameter names ("*.bias", "embedding.weight"). Every
    group that matches applies, in order: a later one overrides what it sets.

    Example:
        [[optimizer.groups]]
        match = "embedding.weight"
        lr_scale = 0.5
        weight_decay = 0.0
    """

    match: str = Field(min_length=1)  # shell pattern of global parameter names, such as "*.bias"
    # factor of the learning rate; 0: frozen; none: unchanged
    lr_scale: float | None = Field(default=None, ge=0)
    # decay of these parameters; none: unchanged
    weight_decay: float | None = Field(default=None, ge=0)
    # adamw, for a matrix that Muon would update; none: unchanged
    algorithm: Literal["adamw"] | None = None

    @model_validator(mode="after")
    def _sets_something(self) -> GroupConfig:
        if self.lr_scale is None and self.weight_decay is None and self.algorithm is None:
            raise ValueError("sets nothing; give lr_scale, weight_decay or algorithm")
        return self


class OptimizerConfig(Section):
    """The algorithm, its learning-rate schedule, clipping, and where its state lives.

    Example:
        [optimizer]
        lr = 3e-4
        min_lr = 3e-5
        lr_schedule = "cosine"
        warmup_steps = 20
        clip_grad = "none"  # no clipping
    """

    # muon: hidden matrices by Muon, everything else by AdamW with the same rate
    name: Literal["adamw", "muon"] = "adamw"
    # kernel of AdamW; fused: the backend's own; apex: NVIDIA's FusedAdam, if installed
    adam: Literal["fused", "apex"] = "fused"
    lr: float = Field(default=3e-4, ge=0)  # learning rate after the warm-up
    min_lr: float = Field(default=0.0, ge=0)  # learning rate at the end of the decay
    # shape of the learning rate after the warm-up; wsd stays at lr until its last phase
    lr_schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    # steps in which the rate rises linearly to lr; 0: no warm-up
    warmup_steps: int = Field(default=0, ge=0)
    # warm-up in tokens, at least those of a step; none: warmup_steps counts
    warmup_tokens: int | None = Field(default=None, ge=1)
    # step at which the decay ends; none: the end of the run
    decay_steps: int | None = Field(default=None, ge=1)
    # decay_steps in tokens; none: decay_steps counts
    decay_tokens: int | None = Field(default=None, ge=1)
    # wsd: length of the decay at the end, in steps; wsd needs this or wsd_decay_tokens
    wsd_decay_steps: int | None = Field(default=None, ge=1)
    # wsd: length of the decay at the end, in tokens; none: wsd_decay_steps counts
    wsd_decay_tokens: int | None = Field(default=None, ge=1)
    # wsd: shape of the decay at the end
    wsd_decay_shape: Literal["linear", "cosine", "1-sqrt"] = "1-sqrt"
    beta1: float = Field(default=0.9, ge=0, lt=1)  # AdamW: decay of the mean of gradients
    beta2: float = Field(default=0.95, ge=0, lt=1)  # AdamW: decay of the mean of squared gradients
    eps: float = Field(default=1e-8, gt=0)  # AdamW: added to the root of the second moment
    # decoupled decay; not applied to one-dimensional parameters
    weight_decay: float = Field(default=0.1, ge=0)
    groups: list[GroupConfig] = []  # exceptions by parameter name
    # decay of an average of the weights, for evaluation; none: no average
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    # type in which moments are stored; they are computed in float32
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    # type in which gradients are sent; they are summed in float32
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    loss_scale: float = Field(default=65536.0, ge=1, le=2.0**64)  # float16: initial loss scale
    loss_scale_min: float = Field(default=1.0, gt=0, le=2.0**64)  # float16: smallest loss scale
    # float16: good steps in a row before the scale grows
    loss_scale_interval: int = Field(default=1000, ge=1)
    # float16: bad steps before the scale is reduced
    loss_scale_hysteresis: int = Field(default=2, ge=1)
    # float16: factor of a reduction; growth is its inverse
    loss_scale_backoff: float = Field(default=0.5, gt=0, lt=1)
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)  # Muon: decay of the momentum
    muon_nesterov: bool = True  # Muon: Nesterov momentum
    muon_steps: int = Field(default=5, ge=1, le=30)  # Muon: Newton-Schulz iterations
    # Muon: size of an update; adamw_rms: like one of AdamW; spectral: by the matrix's shape
    muon_scale: Literal["adamw_rms", "spectral"] = "adamw_rms"
    muon_dtype: Literal["float32", "bfloat16"] = "float32"  # Muon: type of the iteration
    # largest gradient norm of the whole model; larger ones are scaled down; none: no clipping
    clip_grad: float | None = Field(default=1.0, gt=0)
    # at a gradient that is not finite: end the run, or skip the step
    non_finite: Literal["stop", "skip"] = "stop"
    max_skips: int = Field(default=10, ge=1)  # skipped steps in a row after which the run stops
    # ZeRO stage; 1 spreads optimizer state over the replicas, 0 keeps it whole on each
    zero: Literal[0, 1] = 1
    # size of a gradient bucket, MiB of float32 gradients
    bucket_mb: float = Field(default=40.0, gt=0, le=1_000_000)
    overlap_grad_reduce: bool = True  # reduce gradients during the last backward
    # gather parameters until their first use in the next step; only with zero = 1
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
    """One source of a blend. Weights are relative: 7 and 3 are the same as 0.7 and 0.3.

    Example:
        [data]
        path = "none"       # only where a base file sets it

        [[data.sources]]
        path = "data/web"
        weight = 0.7

        [[data.sources]]
        path = "data/code"
        weight = 0.3
    """

    path: Prefix  # PREFIX of the dataset's files PREFIX.bin and PREFIX.idx
    # share of samples, relative to the others, kept to 1/65,536; 0: validation only
    weight: float = Field(default=1.0, ge=0)
    name: SetName | None = None  # name in messages and validation sets; none: the last part of path


class DataConfig(Section):
    """The sources of tokens, and how they are cut into samples.

    Example:
        [data]
        path = "data/web"
        tokenizer = "data/web.model"
        seq_length = 128
        split = "969,30,1"
    """

    # PREFIX of the dataset's files PREFIX.bin and PREFIX.idx; none: sources are given
    path: Prefix | None = None
    # words of `megalite data prepare` (SOURCE, options) that make path if it is missing, which
    # --local does before the run; []: it is made by hand
    prepare: list[str] = []
    sources: list[SourceConfig] = []  # a blend of datasets, instead of path
    # sentencepiece model, tokenizer.json or a folder with one, for text; none: no text
    tokenizer: PathText | None = None
    seq_length: int = Field(ge=1, le=2**31 - 1)  # tokens of a sample
    # shares of each source for train, validation and, if given, test; also "969,30,1"
    split: tuple[float, ...] = (0.98, 0.02)
    # where the parts of split end: at a token, or at the next start of a document
    split_at: Literal["token", "document"] = "token"
    # size: the weight of each source is times its number of samples, so 1 takes all alike
    weights: Literal["given", "size"] = "given"
    # samples are windows of the stream of tokens, or whole documents and padding
    packing: Literal["stream", "documents"] = "stream"
    # documents longer than a sample are cut there, or left out
    long_documents: Literal["truncate", "drop"] = "truncate"
    document_masks: bool = False  # tokens attend only to their own document
    eod_mask_loss: bool = False  # no loss for the first token of a document behind another one
    reset_positions: bool = False  # learned positions begin anew in each document
    # threads that read ahead; 0: read when the step needs it
    workers: int = Field(default=1, ge=0, le=64)
    prefetch: int = Field(default=2, ge=1, le=1024)  # steps that the threads may be ahead

    @field_validator("split", mode="before")
    @classmethod
    def _split_into_shares(cls, value: object) -> tuple[float, ...]:
        return parse_split(value)


class TrainConfig(Section):
    """Length of the run, batch of a step, number formats, recomputation and loss.

    Example:
        [train]
        steps = 1000
        global_batch = 16
        micro_batch = 2
        seed = 7
        recompute = "selective"
    """

    steps: int = Field(ge=0)  # optimizer steps of the run; required unless tokens is given
    # length of the run in tokens, rounded up to steps; none: steps counts
    tokens: int | None = Field(default=None, ge=1)
    global_batch: int = Field(ge=1, le=10_000_000)  # sequences of a step, over all replicas
    # sequences of the first steps of a growing batch; none: no ramp
    batch_ramp_start: int | None = Field(default=None, ge=1)
    # sequences that the ramp adds at a time, up to global_batch
    batch_ramp_increment: int | None = Field(default=None, ge=1)
    # length of the ramp in sequences; give this or batch_ramp_tokens
    batch_ramp_samples: int | None = Field(default=None, ge=1)
    # length of the ramp in tokens; give this or batch_ramp_samples
    batch_ramp_tokens: int | None = Field(default=None, ge=1)
    micro_batch: int = Field(default=1, ge=1)  # sequences that a rank computes at a time
    # seed of initial weights, dropout and the order of samples
    seed: int = Field(default=1234, ge=0, le=MAX_SEED)
    # type of weights and activations; the optimizer keeps at least float32
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    tf32: bool = False  # compute float32 matrix products in TF32 on GPUs
    # what the backward computes again: none, rotated heads, attention and activation (selective),
    # layers (full) or stages (stage)
    recompute: Literal["none", "selective", "full", "stage"] = "none"
    # tokens whose logits are computed at a time; 0: the whole microbatch
    loss_chunk_tokens: int = Field(default=0, ge=0)
    # coefficient of the squared log-sum-exp of each token's logits; 0: off
    z_loss: float = Field(default=0.0, ge=0, le=1)
    # share of the target spread over the vocabulary; 0: off
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    # at a loss far above the median of recent ones: do nothing, end the run, or skip the step
    loss_spike: Literal["off", "stop", "skip"] = "off"
    # deviations above the median that make a spike
    loss_spike_threshold: float = Field(default=10.0, gt=0)
    # normal losses that the median is taken of, in steps; no verdict until full
    loss_spike_window: int = Field(default=64, ge=8, le=10_000)
    deterministic: bool = False  # allow only algorithms that give the same bits on every run
    # seconds that a collective may take
    timeout_s: float = Field(default=600.0, ge=1, le=1_000_000)

    @model_validator(mode="before")
    @classmethod
    def _steps_follow_from_tokens(cls, values: object) -> object:
        # 0 until checks.settings.resolve, which knows the tokens of a step, fills them in.
        if isinstance(values, dict) and values.get("tokens") is not None:
            return {"steps": 0, **values}
        return values


class EvalSetConfig(Section):
    """A dataset that is only evaluated, whole.

    Example:
        [[eval.sets]]
        name = "books"
        path = "data/books"
    """

    name: SetName  # name of the set in the record
    path: Prefix  # PREFIX of the dataset's files PREFIX.bin and PREFIX.idx


class EvalConfig(Section):
    """Validation during training, and at its end.

    Example:
        [eval]
        interval = 50
        batches = 2
    """

    # steps between evaluations, and one at the end; 0: never
    interval: int = Field(default=0, ge=0)
    # global batches of each set, the same ones every time; none: the whole set
    batches: int | None = Field(default=None, ge=1)
    at_start: bool = False  # also before the first step, of the weights that the run begins with
    # weights to evaluate; ema: the average that optimizer.ema_decay keeps
    weights: Literal["model", "ema"] = "model"
    sets: list[EvalSetConfig] = []  # datasets beside the validation parts of data.split


class CheckpointConfig(Section):
    """Saves of a run, the checkpoints that stay, and the state that a run starts from.

    A run saves when the first of both intervals is due, at its end and on a signal.

    Example:
        [checkpoint]
        interval = 100
        keep = 2
        keep_every = 300
        keep_best = "validation"
    """

    # steps between saves; 0: not by steps, and if 0 is written, by time only with interval_s
    interval: int = Field(default=0, ge=0)
    interval_s: float = Field(default=1800.0, ge=0)  # seconds since the last save; 0: not by time
    keep: int = Field(default=3, ge=1)  # newest checkpoints that are kept
    # the first checkpoint of each so many steps is kept; 1: all; 0: off
    keep_every: int = Field(default=0, ge=0)
    # validation set whose lowest loss is kept; adds a save before each evaluation; none: off
    keep_best: str | None = Field(default=None, min_length=1)
    # if the run has a checkpoint: auto resumes, never refuses; must refuses if there is none
    resume: Literal["auto", "never", "must"] = "auto"
    # run, checkpoint or hf:FOLDER that gives a new run its weights, optimizer fresh; none: random
    load_weights: PathText | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_interval_is_none_by_time(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("interval") == 0:
            return {"interval_s": 0.0, **values}
        return values


class WandbConfig(Section):
    """Weights & Biases, used if `project` is set. The key is not a setting; wandb finds its own.

    Example:
        [log.wandb]
        project = "mine"
        mode = "offline"
        tags = ["small", "first"]
    """

    project: str | None = Field(default=None, min_length=1)  # project to log to; none: wandb is off
    # auto: online if wandb has a key, else offline
    mode: Literal["auto", "online", "offline"] = "auto"
    entity: str | None = Field(default=None, min_length=1)  # user or team; none: the key's default
    group: str | None = Field(default=None, min_length=1)  # group of the run; none: no group
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = []  # tags of the run
    # seconds for its start, during which training goes on
    timeout_s: float = Field(default=15.0, ge=1, le=600)


class LogConfig(Section):
    """Console and metrics.

    Example:
        [log]
        interval = 10
        tensorboard = true
    """

    # steps between console lines, and on GPUs between splits of a step's time; the last has both
    interval: int = Field(default=1, ge=1)
    # form of console lines; megatron: as Megatron-LM prints them
    format: Literal["megalite", "megatron"] = "megalite"
    # steps between parameter statistics; 0: never
    param_stats_interval: int = Field(default=0, ge=0)
    # hardware file with the device's peak, as in configs/hardware; none: found by the device's name
    hardware: PathText | None = None
    tensorboard: bool = False  # write runs/NAME/tensorboard; needs the tensorboard package
    wandb: WandbConfig = WandbConfig()  # Weights & Biases


class KernelsConfig(Section):
    """The kernels for norms, activations, attention, loss and update: see docs/kernels.md.

    Example:
        [kernels]
        backend = "reference"
        attention = "sdpa_flash"
    """

    # auto: triton on CUDA devices from capability 8.0, else plain torch (reference); interpret:
    # Triton's interpreter, for tests
    backend: Literal["auto", "triton", "reference", "interpret"] = "auto"
    # auto: the backend's own; sdpa_flash, sdpa_cudnn: torch's; fa3, fa4: FlashAttention 3 or 4, if
    # installed
    attention: Literal["auto", "sdpa_flash", "sdpa_cudnn", "fa3", "fa4"] = "auto"
    # kernel of RMSNorm; auto: the backend's own; apex: NVIDIA's, if installed
    norm: Literal["auto", "apex"] = "auto"


class RunConfig(Section):
    """Everything that one run needs. The run folder gets it with every value filled in.

    Example:
        base = "configs/models/llama-tiny.toml"   # settings that this file does not repeat
        name = "first"
        out = "runs"

        [data]
        path = "data/stdlib"
        seq_length = 128

        [train]
        steps = 1000
        global_batch = 16
    """

    # name of the run folder in out; letters, digits, "_", "." and "-", no leading dot
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
