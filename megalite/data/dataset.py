"""An indexed dataset as the trainer sees it: spans of one token stream, cut into microbatches.

Accounting: a span of T tokens cut into sequences of S gives N = floor((T - 1) / S) samples. Sample
s reads tokens s*S .. s*S + S of the span, S inputs and their S labels, one token later; neighbours
share one token. Each token but the first is a label exactly once per epoch; what is left at the end
(fewer than S tokens) is not used. Samples pay no regard to documents, and nothing is ever padded.

With document masks, `cu_seqlens` also splits at each document's first token (a document's end token
belongs to the document it ends), and the label at an end token, which is the first token of the
next document, has loss weight 0: nothing in its document tells what it will be.

Which ranks exist is the caller's affair: a microbatch is a function of (step, global place).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.data.fingerprint import fingerprint_files
from megalite.data.indexed import IndexedDataset
from megalite.data.sampler import SampleOrder
from megalite.data.sidecar import Sidecar, read_sidecar
from megalite.data.vocab import VocabCheck, check_vocab
from megalite.errors import ConfigError, DataError

SPLIT_NAMES = ("train", "validation")


@dataclass(frozen=True)
class MicroBatch:
    """Microbatch of b sequences, flattened: T = b * S positions."""

    tokens: torch.Tensor  # int64 [T]
    labels: torch.Tensor  # int64 [T]
    loss_weight: torch.Tensor  # float32 [T]: 1 counted, 0 masked
    cu_seqlens: torch.Tensor  # int32 [segments + 1]: 0, starts of segments, T
    sample_ids: NDArray[np.int64]  # [b], for logs


class TokenDataset:
    """A dataset opened for training: text tokens with document boundaries."""

    def __init__(self, prefix: str | Path) -> None:
        self.indexed = IndexedDataset(prefix)
        self.sidecar: Sidecar | None = read_sidecar(self.indexed)
        if self.indexed.modes is not None:
            raise DataError(
                f"{self.indexed.idx_path}: holds modes, so it is multimodal; "
                "give a dataset of text tokens"
            )
        if self.indexed.dtype.kind not in "iu":
            raise DataError(
                f"{self.indexed.idx_path}: dtype: found {self.indexed.dtype.name}, "
                "wanted integers; token ids are not fractions"
            )

    @property
    def prefix(self) -> Path:
        return self.indexed.prefix

    @property
    def num_tokens(self) -> int:
        return self.indexed.num_tokens

    @property
    def num_documents(self) -> int:
        return self.indexed.num_documents

    def fingerprint(self) -> str:
        """Hex name of the content, see fingerprint.py; changes when data is replaced in place."""
        return fingerprint_files(self.indexed.bin_path, self.indexed.idx_path)

    def span(self, name: str = "all") -> Span:
        """The whole stream as one span."""
        return Span(self, name, 0, self.num_tokens)

    def split(self, shares: Sequence[float], seq_length: int) -> tuple[Span | None, Span | None]:
        """Train and validation spans, in this order of the stream, by shares of its tokens.

        Shares are relative: (0.98, 0.02) and (98, 2) are the same. A share of 0 gives None; any
        other share must give at least one sample, else DataError with the numbers.
        """
        train_stop = _first_part(self.num_tokens, shares)
        bounds = ((0, train_stop), (train_stop, self.num_tokens))
        spans = [
            Span(self, name, start, stop) if share > 0 else None
            for name, share, (start, stop) in zip(SPLIT_NAMES, shares, bounds, strict=True)
        ]
        for span in spans:
            if span is not None:
                span.require_samples(seq_length, shares)
        return spans[0], spans[1]

    def check_vocab(self, vocab_size: int) -> VocabCheck:
        """DataError for ids that a model of `vocab_size` entries lacks; says how it knows."""
        return check_vocab(self.indexed, self.sidecar, vocab_size)


def _first_part(num_tokens: int, shares: Sequence[float]) -> int:
    good = len(shares) == 2 and all(
        isinstance(share, (int, float)) and not isinstance(share, bool) and isfinite(share)
        for share in shares
    )
    if not good or min(shares) < 0 or sum(shares) <= 0:
        raise DataError(
            f"data.split={tuple(shares)}; must be two numbers of 0 or more (train, validation), "
            "not both 0, such as (0.98, 0.02)"
        )
    first, second = (Fraction(share) for share in shares)  # exact: no rounding at any size
    return int(num_tokens * first / (first + second))


@dataclass(frozen=True)
class Span:
    """Tokens start .. stop - 1 of a dataset's stream."""

    data: TokenDataset
    name: str
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    def num_samples(self, seq_length: int) -> int:
        """floor((T - 1) / S), and 0 for an empty span."""
        return max(0, (self.num_tokens - 1) // seq_length)

    def require_samples(self, seq_length: int, shares: Sequence[float] | None = None) -> None:
        """DataError, naming the span and the numbers, when it gives no sample."""
        if seq_length < 1:
            raise ConfigError(f"data.seq_length={seq_length}; must be 1 or more")
        if self.num_samples(seq_length) > 0:
            return
        by = f" by data.split={tuple(shares)}" if shares is not None else ""
        raise DataError(
            f"{self.data.prefix}: {self.name} gets {self.num_tokens} of {self.data.num_tokens} "
            f"tokens in {self.data.num_documents} documents{by}, which is no sample of "
            f"data.seq_length={seq_length} (it takes {seq_length + 1} tokens); "
            "use more data, a larger share, a shorter sequence, or a share of 0 for no such split"
        )

    def boundaries(self, first: int, last: int) -> NDArray[np.int64]:
        """Places in the span, first < place <= last, at which another document starts.

        O(log documents) reads of the index; empty documents give no place of their own.
        """
        indexed, stream_first = self.data.indexed, self.start + first
        numbers = range(indexed.num_documents)
        low = bisect_right(numbers, stream_first, key=indexed.document_start)
        high = bisect_right(numbers, self.start + last, lo=low, key=indexed.document_start)
        return np.unique(indexed.document_starts(low, high)) - self.start


class Batches:
    """Microbatches of a span, each a pure function of (span, seed, step, place in the step).

    Shuffled: any step, epoch after epoch; a validation pass keeps below `num_steps`. Not shuffled:
    samples in order, full global batches only, `num_steps` of them, and no step beyond. Steps count
    from 0.
    """

    def __init__(
        self,
        span: Span,
        seq_length: int,
        seed: int,
        *,
        shuffle: bool = True,
        document_masks: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        span.require_samples(seq_length)
        self.span = span
        self.seq_length = seq_length
        self.document_masks = document_masks
        self.vocab_size = vocab_size  # None: ids are not checked again
        self.order = SampleOrder(span.num_samples(seq_length), seed, shuffle)

    @property
    def num_samples(self) -> int:
        """Samples per epoch."""
        return self.order.num_samples

    def num_steps(self, global_batch: int) -> int:
        """Full global batches in one epoch; what a pass without shuffling may ask for."""
        return self.num_samples // global_batch

    def sample_ids(self, step: int, global_batch: int) -> NDArray[np.int64]:
        """Sample ids of a step in global order, [global_batch]."""
        self._check_step(step, global_batch)
        return self.order.sample_ids(step, global_batch)

    def valid_tokens(self, step: int, global_batch: int, dp_rank: int = 0, dp_size: int = 1) -> int:
        """Labels of a step that count (weight 1), of the whole batch or of one dp rank's part.

        Reads no tokens. Without document masks it is samples * seq_length.
        """
        first, count = _rank_part(global_batch, dp_rank, dp_size)
        self._check_step(step, global_batch)
        total = count * self.seq_length
        if not self.document_masks:
            return total
        ids = self.order.at(step * global_batch + first, count)
        return total - sum(len(self._boundaries(int(sample))) for sample in ids)

    def micro_batch(
        self,
        step: int,
        global_batch: int,
        micro_batch: int,
        dp_rank: int,
        dp_size: int,
        index: int,
    ) -> MicroBatch:
        """Microbatch `index` of a dp rank: `micro_batch` samples of the rank's part, in order.

        Sample j of the step belongs to dp rank j // (global_batch / dp_size).
        """
        first, count = _rank_part(global_batch, dp_rank, dp_size)
        if micro_batch < 1 or count % micro_batch:
            raise ConfigError(
                f"train.micro_batch={micro_batch} does not divide the {count} samples a dp rank "
                f"has of train.global_batch={global_batch} at dp={dp_size}"
            )
        if not 0 <= index < count // micro_batch:
            raise ConfigError(
                f"microbatch index {index}; a dp rank has {count // micro_batch} a step"
            )
        self._check_step(step, global_batch)
        place = step * global_batch + first + index * micro_batch
        return self._assemble(self.order.at(place, micro_batch))

    def _check_step(self, step: int, global_batch: int) -> None:
        steps = self.num_steps(global_batch)
        if step < 0 or (not self.order.shuffle and step >= steps):
            raise DataError(
                f"{self.span.data.prefix}: step {step} of {self.span.name}, whose "
                f"{self.num_samples} samples give {steps} full batches of {global_batch}; "
                "use fewer batches, a smaller batch or more data"
            )

    def _boundaries(self, sample: int) -> NDArray[np.int64]:
        """Starts of other documents within a sample, in 1 .. S relative to its first token."""
        first = sample * self.seq_length
        return self.span.boundaries(first, first + self.seq_length) - first

    def _assemble(self, sample_ids: NDArray[np.int64]) -> MicroBatch:
        size, length = len(sample_ids), self.seq_length
        stream = self.span.data.indexed.tokens
        window = np.empty((size, length + 1), dtype=np.int64)
        for row, sample in enumerate(sample_ids.tolist()):
            start = self.span.start + sample * length
            window[row] = stream[start : start + length + 1]
        self._check_ids(window, sample_ids)
        weight = np.ones((size, length), dtype=np.float32)
        starts = [np.arange(size + 1, dtype=np.int64) * length]
        if self.document_masks:
            for row, sample in enumerate(sample_ids.tolist()):
                boundaries = self._boundaries(sample)
                weight[row, boundaries - 1] = 0.0
                starts.append(boundaries + row * length)
        return MicroBatch(
            tokens=_flat(window[:, :-1]),
            labels=_flat(window[:, 1:]),
            loss_weight=_flat(weight),
            cu_seqlens=torch.from_numpy(np.unique(np.concatenate(starts)).astype(np.int32)),
            sample_ids=sample_ids,
        )

    def _check_ids(self, window: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> None:
        if self.vocab_size is None:
            return
        bad = np.flatnonzero((window < 0) | (window >= self.vocab_size))
        if bad.size:
            row, place = divmod(int(bad[0]), window.shape[1])
            raise DataError(
                f"{self.span.data.indexed.bin_path}: sample {int(sample_ids[row])} of "
                f"{self.span.name} holds token id {int(window[row, place])}; the model has "
                f"model.vocab_size={self.vocab_size}"
            )


def _rank_part(global_batch: int, dp_rank: int, dp_size: int) -> tuple[int, int]:
    """First place and number of the samples of a step that a dp rank has."""
    if global_batch < 1 or dp_size < 1 or global_batch % dp_size:
        raise ConfigError(
            f"train.global_batch={global_batch} is not divisible by dp={dp_size}; "
            "use a multiple of it"
        )
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"dp rank {dp_rank}; must be 0 to {dp_size - 1}")
    count = global_batch // dp_size
    return dp_rank * count, count


def _flat(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
