"""Microbatches of a run: a pure function of (sources, weights, seed, position).

For sample g of the run the blend (blend.py) gives a source and a number n: it is the n-th sample
taken from that source. The source's own order (sampler.py) gives the sample at n. So each source
goes through epochs of its own, each epoch in another order, independent of the other sources.
Nothing depends on the length of the run, the ranks, or the order of the calls.

`once` is for evaluation: every sample of one source once, and the last batch filled up with
padding of loss weight 0, never with a sample. The caller passes its dp rank; the world is not known
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.data.blend import Blend, Places
from megalite.data.dataset import TokenSpan
from megalite.data.sampler import GOLDEN, MASK_64, SampleOrder, mix64
from megalite.data.samples import Packing
from megalite.errors import ConfigError, DataError
from megalite.wording import number_of

PADDING = -1  # sample id of a sequence of padding


@dataclass(frozen=True)
class MicroBatch:
    """A microbatch of b sequences of S tokens, flattened: T = b * S positions."""

    tokens: torch.Tensor  # int64 [T]
    labels: torch.Tensor  # int64 [T]
    loss_weight: torch.Tensor  # float32 [T]: 1 counted, 0 masked
    cu_seqlens: torch.Tensor  # int32 [segments + 1]: start of each segment, and T
    sample_ids: NDArray[np.int64]  # [b], numbered through all sources; PADDING for padding


class Batches:
    """The microbatches of one span, or of several spans (sources) blended by `weights`, one each.

    A source of weight 0 is never read. Without `shuffle` each source's samples come in order. With
    `vocab_size` the token ids of each batch are checked against it. Raises DataError for a span of
    positive weight without a sample.
    """

    def __init__(
        self,
        spans: TokenSpan | Sequence[TokenSpan],
        packing: Packing | int,
        seed: int,
        *,
        weights: Sequence[Fraction] = (Fraction(1),),
        shuffle: bool = True,
        once: bool = False,
        document_masks: bool = False,
        eod_mask_loss: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.spans = [spans] if isinstance(spans, TokenSpan) else list(spans)
        packing = Packing.of(packing)
        self.seq_length = packing.seq_length
        self.document_masks = document_masks
        self.eod_mask_loss = eod_mask_loss or document_masks
        self.vocab_size = vocab_size
        assert not once or len(self.spans) == 1, "a pass is over one source"

        # An order needs at least one sample, which a source of weight 0 may lack: it has no order.
        self.samples = [
            span.require_samples(packing) if weight else span.samples(packing)
            for span, weight in zip(self.spans, weights, strict=True)
        ]
        self._weights, self._seed, self._shuffle = weights, seed, shuffle
        self._num_samples = [samples.num_samples for samples in self.samples]
        self.begin_at(0, range(len(weights)), [0] * len(weights))

        # Sample ids count through all sources, so one number names a sample of the run.
        self._first_id = np.cumsum([0, *self._num_samples])
        self._end = self.num_samples if once else None

    def begin_at(self, first_sample: int, shuffles: Sequence[int], before: Sequence[int]) -> None:
        """Begin the blend at a sample of the run, `before` which so many of each source were taken.

        shuffles: the number of each source's shuffle, by which sources of one size differ.
        """
        self.blend = Blend(self._weights, first_sample, before)
        self._orders = [
            SampleOrder(count, source_seed(self._seed, number), self._shuffle) if weight else None
            for count, number, weight in zip(
                self._num_samples, shuffles, self._weights, strict=True
            )
        ]

    @property
    def num_samples(self) -> int:
        """Number of samples of all sources, each counted once."""
        return int(self._first_id[-1])

    def sample_ids(self, first_sample: int, count: int) -> NDArray[np.int64]:
        """Ids, as in MicroBatch, of the run's samples first_sample .. first_sample + count - 1."""
        self._require_in_pass(first_sample)
        return self._ids(self._locate(first_sample, count))

    def rank_batches(
        self, first_sample: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int
    ) -> list[MicroBatch]:
        """A dp rank's microbatches, in order, of the step that starts at sample `first_sample`.

        Sample j of the step belongs to dp rank j // (global_batch / dp_size). Raises ConfigError if
        the batch sizes do not divide, DataError beyond the end of a pass (`once`) or for token ids
        outside `vocab_size`.
        """
        self._require_in_pass(first_sample)
        first, count = _rank_part(global_batch, micro_batch, dp_rank, dp_size)
        return self._assemble(self._locate(first_sample + first, count), micro_batch)

    def _require_in_pass(self, first: int) -> None:
        if first < 0 or (self._end is not None and first >= self._end):
            raise DataError(
                f"{self.spans[0].data.prefix}: {self.spans[0].name}: sample {first} asked for; "
                f"there are {self.num_samples}, and each is taken once"
            )

    def _locate(self, first: int, count: int) -> Places:
        """Source, and sample within it, of `count` samples of the run; PADDING beyond the end."""
        source, number = self.blend.at(first, count)
        sample = np.empty(count, dtype=np.int64)
        for index in np.unique(source).tolist():
            chosen, order = source == index, self._orders[index]
            assert order is not None
            # The blend numbers a source's samples in order, so these are a contiguous range.
            mine = number[chosen]
            sample[chosen] = order.at(int(mine[0]), len(mine))
        if self._end is not None:
            beyond = number >= self._end
            source, sample = np.where(beyond, PADDING, source), np.where(beyond, PADDING, sample)
        return Places(source, sample)

    def _assemble(self, places: Places, micro_batch: int) -> list[MicroBatch]:
        """The microbatches of the samples; all are views of three arrays made at once."""
        size, length = len(places.source), self.seq_length
        # A window is a sample's inputs and, one token later, their labels; padding stays zero.
        window = np.zeros((size, length + 1), dtype=np.int64)
        weight = np.ones((size, length), dtype=np.float32)
        for row, (source, sample) in enumerate(
            zip(places.source.tolist(), places.number.tolist(), strict=True)
        ):
            if sample == PADDING:
                weight[row] = 0.0
                continue
            span, (first, stop) = self.spans[source], self.samples[source].window(sample)
            count = stop - first
            window[row, :count] = span.read(first, count)
            weight[row, count - 1 :] = 0.0  # of whole documents, which may fill a part
            if (mask := span.loss_mask(first + 1, count - 1)) is not None:
                weight[row, : count - 1] = mask
        self._check_ids(window, places)

        # `_segments` also masks labels in `weight`, so it comes before the weights are split.
        segments = self._segments(places, micro_batch, weight)
        tokens, labels, weights = (
            _flat(part, micro_batch) for part in (window[:, :-1], window[:, 1:], weight)
        )
        ids = self._ids(places).reshape(-1, micro_batch)
        return [
            MicroBatch(*parts) for parts in zip(tokens, labels, weights, segments, ids, strict=True)
        ]

    def _segments(
        self, places: Places, micro_batch: int, weight: NDArray[np.float32]
    ) -> list[torch.Tensor]:
        """cu_seqlens of each microbatch, which holds documents apart with document masks.

        Also sets `weight` to 0 in place for labels that are the first token of the next document,
        with document masks or `eod_mask_loss`.
        """
        length = self.seq_length
        plain = np.arange(micro_batch + 1, dtype=np.int64) * length
        if not self.eod_mask_loss:
            same = torch.from_numpy(plain.astype(np.int32))
            return [same] * (len(places.source) // micro_batch)

        starts: list[list[NDArray[np.int64]]] = []
        for row, (source, sample) in enumerate(
            zip(places.source.tolist(), places.number.tolist(), strict=True)
        ):
            if row % micro_batch == 0:
                starts.append([plain])
            if sample != PADDING:
                first, stop = self.samples[source].window(sample)
                # The label before a boundary is the next document's first token. A boundary at the
                # very end masks the last label and starts no new segment: `unique` merges it.
                within = self.spans[source].boundaries(first, min(stop, first + length)) - first
                weight[row, within - 1] = 0.0
                if self.document_masks:
                    # What is not filled is a segment of its own.
                    within = np.append(within, min(stop - first, length))
                    starts[-1].append(within + row % micro_batch * length)
        return [
            torch.from_numpy(np.unique(np.concatenate(parts)).astype(np.int32)) for parts in starts
        ]

    def _ids(self, places: Places) -> NDArray[np.int64]:
        """Sample ids, numbered through all sources."""
        ids: NDArray[np.int64] = places.number + self._first_id[places.source]
        return ids if self._end is None else np.where(places.source < 0, PADDING, ids)

    def _check_ids(self, window: NDArray[np.int64], places: Places) -> None:
        """DataError for a token id outside the vocabulary, with its sample."""
        limit = self.vocab_size
        if limit is None or (window.min() >= 0 and window.max() < limit):
            return
        bad = np.flatnonzero((window < 0) | (window >= limit))
        row, place = divmod(int(bad[0]), window.shape[1])
        span = self.spans[int(places.source[row])]
        raise DataError(
            f"{span.data.indexed.bin_path}: sample {int(places.number[row])} of {span.name} holds "
            f"token id {int(window[row, place])}; the model has model.vocab_size={limit}"
        )


def source_seed(seed: int, number: int) -> int:
    """The seed of a source, so sources of the same size get different orders."""
    return seed if number == 0 else mix64((seed + number * GOLDEN) & MASK_64)


def _rank_part(global_batch: int, micro_batch: int, dp_rank: int, dp_size: int) -> tuple[int, int]:
    """First sample and number of samples of a step that belong to a dp rank."""
    if global_batch < 1 or dp_size < 1 or global_batch % dp_size:
        raise ConfigError(
            f"train.global_batch={global_batch} is not divisible by dp={dp_size}; "
            "use a multiple of it"
        )
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"dp rank {dp_rank}; must be 0 to {dp_size - 1}")
    count = global_batch // dp_size
    if micro_batch < 1 or count % micro_batch:
        raise ConfigError(
            f"train.micro_batch={micro_batch} does not divide the {number_of(count, 'sample')} "
            "a dp rank "
            f"has of train.global_batch={global_batch} at dp={dp_size}"
        )
    return dp_rank * count, count


def _flat(values: NDArray[Any], micro_batch: int) -> tuple[torch.Tensor, ...]:
    """[rows, n] as one flat tensor [micro_batch * n] for each microbatch."""
    whole = torch.from_numpy(np.ascontiguousarray(values))
    return whole.view(len(values) // micro_batch, -1).unbind()
