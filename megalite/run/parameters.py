"""The parameters of a model, stage by stage: the only list of them.

The model builds its layers from these specs, the planner lays them out, `model_math` counts them,
and initial values, weight decay, tensor-parallel cuts and groups of statistics are their fields. A
new parameter is a line here and a layer in `megalite.model` that uses it. Imports no torch.

Shapes: D hidden, F feed-forward, N query heads, K key/value heads of g = N / K query heads each, H
head dim, V padded vocabulary. Standard deviations as in GPT-2 and Megatron-LM: `init_std`, output
projections divided by sqrt(2 * layers); norms start as 1, as 0 where they add 1; biases and padding
rows as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megalite.config import ModelConfig
from megalite.layout.sharding import Init, Matrices, Role, ShardSpec

_ONE_MATRIX = Matrices()

Tying = Literal["no", "within", "beside", "copied"]


@dataclass(frozen=True)
class ModelStage:
    """A pipeline stage: its rank, its layers, and whether it is the first or last of the model.

    tied: the place of a tied embedding's two uses, in the first and the last stage. "no": untied,
    or a middle stage; "within": this stage is both; "beside": they are two chunks of one rank,
    which holds the weight once, in the first; "copied": they are on two ranks, each with a copy.
    """

    rank: int
    layers: range  # global indices
    first: bool
    last: bool
    tied: Tying = "no"


def whole_model(model: ModelConfig) -> ModelStage:
    """The model as a single stage."""
    tied: Tying = "within" if model.tie_embeddings else "no"
    return ModelStage(0, range(model.num_layers), first=True, last=True, tied=tied)


def stage_parameters(
    model: ModelConfig, stage: ModelStage, sequence_parallel: bool = False
) -> list[ShardSpec]:
    """The parameters that a stage holds, in order of first use.

    sequence_parallel: each tp rank has its own tokens only, so that the gradients of parameters
    that all of them hold are partial sums.
    """
    specs: list[ShardSpec] = []
    if stage.first:
        specs.append(_embedding(model, stage))
        if model.positions == "learned":
            shape = (model.max_positions, model.hidden_size)
            init = Init(model.init_std)
            specs.append(
                ShardSpec(
                    "position.weight", shape, role="positions", init=init, partial=sequence_parallel
                )
            )

    for layer in stage.layers:
        specs += layer_parameters(model, layer, sequence_parallel)

    # Of a tied weight only a copy on another rank is listed here; it counts in the first stage.
    if stage.last:
        specs += _norm(model, "final_norm", None, sequence_parallel)
        if stage.tied == "no":
            specs.append(_table(model, "head.weight", "head"))
        elif stage.tied == "copied":
            specs.append(replace(_embedding(model, stage), counted=False))
    return specs


def layer_parameters(
    model: ModelConfig, layer: int, sequence_parallel: bool = False
) -> Iterator[ShardSpec]:
    """The parameters of one layer, by global index, in order of first use."""
    hidden, ffn, head = model.hidden_size, model.ffn_hidden_size, model.head_size
    heads, groups = model.num_heads, model.kv_heads
    name, partial = f"layers.{layer}", sequence_parallel

    # A group of the packed projection holds its query heads, then its key, then its value, so that
    # tensor parallelism cuts whole groups.
    before, after = model.norm_place != "after", model.norm_place != "before"
    if before:
        yield from _norm(model, f"{name}.attention_norm", layer, partial)
    packed = (groups, heads // groups + 2, head, hidden)
    qkv = Matrices(1, (heads // groups, 1, 1))
    yield from _column(model, f"{name}.attention.qkv", "qkv", layer, packed, 0, qkv, model.qkv_bias)
    start = 1.0 - model.norm_offset
    if model.qk_norm and model.qk_norm_over == "head":  # each tp rank norms its own heads
        for kind in ("q", "k"):
            yield _norm_vector(f"{name}.attention.{kind}_norm.weight", layer, head, start, True)
    elif model.qk_norm:  # a weight for each element, cut as the heads are
        for kind, size in (("q", (groups, heads // groups, head)), ("k", (groups, head))):
            yield ShardSpec(
                f"{name}.attention.{kind}_norm.weight",
                size,
                0,
                role="norm",
                layer=layer,
                init=Init(value=start),
                decay=False,
            )
    shape = (hidden, heads * head)
    bias = model.attention_out_bias
    yield from _row(model, f"{name}.attention.out", "attention_out", layer, shape, bias, partial)
    if after:
        yield from _norm(model, f"{name}.attention_post_norm", layer, partial)

    # A gated block packs gate and up projection into one, [2, F, D].
    if before:
        yield from _norm(model, f"{name}.mlp_norm", layer, partial)
    bias = model.mlp_bias
    if model.gated:
        gate_up, both = (2, ffn, hidden), Matrices(0, (1, 1))
        yield from _column(model, f"{name}.mlp.gate_up", "mlp", layer, gate_up, 1, both, bias)
    else:
        up = (ffn, hidden)
        yield from _column(model, f"{name}.mlp.up", "mlp", layer, up, 0, _ONE_MATRIX, bias)
    yield from _row(model, f"{name}.mlp.down", "mlp", layer, (hidden, ffn), bias, partial)
    if after:
        yield from _norm(model, f"{name}.mlp_post_norm", layer, partial)


def _table(model: ModelConfig, name: str, role: Role) -> ShardSpec:
    """A vocabulary's table [V, D], cut by rows; rows that pad the vocabulary start as 0."""
    shape = (model.padded_vocab_size, model.hidden_size)
    return ShardSpec(
        name, shape, 0, role=role, init=Init(model.init_std), num_true_rows=model.vocab_size
    )


def _embedding(model: ModelConfig, stage: ModelStage) -> ShardSpec:
    """The embedding; a tied one gets two contributions a microbatch if the head is in `stage`."""
    spec = _table(model, "embedding.weight", "embedding")
    return replace(
        spec, tied=stage.tied == "copied", contributions=2 if stage.tied == "within" else 1
    )


def _norm(model: ModelConfig, name: str, layer: int | None, partial: bool) -> Iterator[ShardSpec]:
    """Weight and, for LayerNorm, bias of a norm over the hidden size."""
    start = 1.0 - model.norm_offset
    yield _norm_vector(f"{name}.weight", layer, model.hidden_size, start, partial)
    if model.norm == "layernorm":
        yield _norm_vector(f"{name}.bias", layer, model.hidden_size, 0.0, partial)


def _norm_vector(name: str, layer: int | None, size: int, start: float, partial: bool) -> ShardSpec:
    """A norm's weight or bias; all elements start as `start`."""
    return ShardSpec(
        name,
        (size,),
        role="norm",
        layer=layer,
        init=Init(value=start),
        partial=partial,
        decay=False,
    )


def _column(
    model: ModelConfig,
    name: str,
    role: Role,
    layer: int,
    shape: tuple[int, ...],
    cut_dim: int,
    matrices: Matrices,
    bias: bool,
) -> Iterator[ShardSpec]:
    """A column-parallel weight [..., D], and its bias, cut alike."""
    yield ShardSpec(
        f"{name}.weight",
        shape,
        cut_dim,
        role=role,
        layer=layer,
        init=Init(model.init_std),
        matrices=matrices,
    )
    if bias:
        yield ShardSpec(f"{name}.bias", shape[:-1], cut_dim, role="bias", layer=layer, decay=False)


def _row(
    model: ModelConfig,
    name: str,
    role: Role,
    layer: int,
    shape: tuple[int, int],
    bias: bool,
    partial: bool,
) -> Iterator[ShardSpec]:
    """A row-parallel weight [D, F], and a bias that each rank adds to its own tokens."""
    init = Init(model.init_std / math.sqrt(2 * model.num_layers))
    yield ShardSpec(
        f"{name}.weight", shape, 1, role=role, layer=layer, init=init, matrices=_ONE_MATRIX
    )
    if bias:
        yield ShardSpec(
            f"{name}.bias", shape[:1], role="bias", layer=layer, partial=partial, decay=False
        )
