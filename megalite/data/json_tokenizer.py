"""Tokenizers of the library `tokenizers`, from a tokenizer.json; an extra of the package.

Ids are the library's own with `add_special_tokens=False`. Special tokens in text are text
(`encode_special_tokens`), and a truncation or padding that the file asks for is left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.checks.packages import install_command
from megalite.data.tokenizer_files import CONFIG_NAME, TokenizerFiles, require_in_vocabulary
from megalite.errors import DataError
from megalite.wording import number_of

SPACE = "\u2581"  # of sentencepiece, in pieces
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte of a character that no piece has


class JsonTokenizer:
    """A tokenizer.json, see `Tokenizer`; DataError if the content is none."""

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files
        self._module = _import(files)
        self.library = f"tokenizers {self._module.__version__}"
        self._plain = self._load(special_as_text=True)
        self._ids: dict[str, int] = self._plain.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._ids.values(), default=-1) + 1
        self._require_all_tokens()

    @property
    def bos_id(self) -> int | None:
        return self._id_of("bos_token")

    @cached_property
    def prefix_ids(self) -> list[int]:
        bos, adds = self.bos_id, self.files.adds_bos
        if bos is None or adds is False:
            return []
        # The file's own post-processor decides where the config does not.
        begins = self._plain.encode("x", add_special_tokens=True).ids[:1] == [bos]
        return [bos] if adds or begins else []

    @property
    def pad_id(self) -> int | None:
        return self._id_of("pad_token")

    @cached_property
    def unk_id(self) -> int | None:
        own = getattr(self._plain.model, "unk_token", None)
        if own is not None:
            return self._ids.get(own)
        number = json.loads(self.files.content)["model"].get("unk_id")  # of unigram
        return number if isinstance(number, int) else None

    @cached_property
    def drops_unknown(self) -> bool:
        values = json.loads(self.files.content)
        return (
            self.unk_id is None
            and not values["model"].get("byte_fallback")
            and "ByteLevel"
            not in json.dumps([values.get("pre_tokenizer"), values.get("normalizer")])
        )

    @property
    def eos_id(self) -> int:
        found = self._id_of("eos_token")
        if found is None:
            raise DataError(
                f"tokenizer {self.files.path}: nothing names its end-of-document token; write it "
                f'into {CONFIG_NAME} beside the file: {{"eos_token": "TEXT OF THE TOKEN"}}'
            )
        return found

    @cached_property
    def special_texts(self) -> Mapping[str, int]:
        added = self._plain.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def num_bytes(self) -> NDArray[Any] | None:
        values = json.loads(self.files.content)
        decoder = json.dumps(values.get("decoder"))
        of_bytes, of_words = "ByteLevel" in decoder, SPACE in decoder or "Metaspace" in decoder
        if not (of_bytes or of_words):
            return None  # pieces of a wordpiece model leave spaces out
        added = self._plain.get_added_tokens_decoder()
        found = np.zeros(self.vocab_size, dtype=np.int64)
        for text, number in self._ids.items():
            if number in added:
                found[number] = 0 if added[number].special else len(text.encode())
            elif number != self.unk_id:
                is_byte = not of_bytes and _BYTE.fullmatch(text)
                plain = text if of_bytes else text.replace(SPACE, " ")
                # Byte-level pieces are written with one character for each byte.
                found[number] = 1 if is_byte else len(plain if of_bytes else plain.encode())
        return found

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in self.encode_batch([text])[0]]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        self._require_utf8(texts)
        found = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in found]

    def encode_special(self, text: str) -> tuple[NDArray[Any], NDArray[Any]]:
        self._require_utf8([text])
        found = self._with_special.encode(text, add_special_tokens=False)
        spans = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
        return np.array(found.ids, dtype=np.int32), spans

    def unknown_bytes(self, text: str, ids: NDArray[Any]) -> int:
        found, unknown = self._plain.encode(text, add_special_tokens=False), self.unk_id
        pairs = zip(found.ids, found.offsets, strict=True)
        lost = [span for number, span in pairs if number == unknown]
        if self.drops_unknown:  # characters, other than space, that no token stands for
            ends = [(0, 0), *found.offsets, (len(text), len(text))]
            lost += [(ends[n][1], ends[n + 1][0]) for n in range(len(ends) - 1)]
            return sum(len("".join(text[start:stop].split()).encode()) for start, stop in lost)
        return sum(len(text[start:stop].encode()) for start, stop in lost)

    def decode(self, ids: Sequence[int] | NDArray[Any], special: bool = False) -> str:
        plain = [int(number) for number in ids]
        require_in_vocabulary(self.files.path, plain, self.vocab_size)
        return str(self._plain.decode(plain, skip_special_tokens=not special))

    @cached_property
    def _with_special(self) -> Any:
        return self._load(special_as_text=False)

    def _load(self, special_as_text: bool) -> Any:
        try:
            loaded = self._module.Tokenizer.from_buffer(self.files.content)
        except Exception as error:  # the library raises no narrower class
            raise DataError(
                f"tokenizer {self.files.path}: not a tokenizer.json of the library "
                f"{self.library}: {error}"
            ) from error
        loaded.no_truncation()
        loaded.no_padding()
        loaded.encode_special_tokens = special_as_text
        return loaded

    def _id_of(self, role: str) -> int | None:
        """The id of the special token with a role; DataError if the vocabulary lacks it."""
        text = self.files.special_tokens.get(role)
        if text is not None and text not in self._ids:
            raise DataError(
                f"tokenizer {self.files.path}: its {role} {text!r} is not in its vocabulary; "
                f"correct {CONFIG_NAME}"
            )
        return None if text is None else self._ids[text]

    def _require_all_tokens(self) -> None:
        """DataError where the config adds tokens that tokenizer.json does not have."""
        listed = self.files.config.get("added_tokens_decoder") or {}
        lacking = [text for token in listed.values() if (text := token["content"]) not in self._ids]
        if lacking:
            raise DataError(
                f"tokenizer {self.files.path}: {CONFIG_NAME} adds "
                f"{number_of(len(lacking), 'token')} that "
                f"tokenizer.json lacks, {lacking[0]!r} for one; load and save the folder with "
                "transformers, which writes them there"
            )

    @staticmethod
    def _require_utf8(texts: Sequence[str]) -> None:
        try:
            for text in texts:
                text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            message = f"text holds a lone surrogate, which has no UTF-8 form: {error}"
            raise DataError(message) from error


def _import(files: TokenizerFiles) -> Any:
    # The library's own threads would take all CPUs in each worker, and must not be there at a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"tokenizer {files.path}: needs the package tokenizers, which is not installed: "
            f"{install_command('tokenizers')}"
        ) from error
    return tokenizers
