"""Sentencepiece tokenizers; corpus/tokenizer_training.py trains one.

encode() is the library's own encoding of the whole document. For a tokenizer that megalite trained,
decode(encode(x)) is x for any text, except for one character: U+2581, by which sentencepiece itself
denotes a space, comes back as a space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from megalite.data.tokenizer_files import TokenizerFiles, require_in_vocabulary
from megalite.errors import DataError
from megalite.wording import number_of

SPACE = "\u2581"  # of the library, in pieces


def library_version() -> str:
    """The version of sentencepiece: another one may give other ids."""
    return str(sentencepiece.__version__)


class SentencePieceTokenizer:
    """A sentencepiece model, see `Tokenizer`; DataError if the content is none."""

    drops_unknown = False  # it gives the unknown id, or bytes

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files
        self.library = f"sentencepiece {library_version()}"
        self._processor = _load(files)
        self._require_all_tokens()

    @property
    def vocab_size(self) -> int:
        return int(self._processor.get_piece_size())

    @property
    def bos_id(self) -> int | None:
        return _id_or_none(self._processor.bos_id())

    @property
    def prefix_ids(self) -> list[int]:
        bos = self.bos_id
        return [bos] if self.files.adds_bos and bos is not None else []

    @property
    def pad_id(self) -> int | None:
        return _id_or_none(self._processor.pad_id())

    @property
    def unk_id(self) -> int | None:
        return _id_or_none(self._processor.unk_id())

    @property
    def eos_id(self) -> int:
        found = _id_or_none(self._processor.eos_id())
        if found is None:
            raise DataError(
                f"tokenizer {self.files.path}: has no end-of-sentence id (eos), which ends each "
                "document; use a model that was trained with one, as a control piece"
            )
        return found

    @cached_property
    def special_texts(self) -> Mapping[str, int]:
        model = self._processor
        return {
            model.id_to_piece(number): number
            for number in range(self.vocab_size)
            if model.is_control(number)
        }

    @cached_property
    def num_bytes(self) -> NDArray[Any] | None:
        model, found = self._processor, np.zeros(self.vocab_size, dtype=np.int64)
        for number in range(self.vocab_size):
            if model.is_byte(number):
                found[number] = 1
            elif not (model.is_control(number) or model.is_unknown(number)):
                found[number] = len(model.id_to_piece(number).replace(SPACE, " ").encode())
        return found

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in self.encode_batch([text])[0]]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        encode = self._processor.encode
        try:
            return [encode(text.encode(), out_type="numpy") for text in texts]
        except UnicodeEncodeError as error:
            message = f"text holds a lone surrogate, which has no UTF-8 form: {error}"
            raise DataError(message) from error

    def encode_special(self, text: str) -> tuple[NDArray[Any], NDArray[Any]]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        pattern = "|".join(map(re.escape, sorted(self.special_texts, key=len, reverse=True)))
        start = 0
        # With a group, `split` gives text and special token by turns.
        for index, part in enumerate(re.split(f"({pattern or '(?!)'})", text)):
            if index % 2:
                ids.append(self.special_texts[part])
                spans.append((start, start + len(part)))
            elif part:
                found: Any = self._processor.encode(part, out_type="offset_mapping")
                ids += found["ids"]
                spans += _whole_characters(found["offsets"], start)
            start += len(part)
        return np.array(ids, dtype=np.int32), np.array(spans, dtype=np.int64).reshape(-1, 2)

    def unknown_bytes(self, text: str, ids: NDArray[Any]) -> int:
        pieces, unknown = self._processor.encode(text, out_type=str), self.unk_id
        lost = (piece for piece, number in zip(pieces, ids, strict=True) if number == unknown)
        return sum(len(piece.replace(SPACE, " ").encode()) for piece in lost)

    def decode(self, ids: Sequence[int] | NDArray[Any], special: bool = False) -> str:
        plain = [int(number) for number in ids]
        require_in_vocabulary(self.files.path, plain, self.vocab_size)
        if not special:
            return str(self._processor.decode(plain))
        texts, run = [], []
        names = {number: name for name, number in self.special_texts.items()}
        for number in [*plain, None]:
            if number is not None and number not in names:
                run.append(number)
                continue
            texts.append(str(self._processor.decode(run)) if run else "")
            texts.append("" if number is None else names[number])
            run = []
        return "".join(texts)

    def _require_all_tokens(self) -> None:
        """DataError where the config of a folder adds tokens that the model does not have."""
        added = self.files.config.get("added_tokens_decoder")
        beyond = [int(number) for number in added or () if int(number) >= self.vocab_size]
        if beyond:
            raise DataError(
                f"tokenizer {self.files.path}: its tokenizer_config.json adds "
                f"{number_of(len(beyond), 'token')} "
                f"(ids {min(beyond)} to {max(beyond)}) to the {self.vocab_size} of the "
                "sentencepiece model; use its tokenizer.json, which the save_pretrained of "
                "transformers writes"
            )


def _whole_characters(spans: list[tuple[int, int]], start: int) -> list[tuple[int, int]]:
    """Spans moved by `start`; the library gives the last byte of a character all of it.

    Here each byte of a character gets it.
    """
    moved: list[tuple[int, int]] = []
    stop = 0
    for first, end in reversed(spans):
        stop = end if end > first else max(stop, end)
        moved.append((start + first, start + stop))
    return moved[::-1]


def _load(files: TokenizerFiles) -> sentencepiece.SentencePieceProcessor:
    content = files.content
    processor = sentencepiece.SentencePieceProcessor()
    try:
        loaded = bool(content) and processor.LoadFromSerializedProto(content)
    except RuntimeError:
        loaded = False
    if not loaded or processor.get_piece_size() < 1:
        raise DataError(
            f"tokenizer {files.path}: not a sentencepiece model "
            f"({number_of(len(content), 'byte')}); give the "
            ".model file that sentencepiece or `megalite data prepare` wrote, a tokenizer.json, "
            "or a folder with either"
        )
    return processor


def _id_or_none(number: int) -> int | None:
    """An id of the library, which gives a negative one for a control piece that is missing."""
    return number if number >= 0 else None
