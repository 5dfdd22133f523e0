"""An indexed dataset for training: spans of its token stream, cut into samples.

A span of T tokens cut into sequences of S gives N = floor((T - 1) / S) samples. Sample
s reads tokens s*S .. s*S + S of the span, S inputs and their S labels, one token later; neighbours
share one token. Each token but the first is a label exactly once per epoch; what is left at the end
(fewer than S tokens) is not used. Samples pay no regard to documents, and nothing is ever padded. A
`Packing` of whole documents (samples.py) cuts at their edges instead.

With document masks, `cu_seqlens` also splits at each document's first token (a document's end token
belongs to the document it ends), and the label at an end token, which is the first token of the
next document, has loss weight 0: nothing in the document predicts it.

The order of samples is decided in batches.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.shares import SPLIT_NAMES, parse_split, share_bounds
from megalite.data.fingerprint import Identity, fingerprint_files
from megalite.data.indexed import IndexedDataset
from megalite.data.samples import DocumentSamples, Packing, Samples, StreamSamples
from megalite.data.sidecar import Sidecar, read_sidecar, require_fingerprint
from megalite.data.vocab import VocabCheck, check_vocab
from megalite.errors import ConfigError, DataError
from megalite.wording import number_of

MASK_BLOCK = 1 << 20  # tokens of a loss mask read at a time


class TokenDataset:
    """A dataset opened for training: text tokens with document boundaries.

    Raises DataError for a dataset with modes (multimodal), with ids that are not integers, or with
    files that are not those that its sidecar describes.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.indexed = IndexedDataset(prefix)
        self.sidecar: Sidecar | None = read_sidecar(self.indexed)
        self.fingerprint = fingerprint_files(*self.indexed.files)
        if self.sidecar is not None:
            require_fingerprint(self.sidecar, self.indexed, self.fingerprint)
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

    def identity(self) -> Identity:
        """The fingerprint, and size and time of the token file: to notice data changed in place."""
        seen = self.indexed.bin_path.stat()
        return Identity(str(self.prefix), self.fingerprint, seen.st_size, seen.st_mtime_ns)

    def span(self, name: str = "all") -> TokenSpan:
        """The whole stream as one span."""
        return TokenSpan(self, name, 0, self.num_tokens)

    def split(
        self, shares: object, packing: Packing | int, at_documents: bool = False
    ) -> dict[str, TokenSpan]:
        """Spans of train, validation and test, in this order of the stream, by relative shares.

        `shares` has the forms of shares.parse_split. A share of 0 gives no span. With
        `at_documents`, and for a packing of whole documents, each cut is moved to the next start of
        a document. Raises DataError if any other gives no sample, with the numbers.
        """
        try:
            parts = parse_split(shares)
        except ValueError as error:
            raise DataError(f"data.split={shares!r} {error}") from None
        packing = Packing.of(packing)
        ends = share_bounds(self.num_tokens, parts)
        if at_documents or packing.whole_documents:
            ends = [0, *map(self._next_document, ends[1:-1]), self.num_tokens]
        spans = {
            name: TokenSpan(self, name, start, stop)
            for name, share, (start, stop) in zip(SPLIT_NAMES, parts, pairwise(ends), strict=False)
            if share > 0
        }
        for span in spans.values():
            span.require_samples(packing, parts)
        return spans

    def _next_document(self, position: int) -> int:
        """The first start of a document at or after a position; the end of the stream if none."""
        numbers = range(self.num_documents + 1)
        number = bisect_left(numbers, position, key=self.indexed.document_start)
        return self.indexed.document_start(min(number, self.num_documents))

    def check_vocab(self, vocab_size: int) -> VocabCheck:
        """Raise DataError for ids that a model of `vocab_size` entries lacks; see vocab.py."""
        return check_vocab(self.indexed, self.sidecar, vocab_size)


@dataclass(frozen=True)
class TokenSpan:
    """Tokens start .. stop - 1 of a dataset's stream."""

    data: TokenDataset
    name: str
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    def samples(self, packing: Packing | int) -> Samples:
        """The samples of the span; an int is the sequence length of samples of the stream."""
        packing = Packing.of(packing)
        if not packing.whole_documents:
            return StreamSamples(self.num_tokens, packing.seq_length)
        indexed = self.data.indexed
        numbers = range(indexed.num_documents)
        first = bisect_left(numbers, self.start, key=indexed.document_start)
        stop = bisect_left(numbers, self.stop, lo=first, key=indexed.document_start)
        starts = indexed.document_starts(first, stop)
        return DocumentSamples(np.append(starts, self.stop) - self.start, packing)

    def num_samples(self, packing: Packing | int) -> int:
        """Number of samples: floor((T - 1) / S) of the stream, and 0 for an empty span."""
        return self.samples(packing).num_samples

    def require_samples(
        self, packing: Packing | int, shares: Sequence[float] | None = None
    ) -> Samples:
        """The samples; DataError, with the span's name and the numbers, if there is none.

        Raises ConfigError for a sequence length below 1. `shares`: those that cut the span, if any.
        """
        packing = Packing.of(packing)
        seq_length = packing.seq_length
        if seq_length < 1:
            raise ConfigError(f"data.seq_length={seq_length}; must be 1 or more")
        samples = self.samples(packing)
        if samples.num_samples > 0:
            return samples
        by = f" by data.split={tuple(shares)}" if shares is not None else ""
        raise DataError(
            f"{self.data.prefix}: {self.name} gets {self.num_tokens} of {self.data.num_tokens} "
            f"tokens in {number_of(self.data.num_documents, 'document')}{by}, which is no sample "
            f"of data.seq_length={seq_length} (it takes "
            f"{number_of(packing.least_tokens, 'token')}); "
            "use more data, a larger share, a shorter sequence, or a share of 0 for no such split"
        )

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Tokens first .. first + count - 1 of the span, a copy in the file's dtype."""
        start = self.start + first
        return self.data.indexed.read(start, start + count)

    def loss_mask(self, first: int, count: int) -> NDArray[np.uint8] | None:
        """1 for each of these tokens that is trained on, else 0; None if all tokens are."""
        mask = self.data.indexed.loss_mask
        start = self.start + first
        return None if mask is None else mask.read(start, start + count)

    def require_trained(self) -> None:
        """Raise DataError if a loss mask leaves no token of the span to take a loss of."""
        mask = self.data.indexed.loss_mask
        blocks = range(self.start, self.stop, MASK_BLOCK)
        if mask is not None and not any(
            mask.read(start, min(start + MASK_BLOCK, self.stop)).any() for start in blocks
        ):
            raise DataError(
                f"{mask.path}: {self.name}: of its {number_of(self.num_tokens, 'token')} none "
                "is trained on, so "
                "there is no loss to evaluate; use a larger share, or other data"
            )

    def boundaries(self, first: int, last: int) -> NDArray[np.int64]:
        """Positions in the span, first < position <= last, at which a document starts.

        O(log documents) reads of the index. Empty documents add no position of their own.
        """
        indexed, stream_first = self.data.indexed, self.start + first
        numbers = range(indexed.num_documents)
        low = bisect_right(numbers, stream_first, key=indexed.document_start)
        high = bisect_right(numbers, self.start + last, lo=low, key=indexed.document_start)
        return np.unique(indexed.document_starts(low, high)) - self.start
