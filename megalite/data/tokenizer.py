"""A tokenizer of either kind: what all of them offer, and opening one.

Ids of special tokens (bos, eos, pad, unk and those that chats are marked with) are added by code
and never come from text: `</s>` in a document is about four ordinary pieces. Only `encode_special`
makes them of text, which is for text that a chat template wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from megalite.data.tokenizer_files import TokenizerFiles, read_tokenizer_files


class Tokenizer(Protocol):
    """A loaded tokenizer; `sentencepiece_tokenizer.py` and `json_tokenizer.py` have the kinds."""

    @property
    def files(self) -> TokenizerFiles:
        """The files it was loaded from; its `path` is in messages, its `sha256` names it."""

    @property
    def library(self) -> str:
        """Name and version of its library: another one may give other ids."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, if there is one; see `prefix_ids` for whether it does."""

    @property
    def prefix_ids(self) -> list[int]:
        """The ids before each document: bos where the tokenizer's own settings add it, else []."""

    @property
    def pad_id(self) -> int | None:
        """The id of padding, if there is one."""

    @property
    def unk_id(self) -> int | None:
        """The id of what the vocabulary lacks; a tokenizer of bytes never gives it."""

    @property
    def drops_unknown(self) -> bool:
        """True if characters that the vocabulary lacks may give no id at all."""

    @property
    def eos_id(self) -> int:
        """The id that ends a document; DataError if there is none."""

    @property
    def special_texts(self) -> Mapping[str, int]:
        """The texts that `encode_special` makes special tokens of, and their ids."""

    @property
    def num_bytes(self) -> NDArray[Any] | None:
        """UTF-8 bytes of text that each id stands for, int64 [vocab_size]; None: not known.

        0 for special tokens and the unknown one. A space that encoding adds before a text counts.
        """

    def encode(self, text: str) -> list[int]:
        """Token ids of a whole text, without bos or eos; none is a special token's."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Token ids of each text as int32 arrays, as `encode` gives them; of at most 2 GiB each.

        Raises DataError for a text with a lone surrogate.
        """

    def encode_special(self, text: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Token ids [n] int32 of a text, special tokens too, and their characters [n, 2] int64.

        Token t stands for the characters from [t, 0] up to [t, 1] of the text.
        """

    def unknown_bytes(self, text: str, ids: NDArray[Any]) -> int:
        """UTF-8 bytes of a text that its ids do not hold: they are unknown, or dropped.

        One id may stand for a whole run of unknown characters, so counts of ids say little.
        """

    def decode(self, ids: Sequence[int] | NDArray[Any], special: bool = False) -> str:
        """The text of token ids; special tokens give nothing, or their text with `special`.

        Incomplete UTF-8 gives U+FFFD. Raises DataError for an id outside the vocabulary.
        """


def open_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer at a path, a file or a folder; DataError if it is none or cannot be read."""
    return tokenizer_of(read_tokenizer_files(path))


def tokenizer_of(files: TokenizerFiles) -> Tokenizer:
    """The tokenizer of these files. The library of its kind is imported here, and no other."""
    if files.kind == "tokenizers":
        from megalite.data.json_tokenizer import JsonTokenizer

        return JsonTokenizer(files)
    from megalite.data.sentencepiece_tokenizer import SentencePieceTokenizer

    return SentencePieceTokenizer(files)


def first_change(text: str, decoded: str) -> str:
    """The place where a text and what comes back of it first differ, in words."""
    pairs = enumerate(zip(text, decoded, strict=False))
    end = min(len(text), len(decoded))
    start = max(next((place for place, (one, other) in pairs if one != other), end) - 8, 0)
    return f"{text[start : start + 24]!r} comes back as {decoded[start : start + 24]!r}"
