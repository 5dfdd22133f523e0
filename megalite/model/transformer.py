"""The decoder-only transformer, built per pipeline stage from the list of its parameters.

A chunk holds the layers of its stage, the embedding if it is the first and the final norm, head and
loss if it is the last. With one stage it is the whole model; nothing else differs.

Shapes: T tokens of a microbatch, D model, V padded vocabulary; t = T / tp, v = V / tp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.distributed import comm
from megalite.layout.sharding import ShardSpec
from megalite.model.block import Recompute, TransformerLayer, sum_of, times
from megalite.model.cache import Cache
from megalite.model.dropout import Dropout, DropoutAt
from megalite.model.norm import make_norm
from megalite.model.position import PositionEmbedding, rotary_tables
from megalite.model.sequence import Masks, Sequences
from megalite.run.parameters import ModelStage, stage_parameters
from megalite.tensor_parallel.context import LayerContext, ShardedModule
from megalite.tensor_parallel.cross_entropy import (
    PLAIN,
    LossExtras,
    VocabShard,
    chunked_linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megalite.tensor_parallel.embedding import VocabParallelEmbedding
from megalite.tensor_parallel.grads import GradStore
from megalite.tensor_parallel.linear import ColumnParallelLinear


class ModelInput(Protocol):
    """The fields of a microbatch that a chunk reads.

    token_T, label_T: int64 [T]. weight_T: [T], each token's share of the step's loss; 0 where
    masked. cu_seqlens: document boundaries [0, ..., T]. masks: those made of such boundaries; the
    first chunk that needs another adds it. dropout: the place of the microbatch in its step; None
    (evaluation) drops nothing. position_T: int64 [T] for learned positions; None counts through the
    sequence.
    """

    @property
    def token_T(self) -> Tensor: ...
    @property
    def label_T(self) -> Tensor: ...
    @property
    def weight_T(self) -> Tensor: ...
    @property
    def cu_seqlens(self) -> Sequence[int]: ...
    @property
    def masks(self) -> Masks: ...
    @property
    def dropout(self) -> DropoutAt | None: ...
    @property
    def position_T(self) -> Tensor | None: ...


class Transformer(nn.Module):
    """One pipeline stage of the model: the layers of `stage`, with the parameters of its list.

    loss_chunk_tokens: 0 computes the loss over whole microbatches; n computes logits n tokens at a
    time, forward and backward. embedding_chunk: the chunk of this rank that holds the tied weight
    of a head that is "beside" it.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        stage: ModelStage,
        *,
        seq_length: int,
        recompute: Recompute = "none",
        loss_chunk_tokens: int = 0,
        extras: LossExtras = PLAIN,
        embedding_chunk: Transformer | None = None,
    ) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.first, self.last = stage.first, stage.last
        self.seq_length, self.loss_chunk_tokens = seq_length, loss_chunk_tokens
        self.before_section: Callable[[int], None] | None = None
        kinds = [config.kind_of(layer) for layer in stage.layers]
        self.windows = list(dict.fromkeys(kind.window for kind in kinds))
        self.rope = {
            kind.rotation: rotary_tables(
                config, kind.rotation, seq_length, context.dtype, context.device
            )
            for kind in {kind.rotation: kind for kind in kinds}.values()
        }
        listed = stage_parameters(config, stage, context.sequence_parallel)
        specs = {spec.name: spec for spec in listed}

        if stage.first:
            self.embedding = VocabParallelEmbedding(context, specs["embedding.weight"])
            self.positions: PositionEmbedding | None = None
            if config.positions == "learned":
                self.positions = PositionEmbedding(context, specs["position.weight"], seq_length)
            # rounded as a weight is, so that the factor does not depend on where it is applied
            factor = config.embedding_factor
            rounded = torch.tensor(factor, dtype=context.dtype, device="cpu")
            self.embedding_multiplier = 1.0 if factor == 1 else rounded.item()
            self.embedding_dropout = Dropout(context, config.embedding_dropout, -1, "embedding")

        self.layers = nn.ModuleList(
            TransformerLayer(context, specs, index, config, recompute) for index in stage.layers
        )

        if stage.last:
            self.final_norm = make_norm(context, specs, "final_norm", config)
            owner = {"within": self, "beside": embedding_chunk}.get(stage.tied)
            if owner is None:
                head_context = context
                name = "head.weight" if stage.tied == "no" else "embedding.weight"
                self.head = ColumnParallelLinear(context, specs[name])
            else:
                # The gradient of another chunk's weight belongs in that chunk's store.
                head_context = owner.context
                self.head = ColumnParallelLinear(head_context, weight=owner.embedding.weight)
            self.vocab = VocabShard(
                head_context, config.vocab_size, config.padded_vocab_size, extras
            )

    @property
    def grads(self) -> GradStore:
        """The store of this chunk's weight gradients."""
        return self.context.grads

    def named_params(self) -> list[tuple[nn.Parameter, ShardSpec]]:
        """Each parameter of this chunk once, with its spec, in order of first use."""
        return [pair for section in self._sections() for pair in section]

    def sections(self) -> list[list[nn.Parameter]]:
        """Parameters by section: embedding, each layer, then final norm and head (may be empty).

        `before_section(i)` is called ahead of the first use of section i in each forward.
        """
        sections = [[param for param, _ in section] for section in self._sections()]
        if self.last and self.first and self.config.tie_embeddings:
            sections[-1].append(self.head.weight)
        return sections

    def _sections(self) -> list[list[tuple[nn.Parameter, ShardSpec]]]:
        head = [self.final_norm, self.head] if self.last else []
        first = [self.embedding, self.positions] if self.first else []
        groups: list[list[nn.Module]] = [[module for module in first if module is not None]]
        groups += [*([layer] for layer in self.layers), [*head]]
        return [
            [
                (getattr(module, attribute), spec)
                for root in group
                for module in root.modules()
                if isinstance(module, ShardedModule)
                for attribute, spec in module.specs.items()
            ]
            for group in groups
        ]

    def forward(self, x: Tensor | None, micro_batch: ModelInput) -> Tensor:
        """Hidden states for the next stage, or on the last stage the microbatch's scalar loss.

        x: the previous stage's output [T, D] ([t, D] under sequence parallelism), None on the first
        stage. The loss is sum(weight_T * loss_T).
        """
        assert not (
            self.config.has_dropout and torch.is_grad_enabled() and micro_batch.dropout is None
        ), "a batch to train on says where it stands, or nothing would be dropped"
        masks = self._masks(micro_batch.cu_seqlens, micro_batch.masks)
        sequences = self._sequences(len(micro_batch.token_T), masks, micro_batch.dropout)
        x, delta = self.hidden(x, micro_batch.token_T, sequences, micro_batch.position_T)
        if not self.last:
            return sum_of(x, delta)

        self._enter_section(len(self.layers) + 1)
        loss_T = self.loss(self.final(x, delta), micro_batch.label_T)
        weight_T = micro_batch.weight_T.to(loss_T.dtype)
        self.vocab.tally(weight_T)
        return torch.dot(loss_T, weight_T)

    def hidden(
        self,
        x: Tensor | None,
        token_T: Tensor,
        sequences: Sequences,
        position_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream after this stage's layers, as a layer returns it.

        position_T: of each token; None: token t has position t mod S, S = `seq_length`.
        """
        if self.first:
            self._enter_section(0)
            x = self.embed(token_T, sequences.dropout, position_T)
        assert x is not None, "a stage after the first needs the previous stage's output"
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            self._enter_section(index + 1)
            x, delta = layer(x, delta, sequences)
        return x, delta

    def embed(
        self, token_T: Tensor, dropout: DropoutAt | None, position_T: Tensor | None = None
    ) -> Tensor:
        """Token embeddings, with positions where they are learned: [T, D] or [t, D]."""
        x = times(self.embedding(token_T), self.embedding_multiplier)
        if self.positions is not None:
            length = min(self.seq_length, len(token_T))
            x = self.positions(x, length if position_T is None else position_T)
        return self.embedding_dropout(x, dropout)

    def final(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """The head's input: the norm of the residual stream, divided by the logits' divisor."""
        _, normed = self.final_norm(x, delta)
        return times(normed, 1 / self.config.logits_scaling)

    def loss(self, x: Tensor, label_T: Tensor) -> Tensor:
        """Per-token loss [T] of normed hidden states, with the extras while training."""
        if self.loss_chunk_tokens:
            return chunked_linear_cross_entropy(
                x, self.head.weight, label_T, self.vocab, self.loss_chunk_tokens
            )
        return vocab_parallel_cross_entropy(self.head(x), label_T, self.vocab)

    @torch.no_grad()
    def logits(self, token_T: Tensor) -> Tensor:
        """Logits [T, true vocabulary] of one sequence; needs the whole model (tp = pp = 1)."""
        assert len(self.layers) == self.config.num_layers, "logits needs the whole model"
        assert self.context.tp.size == 1, "logits needs the whole vocabulary"
        sequences = self._sequences(len(token_T), self._masks([0, len(token_T)], {}))
        logits: Tensor = self.head(self.final(*self.hidden(None, token_T, sequences)))
        return logits[:, : self.config.vocab_size]

    @torch.no_grad()
    def text_logits(
        self,
        token_T: Tensor,
        counts: Sequence[int],
        cache: Cache | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, true vocabulary] after the last of `counts` tokens of each of B texts.

        token_T: the texts' tokens, end to end. cache: has the tokens before these, and takes up
        these; None: texts that are whole. rows: tokens, by their place in token_T, whose logits
        [rows, true vocabulary] are wanted instead. Needs all layers; all tp ranks call it, without
        sequence parallelism, and get the same.
        """
        assert len(self.layers) == self.config.num_layers, "text needs the whole model"
        tp, ends, device = self.context.tp, list(accumulate(counts, initial=0)), token_T.device
        reads_texts = cache is None or cache.is_empty
        starts = [0] * len(counts) if cache is None else cache.begin(counts)
        position_T = torch.tensor(
            [p for start, n in zip(starts, counts, strict=True) for p in range(start, start + n)],
            device=device,
        )
        tables = {
            kind: (cos[position_T], sin[position_T]) for kind, (cos, sin) in self.rope.items()
        }
        masks = self._masks(ends, {}) if reads_texts else dict.fromkeys(self.windows)
        sequences = Sequences(masks, tables, cache=cache)
        x, delta = self.hidden(None, token_T, sequences, position_T)

        # The norm and the head only of what is asked for: prompts have many tokens.
        if rows is None:
            rows = torch.tensor(ends[1:], device=device) - 1
        logits_Bv: Tensor = self.head(self.final(x[rows], None if delta is None else delta[rows]))
        parts = comm.all_gather(logits_Bv, tp).view(tp.size, *logits_Bv.shape)
        return parts.transpose(0, 1).flatten(1)[:, : self.config.vocab_size]

    def _sequences(
        self, num_tokens: int, masks: Mapping[int | None, Any], dropout: DropoutAt | None = None
    ) -> Sequences:
        """The layers' input for tokens of which token t has position t mod S."""
        length = min(self.seq_length, num_tokens)
        tables = {kind: (cos[:length], sin[:length]) for kind, (cos, sin) in self.rope.items()}
        return Sequences(masks, tables, dropout)

    def _masks(self, cu_seqlens: Sequence[int], masks: Masks) -> dict[int | None, Any]:
        """The masks of a microbatch by window, out of `masks` or made and put there."""
        bounds = tuple(cu_seqlens)
        for window in self.windows:
            if (bounds, window) not in masks:
                made = self.context.ops.attention_mask(bounds, window, self.context.device)
                masks[bounds, window] = made
        return {window: masks[bounds, window] for window in self.windows}

    def _enter_section(self, section: int) -> None:
        if self.before_section is not None:
            self.before_section(section)
