"""Prompts of chats: messages written as text by a chat template, in jinja2's sandbox.

A template sees `messages`, `add_generation_prompt` (true) and the names of special tokens, such as
`eos_token`. It has the functions that the field's templates call: `raise_exception`,
`strftime_now`, the filter `tojson` that escapes nothing, and `break` and `continue` in loops.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megalite.data.tokenizer import Tokenizer
from megalite.data.tokenizer_files import CONFIG_NAME, TEMPLATE_NAME, TokenizerFiles
from megalite.errors import DataError

Message = Mapping[str, Any]


class ChatTemplate:
    """A tokenizer's own template, or that of `file`: a template, or a tokenizer_config.json.

    Special tokens have the names that the file gives them, else the tokenizer's. Raises DataError
    where there is no template, or what cannot be read as one.
    """

    def __init__(self, tokenizer: Tokenizer, file: Path | None = None) -> None:
        files = tokenizer.files
        self._name = str(files.path) if file is None else f"--chat-template={file}"
        self._tokens = dict(files.special_tokens)
        texts = {number: text for text, number in tokenizer.special_texts.items()}
        for role, number in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
            if number in texts:
                self._tokens.setdefault(role, texts[number])
        if file is not None:
            try:
                content = file.read_bytes()
            except OSError as error:
                raise DataError(f"{self._name} cannot be read: {error.strerror}") from None
            kind = CONFIG_NAME if file.suffix == ".json" else TEMPLATE_NAME
            files = TokenizerFiles(file, {kind: content})
            self._tokens |= files.special_tokens
        if files.chat_template is None:
            raise DataError(
                f"{self._name}: has no chat template ({TEMPLATE_NAME}, or chat_template in "
                f"{CONFIG_NAME}); give one with --chat-template FILE"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(files.chat_template)
        except TemplateError as error:
            raise DataError(f"{self._name}: no template of jinja2: {error}") from None

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a chat up to where the answer begins; DataError if the template refuses."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._tokens
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"{self._name}: {error}") from None


class _Generation(Extension):
    """The block `generation`, by which templates mark answers for training: its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
