"""Encoding one chunk of documents to token ids: the work of a worker.

Each document is encoded whole, behind bos where the tokenizer adds it, and ended with one eos id.
A conversation is encoded with the special tokens that its template wrote, and nothing is added.
The result is a function of the chunk, the tokenizer, form and policy alone, so any number of
workers gives the same files. The result includes counts of the documents left out; under policy
fail the first bad document is its `failure`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.corpus.corpus import Policy, accepted_documents
from megalite.corpus.documents import CorpusChunk, CorpusReport, Form
from megalite.data.chat_template import Spans
from megalite.data.indexed import dtype_for_vocab
from megalite.data.tokenizer import Tokenizer, first_change
from megalite.errors import DataError

MAX_ROUND_TRIPS = 64  # documents of a chunk that are decoded again and compared, if asked


@dataclass
class Counts:
    """Sums over documents that were encoded."""

    corpus: CorpusReport = field(default_factory=CorpusReport)
    num_tokens: int = 0
    max_id: int = -1
    trained_tokens: int = 0  # of conversations
    unknown_ids: int = 0
    unknown_bytes: int = 0  # of text, that the unknown ids stand for
    round_trips: int = 0  # documents that were decoded and compared
    round_trips_exact: int = 0
    first_change: str = ""  # of the first document that does not come back, in words

    def add(self, later: Counts) -> None:
        """Add the counts of the documents that follow."""
        self.corpus.add(later.corpus)
        self.max_id = max(self.max_id, later.max_id)
        self.num_tokens += later.num_tokens
        self.trained_tokens += later.trained_tokens
        self.unknown_ids += later.unknown_ids
        self.unknown_bytes += later.unknown_bytes
        self.round_trips += later.round_trips
        self.round_trips_exact += later.round_trips_exact
        self.first_change = self.first_change or later.first_change


@dataclass
class Entry:
    """The result for one chunk without its ids: a line of the record of an unfinished run."""

    digest: str  # of the chunk
    counts: Counts = field(default_factory=Counts)

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON values, which share mutable objects with it."""
        counts = {**vars(self.counts), "corpus": vars(self.counts.corpus)}
        return {**vars(self), "counts": counts}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Entry:
        """The entry of `to_json` values; KeyError or TypeError if they are others."""
        counts = values["counts"]
        corpus = counts["corpus"]
        for name in ("skipped", "noticed"):
            corpus[name] = Counter(corpus[name])
        counts["corpus"] = CorpusReport(**corpus)
        return cls(**{**values, "counts": Counts(**counts)})


@dataclass
class Encoded:
    """A chunk's documents as in the dataset's files: ids [tokens], lengths [documents] int32.

    `mask`: a byte a token, of conversations. `failure`: the error message under policy fail; there
    are no ids then.
    """

    entry: Entry
    ids: bytes
    lengths: bytes
    mask: bytes = b""
    failure: str = ""


class Encoder:
    """Encodes chunks with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, form: Form, policy: Policy) -> None:
        self.tokenizer = tokenizer
        self.form = form
        self.policy = policy
        self.dtype = dtype_for_vocab(tokenizer.vocab_size)
        self._end_id = tokenizer.eos_id
        self._prefix = tokenizer.prefix_ids

    def encode(
        self, chunk: CorpusChunk, check_round_trips: bool = False, max_bytes: int | None = None
    ) -> Encoded:
        """Encode a chunk's good documents; with `max_bytes`, its first bytes of text only.

        With `check_round_trips` up to MAX_ROUND_TRIPS of them are decoded and compared.
        """
        entry = Entry(chunk.digest())
        counts = entry.counts
        try:
            options = (self.form, self.policy, max_bytes)
            documents = list(accepted_documents(chunk, counts.corpus, *options))
        except DataError as error:
            return Encoded(entry, b"", b"", failure=str(error))

        # The documents of a form are all conversations, or none is.
        texts = [document.text for document in documents]
        marked = [document.trained for document in documents if document.trained is not None]
        if marked:
            return self._encode_marked(entry, texts, marked, check_round_trips)
        rows = self.tokenizer.encode_batch(texts)
        self._check_round_trips(counts, rows, texts, check_round_trips)

        # Each document takes more places than its ids: those of the prefix and of the end id.
        more = len(self._prefix) + 1
        lengths = np.fromiter((len(row) + more for row in rows), dtype="<i4", count=len(rows))
        ids = self._joined(rows, int(lengths.sum(dtype=np.int64)))
        self._count(counts, ids)
        self._count_unknown(counts, ids, rows, texts)
        return Encoded(entry, ids.astype(self.dtype).tobytes(), lengths.tobytes())

    def _encode_marked(
        self, entry: Entry, texts: list[str], marked: list[Spans], check_round_trips: bool
    ) -> Encoded:
        """Conversations: a token is trained on if one of its characters is."""
        counts, unknown = entry.counts, self.tokenizer.unk_id
        rows, masks = [], []
        for text, spans in zip(texts, marked, strict=True):
            row, places = self.tokenizer.encode_special(text)
            mask = np.zeros(len(row), dtype=np.uint8)
            for start, stop in spans:
                mask[(places[:, 0] < stop) & (places[:, 1] > start)] = 1
            for start, stop in places[row == unknown].tolist():
                counts.unknown_bytes += len(text[start:stop].encode())
            rows.append(row)
            masks.append(mask)
        self._check_round_trips(counts, rows, texts, check_round_trips, special=True)

        lengths = np.fromiter(map(len, rows), dtype="<i4", count=len(rows))
        ids, mask = np.concatenate(rows), np.concatenate(masks)
        self._count(counts, ids)
        counts.unknown_ids = int(np.count_nonzero(ids == unknown))
        counts.trained_tokens = int(mask.sum())
        content = ids.astype(self.dtype).tobytes()
        return Encoded(entry, content, lengths.tobytes(), mask.tobytes())

    def _check_round_trips(
        self,
        counts: Counts,
        rows: list[NDArray[Any]],
        texts: list[str],
        asked: bool,
        special: bool = False,
    ) -> None:
        """Decode the first documents, if that is asked for, and compare."""
        if asked:
            for row, text in zip(rows[:MAX_ROUND_TRIPS], texts, strict=False):
                decoded = self.tokenizer.decode(row, special)
                counts.round_trips += 1
                if decoded == text:
                    counts.round_trips_exact += 1
                elif not counts.first_change:
                    counts.first_change = first_change(text, decoded)

    def _count(self, counts: Counts, ids: NDArray[Any]) -> None:
        counts.num_tokens = len(ids)
        counts.max_id = int(ids.max()) if len(ids) else -1

    def _count_unknown(
        self, counts: Counts, ids: NDArray[Any], rows: list[NDArray[Any]], texts: list[str]
    ) -> None:
        """Count unknown ids, and the text that they stand for, into `counts`."""
        unknown, drops = self.tokenizer.unk_id, self.tokenizer.drops_unknown
        counts.unknown_ids = int(np.count_nonzero(ids == unknown))
        if counts.unknown_ids or drops:
            for row, text in zip(rows, texts, strict=True):
                if drops or (row == unknown).any():
                    counts.unknown_bytes += self.tokenizer.unknown_bytes(text, row)

    def _joined(self, rows: list[NDArray[Any]], num_tokens: int) -> NDArray[Any]:
        """All documents one after another, each between the prefix and the end id."""
        ids = np.full(num_tokens, self._end_id, dtype=np.int32)
        start = 0
        for row in rows:
            ids[start : start + len(self._prefix)] = self._prefix
            start += len(self._prefix)
            ids[start : start + len(row)] = row
            start += len(row) + 1  # the end id is there already
        return ids
