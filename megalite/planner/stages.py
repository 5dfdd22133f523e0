"""The pipeline stages of a config as plain values, and the parameters that each of them holds.

A stage is a chunk of the model on one pipeline rank. The parameters are those that the model makes,
with the same names, shapes and cuts, in the same order; no layer is built for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megalite.config import ModelConfig, RunConfig
from megalite.layout.sharding import Matrices, ShardSpec
from megalite.run.stages import stage_layer_counts

_ONE_MATRIX = Matrices()


@dataclass(frozen=True)
class Stage:
    """A chunk: its layers by global index, and which ends of the model it has.

    `beside`: the model's first and last stage are two chunks of one rank, which then holds a tied
    weight once, in the first.
    """

    rank: int
    layers: range
    first: bool
    last: bool
    beside: bool


def stages_of(config: RunConfig, place: Sequence[int]) -> list[Stage]:
    """All stages in model order; stage s is on pipeline rank place[s]. Raises ConfigError."""
    counts = stage_layer_counts(config)
    last = len(counts) - 1
    beside = last > 0 and place[0] == place[last]
    return [
        Stage(rank, range(stop - count, stop), s == 0, s == last, beside and s in (0, last))
        for s, (rank, count, stop) in enumerate(zip(place, counts, accumulate(counts), strict=True))
    ]


def stage_parameters(config: RunConfig, stage: Stage) -> list[ShardSpec]:
    """What a stage holds, in order of first use: the specs of `Transformer.named_params`."""
    model, partial = config.model, config.parallel.sequence_parallel
    hidden = model.hidden_size
    table = (model.padded_vocab_size, hidden)
    tied, alone = model.tie_embeddings, stage.first and stage.last
    specs: list[ShardSpec] = []
    if stage.first:
        elsewhere = tied and not alone and not stage.beside
        embedding = ShardSpec("embedding.weight", table, 0, shared=elsewhere)
        specs.append(replace(embedding, uses=1 + (tied and alone)))
        if model.positions == "learned":
            specs.append(
                ShardSpec("position.weight", (model.max_positions, hidden), partial=partial)
            )
    for index in stage.layers:
        specs += _layer(model, f"layers.{index}", partial)
    if stage.last:
        specs += _norm(model, "final_norm", partial)
        if not tied:
            specs.append(ShardSpec("head.weight", table, 0))
        elif not alone and not stage.beside:
            specs.append(ShardSpec("embedding.weight", table, 0, shared=True, copy=True))
    return specs


def _layer(model: ModelConfig, name: str, partial: bool) -> Iterator[ShardSpec]:
    hidden, ffn, head = model.hidden_size, model.ffn_hidden_size, model.head_size
    heads, groups = model.num_heads, model.kv_heads
    packed = (groups, heads // groups + 2, head, hidden)
    matrices = Matrices(1, (heads // groups, 1, 1))
    yield from _norm(model, f"{name}.attention_norm", partial)
    yield from _column(f"{name}.attention.qkv", packed, 0, matrices, model.qkv_bias)
    if model.qk_norm:
        for kind in ("q", "k"):
            weight = f"{name}.attention.{kind}_norm.weight"
            yield ShardSpec(weight, (head,), partial=True, decay=False)
    yield from _row(f"{name}.attention.out", (hidden, heads * head), partial, model.linear_bias)
    yield from _norm(model, f"{name}.mlp_norm", partial)
    if model.gated:
        shape, matrices = (2, ffn, hidden), Matrices(0, (1, 1))
        yield from _column(f"{name}.mlp.gate_up", shape, 1, matrices, model.linear_bias)
    else:
        yield from _column(f"{name}.mlp.up", (ffn, hidden), 0, _ONE_MATRIX, model.linear_bias)
    yield from _row(f"{name}.mlp.down", (hidden, ffn), partial, model.linear_bias)


def _norm(model: ModelConfig, name: str, partial: bool) -> Iterator[ShardSpec]:
    for kind in ("weight", "bias") if model.norm == "layernorm" else ("weight",):
        yield ShardSpec(f"{name}.{kind}", (model.hidden_size,), partial=partial, decay=False)


def _column(
    name: str, shape: tuple[int, ...], shard_dim: int, matrices: Matrices, bias: bool
) -> Iterator[ShardSpec]:
    yield ShardSpec(f"{name}.weight", shape, shard_dim, matrices=matrices)
    if bias:
        yield ShardSpec(f"{name}.bias", shape[:-1], shard_dim, decay=False)


def _row(name: str, shape: tuple[int, int], partial: bool, bias: bool) -> Iterator[ShardSpec]:
    yield ShardSpec(f"{name}.weight", shape, 1, matrices=_ONE_MATRIX)
    if bias:
        yield ShardSpec(f"{name}.bias", shape[:1], partial=partial, decay=False)
