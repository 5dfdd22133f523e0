"""Microbatches of a run: a pure function of (sources, weights, seed, position).

Sample g of the run comes from the source, and is that source's sample number n, that the blend says
(blend.py); which of its samples that is, its own order says (sampler.py): each source goes through
epochs of its own, each epoch in another order, whatever the others do. Nothing depends on how long
the run is, which ranks there are, who asks, or in what order.

`once` is for evaluation: every sample of one source once, and the last batch filled up with
padding of loss weight 0, never with a sample. Which ranks exist is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.data.blend import Blend
from megalite.data.dataset import Span
from megalite.data.sampler import GOLDEN, MASK_64, SampleOrder, mix64
from megalite.data.windows import Places
from megalite.errors import ConfigError, DataError

PADDING = -1  # sample id of a place that holds no sample


@dataclass(frozen=True)
class MicroBatch:
    """Microbatch of b sequences, flattened: T = b * S positions."""

    tokens: torch.Tensor  # int64 [T]
    labels: torch.Tensor  # int64 [T]
    loss_weight: torch.Tensor  # float32 [T]: 1 counted, 0 masked
    cu_seqlens: torch.Tensor  # int32 [segments + 1]: 0, starts of segments, T
    sample_ids: NDArray[np.int64]  # [b], those of all sources in a row; PADDING for none


class Batches:
    """Microbatches of one span, or of several by `weights` (one each; of weight 0: none).

    Without `shuffle` each source's samples come in order. `vocab_size` None: ids are not checked
    again. Raises DataError for a span of positive weight without a sample.
    """

    def __init__(
        self,
        spans: Span | Sequence[Span],
        seq_length: int,
        seed: int,
        *,
        weights: Sequence[Fraction] = (Fraction(1),),
        shuffle: bool = True,
        once: bool = False,
        document_masks: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.spans = [spans] if isinstance(spans, Span) else list(spans)
        self.seq_length = seq_length
        self.document_masks = document_masks
        self.vocab_size = vocab_size
        self.blend = Blend(weights)
        self.orders: list[SampleOrder | None] = []
        for number, (span, weight) in enumerate(zip(self.spans, weights, strict=True)):
            if weight:
                span.require_samples(seq_length)
            samples = span.num_samples(seq_length)
            own = source_seed(seed, number)
            self.orders.append(SampleOrder(samples, own, shuffle) if weight else None)
        counts = [span.num_samples(seq_length) for span in self.spans]
        self._first_id = np.cumsum([0, *counts])
        self._end = sum(counts) if once else None
        assert not once or len(self.spans) == 1, "a pass is over one source"

    @property
    def num_samples(self) -> int:
        """Samples of all sources, once each."""
        return int(self._first_id[-1])

    def num_steps(self, global_batch: int) -> int:
        """Global batches that hold every sample once, the last one perhaps with padding."""
        return -(-self.num_samples // global_batch)

    def sample_ids(self, first_sample: int, count: int) -> NDArray[np.int64]:
        """Ids of the run's samples first_sample .. first_sample + count - 1, as in MicroBatch."""
        self._require_in_pass(first_sample)
        return self._ids(self._locate(first_sample, count))

    def rank_batches(
        self, first_sample: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int
    ) -> list[MicroBatch]:
        """A dp rank's microbatches of the step that starts at `first_sample`, in order.

        Sample j of the step belongs to dp rank j // (global_batch / dp_size).
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
        """Source and sample within it of some samples of the run; PADDING beyond the end."""
        source, number = self.blend.at(first, count)
        sample = np.empty(count, dtype=np.int64)
        for which, order in enumerate(self.orders):
            chosen = source == which if len(self.orders) > 1 else slice(None)
            mine = number[chosen]
            if order is not None and len(mine):
                sample[chosen] = order.at(int(mine[0]), len(mine))
        if self._end is not None:
            beyond = number >= self._end
            source, sample = np.where(beyond, PADDING, source), np.where(beyond, PADDING, sample)
        return Places(source, sample)

    def _assemble(self, places: Places, micro_batch: int) -> list[MicroBatch]:
        """Microbatches of the samples; all are views of three arrays made at once."""
        size, length = len(places.source), self.seq_length
        window = np.zeros((size, length + 1), dtype=np.int64)
        weight = np.ones((size, length), dtype=np.float32)
        for row, (source, sample) in enumerate(
            zip(places.source.tolist(), places.number.tolist(), strict=True)
        ):
            if sample == PADDING:
                weight[row] = 0.0
            else:
                window[row] = self.spans[source].read(sample * length, length + 1)
        self._check_ids(window, places)
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
        """cu_seqlens of each microbatch; with document masks also takes weight from `weight`."""
        length = self.seq_length
        plain = np.arange(micro_batch + 1, dtype=np.int64) * length
        if not self.document_masks:
            same = torch.from_numpy(plain.astype(np.int32))
            return [same] * (len(places.source) // micro_batch)
        starts: list[list[NDArray[np.int64]]] = []
        for row, (source, sample) in enumerate(
            zip(places.source.tolist(), places.number.tolist(), strict=True)
        ):
            if row % micro_batch == 0:
                starts.append([plain])
            if sample != PADDING:
                first = sample * length
                within = self.spans[source].boundaries(first, first + length) - first
                weight[row, within - 1] = 0.0
                starts[-1].append(within + row % micro_batch * length)
        return [
            torch.from_numpy(np.unique(np.concatenate(parts)).astype(np.int32)) for parts in starts
        ]

    def _ids(self, places: Places) -> NDArray[np.int64]:
        ids: NDArray[np.int64] = places.number + self._first_id[places.source]
        return ids if self._end is None else np.where(places.source < 0, PADDING, ids)

    def _check_ids(self, window: NDArray[np.int64], places: Places) -> None:
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
    """A seed for each source, so that sources of one size go in different orders."""
    return seed if number == 0 else mix64((seed + number * GOLDEN) & MASK_64)


def _rank_part(global_batch: int, micro_batch: int, dp_rank: int, dp_size: int) -> tuple[int, int]:
    """First place and number of the samples of a step that a dp rank has."""
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
            f"train.micro_batch={micro_batch} does not divide the {count} samples a dp rank "
            f"has of train.global_batch={global_batch} at dp={dp_size}"
        )
    return dp_rank * count, count


def _flat(values: NDArray[Any], micro_batch: int) -> tuple[torch.Tensor, ...]:
    """Rows by microbatches, each flattened."""
    whole = torch.from_numpy(np.ascontiguousarray(values))
    return whole.view(len(values) // micro_batch, -1).unbind()
