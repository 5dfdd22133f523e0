"""The sentencepiece tokenizer, loading and using it; corpus/tokenizer_training.py trains one.

Ids of bos, eos, pad and unk are added by code and never come from text: `</s>` in a document is
about four ordinary pieces. encode() is the library's own encoding of the whole document. For a
tokenizer that megalite trained, decode(encode(x)) is x for any text, except for one character:
U+2581, by which sentencepiece itself denotes a space, comes back as a space.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from numpy.typing import NDArray

from megalite.errors import DataError

SPACE = "\u2581"  # of the library, in pieces


class Tokenizer:
    """A sentencepiece model, opened from its file; DataError if that is none or cannot be read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.content = self.path.read_bytes()
        except OSError as error:
            raise DataError(f"tokenizer {path}: cannot be read: {error.strerror}") from error
        self._processor = _load(self.content, str(path))

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> Tokenizer:
        """A tokenizer by the content of its file; `name` is its path in messages."""
        tokenizer = cls.__new__(cls)
        tokenizer.path, tokenizer.content = Path(name), content
        tokenizer._processor = _load(content, name)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        return int(self._processor.get_piece_size())

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def bos_id(self) -> int | None:
        return _id_or_none(self._processor.bos_id())

    @property
    def pad_id(self) -> int | None:
        return _id_or_none(self._processor.pad_id())

    @property
    def unk_id(self) -> int | None:
        """The id of what the vocabulary lacks; never given by a model with byte fallback."""
        return _id_or_none(self._processor.unk_id())

    @property
    def eos_id(self) -> int:
        """The id that ends a document; DataError if the model has none, or has it as plain text."""
        found = _id_or_none(self._processor.eos_id())
        if found is None:
            raise DataError(
                f"tokenizer {self.path}: has no end-of-sentence id (eos), which ends each "
                "document; use a model that was trained with one, as a control piece"
            )
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of a whole text, without bos or eos."""
        return [int(number) for number in self.encode_batch([text])[0]]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Token ids of each text as int32 arrays, without bos or eos; texts of at most 2 GiB.

        Raises DataError for a text with a lone surrogate.
        """
        encode = self._processor.encode
        try:
            return [encode(text.encode(), out_type="numpy") for text in texts]
        except UnicodeEncodeError as error:
            message = f"text holds a lone surrogate, which has no UTF-8 form: {error}"
            raise DataError(message) from error

    def unknown_bytes(self, text: str, ids: NDArray[Any]) -> int:
        """UTF-8 bytes of a text, normalised, that its ids equal to `unk_id` stand for.

        One id stands for a whole run of unknown characters, so counts of ids say little.
        """
        pieces, unknown = self._processor.encode(text, out_type=str), self.unk_id
        lost = (piece for piece, number in zip(pieces, ids, strict=True) if number == unknown)
        return sum(len(piece.replace(SPACE, " ").encode()) for piece in lost)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of token ids; control ids give nothing, incomplete UTF-8 gives U+FFFD.

        Raises DataError for an id outside the vocabulary.
        """
        plain = [int(number) for number in ids]
        if plain and not 0 <= min(plain) <= max(plain) < self.vocab_size:
            bad = next(number for number in plain if not 0 <= number < self.vocab_size)
            raise DataError(
                f"tokenizer {self.path}: id {bad} is not in its vocabulary of "
                f"{self.vocab_size}; ids must be 0 to {self.vocab_size - 1}"
            )
        return str(self._processor.decode(plain))


def first_change(text: str, decoded: str) -> str:
    """The place where a text and what comes back of it first differ, in words."""
    pairs = enumerate(zip(text, decoded, strict=False))
    end = min(len(text), len(decoded))
    start = max(next((place for place, (one, other) in pairs if one != other), end) - 8, 0)
    return f"{text[start : start + 24]!r} comes back as {decoded[start : start + 24]!r}"


def library_version() -> str:
    """The version of sentencepiece: another one may give other ids."""
    return str(sentencepiece.__version__)


def _load(content: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        loaded = bool(content) and processor.LoadFromSerializedProto(content)
    except RuntimeError:
        loaded = False
    if not loaded or processor.get_piece_size() < 1:
        raise DataError(
            f"tokenizer {name}: not a sentencepiece model ({len(content)} bytes); "
            "give the .model file that sentencepiece or `megalite data prepare` wrote"
        )
    return processor


def _id_or_none(number: int) -> int | None:
    """An id of the library, which gives a negative one for a control piece that is missing."""
    return number if number >= 0 else None
