"""The files of a tokenizer, read from one of them or from a Hugging Face folder; its kind, identity
and special tokens. Loads no tokenizer library: a run compares identities without one.

`tokenizer.json` is a tokenizer of the library `tokenizers`, any other content a sentencepiece
model. Files beside it (`tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`)
name the special tokens and the chat template; a file that is missing gives none of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from megalite.errors import DataError

Kind = Literal["sentencepiece", "tokenizers"]
JSON_NAME, MODEL_NAME = "tokenizer.json", "tokenizer.model"
CONFIG_NAME, MAP_NAME = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE_NAME = "chat_template.jinja"
BESIDE = (CONFIG_NAME, MAP_NAME, TEMPLATE_NAME)


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of a tokenizer's files, by the names that they have in a Hugging Face folder.

    `path` is the file or folder that was named. Raises DataError for JSON files that are none.
    """

    path: Path
    contents: Mapping[str, bytes] = field(repr=False)

    @property
    def kind(self) -> Kind:
        """The library that the tokenizer is of."""
        return "tokenizers" if JSON_NAME in self.contents else "sentencepiece"

    @property
    def content(self) -> bytes:
        """The content of the tokenizer itself: tokenizer.json, or the sentencepiece model."""
        return self.contents[JSON_NAME if self.kind == "tokenizers" else MODEL_NAME]

    @cached_property
    def sha256(self) -> str:
        """Hash of all that decides about ids: the file, and of a folder the special tokens."""
        digest = hashlib.sha256(self.content)
        if self.kind == "tokenizers":
            digest.update(json.dumps([self.special_tokens, self.adds_bos], sort_keys=True).encode())
        return digest.hexdigest()

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The text of each special token that has a role, such as eos_token; the config first."""
        found: dict[str, str] = {}
        for settings in (self.config, self._json(MAP_NAME)):
            for role, value in settings.items():
                text = value.get("content") if isinstance(value, dict) else value
                if role.endswith("_token") and isinstance(text, str):
                    found.setdefault(role, text)
        return found

    @property
    def adds_bos(self) -> bool | None:
        """True if a text begins with bos, as the config says; None: the config does not."""
        value = self.config.get("add_bos_token")
        return value if isinstance(value, bool) else None

    @property
    def chat_template(self) -> str | None:
        """The template of chats: chat_template.jinja, or the default one of the config."""
        if TEMPLATE_NAME in self.contents:
            return self.contents[TEMPLATE_NAME].decode(errors="replace")
        value = self.config.get("chat_template")
        if isinstance(value, list):  # several templates, each with a name
            value = {entry["name"]: entry["template"] for entry in value}.get("default")
        return value if isinstance(value, str) else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The values of tokenizer_config.json; {} without one."""
        return self._json(CONFIG_NAME)

    def _json(self, name: str) -> dict[str, Any]:
        if name not in self.contents:
            return {}
        try:
            values = json.loads(self.contents[name])
        except ValueError as error:
            raise DataError(f"tokenizer {self.path}: {name} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise DataError(f"tokenizer {self.path}: {name}: wanted a JSON object")
        return values


def read_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """The files of the tokenizer at `path`: a file of either kind, or a folder with one.

    Raises DataError if there is none, or it cannot be read.
    """
    path = Path(path)
    file = _file_in(path) if path.is_dir() else path
    content = _read(file, path)
    beside = [file.with_name(name) for name in BESIDE]
    contents = {name.name: _read(name, path) for name in beside if name.is_file()}
    return _files(path, content, contents)


def model_files(content: bytes, name: str) -> TokenizerFiles:
    """The files of a tokenizer that is one file with this content; `name`: its path in messages."""
    return _files(Path(name), content, {})


def require_in_vocabulary(path: Path, ids: list[int], vocab_size: int) -> None:
    """Raise DataError for an id outside the vocabulary of the tokenizer at `path`."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        bad = next(number for number in ids if not 0 <= number < vocab_size)
        raise DataError(
            f"tokenizer {path}: id {bad} is not in its vocabulary of "
            f"{vocab_size}; ids must be 0 to {vocab_size - 1}"
        )


def _files(path: Path, content: bytes, beside: dict[str, bytes]) -> TokenizerFiles:
    # A sentencepiece model is a protocol buffer: not a brace and then a quote.
    name = JSON_NAME if re.match(rb'\s*\{\s*"', content) else MODEL_NAME
    return TokenizerFiles(path, {name: content, **beside})


def _file_in(folder: Path) -> Path:
    for name in (JSON_NAME, MODEL_NAME):
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"tokenizer {folder}: the folder holds neither {JSON_NAME} nor {MODEL_NAME}; "
        "where transformers loads it, its save_pretrained writes the first"
    )


def _read(file: Path, path: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {path}: cannot be read: {error.strerror}") from error
