"""Encoding one chunk of documents to token ids: the work of a worker.

Each document is encoded whole and ended with one eos id. The result is a function of the chunk, the
tokenizer and the options alone, so any number of workers gives the same files. The result includes
counts of the documents left out; under policy fail the first bad document is its `failure`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megalite.corpus.corpus import Policy, accepted_texts
from megalite.corpus.documents import CorpusChunk, CorpusReport
from megalite.data.indexed import dtype_for_vocab
from megalite.data.tokenizer import Tokenizer, first_change
from megalite.errors import DataError

MAX_ROUND_TRIPS = 64  # documents of a chunk that are decoded again and compared, if asked
_SIZES = struct.Struct("<QQ")


@dataclass(frozen=True)
class EncodeOptions:
    """The key of the text in a record, and the policy for bad documents."""

    key: str
    policy: Policy


@dataclass
class Entry:
    """The result for one chunk without its ids: a line of the record of an unfinished run."""

    digest: str  # of the chunk
    num_tokens: int = 0
    max_id: int = -1
    unknown_ids: int = 0
    unknown_bytes: int = 0  # of text, that the unknown ids stand for
    checksum: int = 0  # CRC-32 of lengths and ids as bytes
    round_trips: int = 0
    round_trips_exact: int = 0
    first_change: str = ""  # of the first document that does not come back, in words
    report: CorpusReport = field(default_factory=CorpusReport)

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON values, which share mutable objects with it."""
        return {**vars(self), "report": vars(self.report)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Entry:
        """The entry of `to_json` values; KeyError or TypeError if they are others."""
        report = dict(values["report"])
        for name in ("skipped", "noticed"):
            report[name] = Counter(report[name])
        return cls(**{**values, "report": CorpusReport(**report)})


@dataclass
class Encoded:
    """A chunk's documents as in the dataset's files: ids [tokens], lengths [documents] int32.

    `failure`: the error message under policy fail; there are no ids then.
    """

    entry: Entry
    ids: bytes
    lengths: bytes
    failure: str = ""


class Encoder:
    """Encodes chunks with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.dtype = dtype_for_vocab(tokenizer.vocab_size)
        self._end_id = tokenizer.eos_id

    def encode(
        self, chunk: CorpusChunk, check_round_trips: bool = False, max_bytes: int | None = None
    ) -> Encoded:
        """Encode a chunk's good documents; with `max_bytes`, its first bytes of text only.

        With `check_round_trips` up to MAX_ROUND_TRIPS of them are decoded and compared.
        """
        entry = Entry(chunk.digest())
        report, options = entry.report, self.options
        try:
            texts = list(accepted_texts(chunk, report, options.key, options.policy, max_bytes))
        except DataError as error:
            return Encoded(entry, b"", b"", str(error))

        rows = self.tokenizer.encode_batch(texts)
        if check_round_trips:
            for row, text in zip(rows[:MAX_ROUND_TRIPS], texts, strict=False):
                decoded = self.tokenizer.decode(row)
                entry.round_trips += 1
                if decoded == text:
                    entry.round_trips_exact += 1
                elif not entry.first_change:
                    entry.first_change = first_change(text, decoded)

        # The checksum lets a later run trust the ids in the folder of an unfinished one.
        lengths = np.fromiter((len(row) + 1 for row in rows), dtype="<i4", count=len(rows))
        ids = self._joined(rows, int(lengths.sum(dtype=np.int64)))
        entry.num_tokens = len(ids)
        entry.max_id = int(ids.max()) if len(ids) else -1
        self._count_unknown(entry, ids, rows, texts)
        encoded = Encoded(entry, ids.astype(self.dtype).tobytes(), lengths.tobytes())
        entry.checksum = checksum(encoded.lengths, encoded.ids)
        return encoded

    def _count_unknown(
        self, entry: Entry, ids: NDArray[Any], rows: list[NDArray[Any]], texts: list[str]
    ) -> None:
        """Count unknown ids, and the text that they stand for, into `entry`."""
        unknown = self.tokenizer.unk_id
        entry.unknown_ids = int(np.count_nonzero(ids == unknown))
        if entry.unknown_ids:
            for row, text in zip(rows, texts, strict=True):
                if (row == unknown).any():
                    entry.unknown_bytes += self.tokenizer.unknown_bytes(text, row)

    def _joined(self, rows: list[NDArray[Any]], num_tokens: int) -> NDArray[Any]:
        """All documents one after another, each with the end id behind it."""
        ids = np.full(num_tokens, self._end_id, dtype=np.int32)
        start = 0
        for row in rows:
            ids[start : start + len(row)] = row
            start += len(row) + 1  # the end id is there already
        return ids


def checksum(lengths: bytes, ids: bytes) -> int:
    """CRC-32 of lengths and ids, one after the other."""
    return zlib.crc32(ids, zlib.crc32(lengths))


def write_message(stream: IO[bytes], header: dict[str, Any], payload: bytes) -> None:
    """Write one message: the sizes of both parts (uint64), a JSON header, the payload."""
    head = json.dumps(header).encode()
    stream.write(_SIZES.pack(len(head), len(payload)) + head)
    stream.write(payload)
    stream.flush()


def read_message(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """Read the next message; None at the end of the stream, also if it ends within a message."""
    sizes = stream.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        return None
    head_bytes, payload_bytes = _SIZES.unpack(sizes)
    head, payload = stream.read(head_bytes), stream.read(payload_bytes)
    if len(head) < head_bytes or len(payload) < payload_bytes:
        return None
    return json.loads(head), payload
