"""Chat templates: messages written as text by jinja2, in its sandbox, as transformers writes them.

A template sees `messages`, `tools`, `add_generation_prompt` and the names of special tokens, such
as `eos_token`. It has the functions that the field's templates call: `raise_exception`, the filter
`tojson` that escapes nothing, `break` and `continue` in loops, and `{% generation %}` around what a
model is trained to write.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megalite.data.tokenizer import Tokenizer
from megalite.data.tokenizer_files import CONFIG_NAME, TEMPLATE_NAME, TokenizerFiles
from megalite.errors import DataError

Message = Mapping[str, Any]
Spans = tuple[tuple[int, int], ...]
# Two characters that Unicode gives to no text, around what generation tags enclose.
BEGIN, END = "\ufdd0", "\ufdd1"
_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# What rendering may raise: jinja's errors, and Python's for what a template does with a message.
_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class ChatTemplate:
    """A template, its name in messages, and the special tokens that it knows by name."""

    source: str
    name: str
    tokens: Mapping[str, str]

    @classmethod
    def of(cls, tokenizer: Tokenizer, file: Path | None = None) -> ChatTemplate:
        """A tokenizer's own template, or that of `file`: a template, or a tokenizer_config.json.

        Special tokens have the names that the file gives them, else the tokenizer's. Raises
        DataError where there is no template, or what cannot be read as one.
        """
        files = tokenizer.files
        name = str(files.path) if file is None else f"--chat-template={file}"
        tokens = dict(files.special_tokens)
        texts = {number: text for text, number in tokenizer.special_texts.items()}
        for role, number in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
            if number in texts:
                tokens.setdefault(role, texts[number])
        if file is not None:
            try:
                content = file.read_bytes()
            except OSError as error:
                raise DataError(f"{name} cannot be read: {error.strerror}") from None
            kind = CONFIG_NAME if file.suffix == ".json" else TEMPLATE_NAME
            files = TokenizerFiles(file, {kind: content})
            tokens |= files.special_tokens
        if files.chat_template is None:
            raise DataError(
                f"{name}: has no chat template ({TEMPLATE_NAME}, or chat_template in "
                f"{CONFIG_NAME}); give one with --chat-template FILE"
            )
        try:
            _compiled(files.chat_template)
        except jinja2.TemplateError as error:
            raise DataError(f"{name}: no template of jinja2: {error}") from None
        return cls(files.chat_template, name, tokens)

    @property
    def has_tags(self) -> bool:
        """True if generation tags mark what is trained on."""
        return bool(_TAG.search(self.source))

    @property
    def sha256(self) -> str:
        """Hash of the template."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def render(self, messages: Sequence[Message], tools: Any = None, ask: bool = False) -> str:
        """The text of a chat, with BEGIN and END where tags stand; DataError if it refuses.

        ask: up to where the next answer begins. A date that it asks for is not there: what is
        rendered does not depend on the day.
        """
        return self._render(messages=messages, tools=tools, add_generation_prompt=ask)

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text of a chat of today up to where the answer begins; DataError if it refuses."""
        seen = {"messages": messages, "tools": None, "strftime_now": _now}
        return unmarked(self._render(**seen, add_generation_prompt=True))[0]

    def _render(self, **seen: Any) -> str:
        try:
            return _compiled(self.source).render(documents=None, **{**self.tokens, **seen})
        except _ERRORS as error:
            raise DataError(f"{self.name}: {error}") from None


def unmarked(text: str) -> tuple[str, Spans]:
    """The text without BEGIN and END, and the characters that stood between them."""
    parts, spans, place = [], [], 0
    for number, part in enumerate(re.split(f"[{BEGIN}{END}]", text)):
        if number % 2:
            spans.append((place, place + len(part)))
        parts.append(part)
        place += len(part)
    return "".join(parts), tuple(spans)


class _GenerationTag(Extension):
    """`{% generation %}`: what it encloses comes out between BEGIN and END."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


@lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
