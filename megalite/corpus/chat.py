"""Conversations as documents: rendered by a chat template, with the characters to train on.

A record holds a list of messages, or a prompt and a response. The template is rendered as
transformers renders it, in jinja2's sandbox. Trained are the turns of the assistant, with the token
that ends a turn: what stands between `{% generation %}` and `{% endgeneration %}` where the
template has these tags, else the difference between the conversation up to a turn and with it. A
template that renders a turn in another way once others follow is refused, as is text that spells a
special token. `strftime_now` is not defined: a dataset does not depend on the day.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megalite.corpus.documents import Content, Fault, Spans, check_record, check_text, missing_key
from megalite.data.tokenizer import Tokenizer
from megalite.errors import DataError

ASSISTANT = "assistant"
TOOLS = "tools"  # the key of a record that templates know
# Two characters of Unicode that are none, around trained text while it is rendered.
BEGIN, END = "\ufdd0", "\ufdd1"
TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# What a template may raise: its own errors, and Python's for what it does with a message.
ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError)


@dataclass(frozen=True)
class ChatKeys:
    """The keys of a record that hold a conversation, and of a message; `roles` renames roles.

    Give `messages`, or `prompt` and `response`.
    """

    messages: str | None = None
    prompt: str | None = None
    response: str | None = None
    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pair = (self.prompt, self.response)
        if (self.messages is None) == (pair == (None, None)) or (None in pair and any(pair)):
            raise DataError(
                f"messages={self.messages}, prompt={self.prompt}, response={self.response}; a "
                "conversation has --messages NAME, or --prompt NAME and --response NAME"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys that a record must have."""
        keys = (self.messages, self.prompt, self.response)
        return tuple(key for key in keys if key is not None)

    def conversation(self, record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Fault | None]:
        """The messages of a record, with the keys `role` and `content`."""
        if lacking := [key for key in self.columns if key not in record]:
            return [], missing_key(lacking[0])
        if self.messages is None:
            texts = [record[key] for key in self.columns]
            pairs = zip(("user", ASSISTANT), texts, strict=True)
            values: Any = [{self.role: role, self.content: text} for role, text in pairs]
        else:
            values = _listed(record[self.messages])
        if not isinstance(values, list) or not values:
            return [], Fault("not a conversation", detail=f"{self.columns[0]!r} is no list of some")
        messages = []
        for number, value in enumerate(values):
            if not isinstance(value, dict):
                return [], Fault("not a conversation", detail=f"message {number} is no object")
            role, content = value.get(self.role), value.get(self.content)
            if not isinstance(role, str) or not isinstance(content, str | None):
                detail = f"message {number} has {self.role}={role!r} and as {self.content} "
                detail += type(content).__name__
                return [], Fault("not a conversation", detail=detail)
            kept = {k: v for k, v in value.items() if k not in (self.role, self.content)}
            messages.append({"role": self.roles.get(role, role), "content": content, **kept})
        if not any(message["role"] == ASSISTANT for message in messages):
            roles = ", ".join(sorted({message["role"] for message in messages}))
            return [], Fault("no assistant turn", detail=f"its roles are {roles}")
        return messages, None


@dataclass(frozen=True)
class ChatForm:
    """Records as conversations, see the top; `special_texts`: those that text may not spell.

    `named`: the special tokens that a template knows by name, such as eos_token.
    """

    keys: ChatKeys
    template: str
    template_name: str
    named: Mapping[str, str]
    special_texts: tuple[str, ...]
    allow_special: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys that a record must have."""
        return self.keys.columns

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """The keys that a record may have."""
        return (TOOLS,)

    @property
    def marked_by(self) -> Literal["generation", "prefixes"]:
        """The way in which trained text is found."""
        return "generation" if TAG.search(self.template) else "prefixes"

    @property
    def template_sha256(self) -> str:
        """Hash of the template."""
        return hashlib.sha256(self.template.encode()).hexdigest()

    def describe(self) -> Any:
        """JSON values that differ if the same record may give another document."""
        keys = {**vars(self.keys), "roles": dict(self.keys.roles)}
        return [keys, self.template_sha256, dict(self.named), self.allow_special]

    def of_bytes(self, content: bytes) -> Content:
        """The document of a record in JSON."""
        return check_record(content, self)

    def of_record(self, record: Mapping[str, Any]) -> Content:
        """The rendered text of a record and the characters to train on, or its fault."""
        messages, fault = self.keys.conversation(record)
        if fault is not None:
            return Content("", None, fault)
        tools = record.get(TOOLS) or None
        if not self.allow_special and (spelled := self._spelled([messages, tools])):
            return Content("", None, Fault("special token", detail=f"it holds {spelled!r}"))
        try:
            marked = self._render(messages, tools)
            if self.marked_by == "generation":
                text, spans = _marked_spans(marked)
                fault = None
            else:
                text = marked
                spans, fault = self._prefix_spans(messages, tools, text)
        except (*ERRORS, TypeError, ValueError) as error:
            return Content("", None, Fault("template", detail=f"{error}"[:200]))
        if fault is None:
            text, fault = check_text(text)
        if fault is None and not any(stop > start for start, stop in spans):
            fault = Fault("no assistant turn", detail="the template marks none")
        return Content("", None, fault) if fault is not None else Content(text, spans, None)

    def _render(self, messages: list[dict[str, Any]], tools: Any, ask: bool = False) -> str:
        return _compiled(self.template).render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=ask, **self.named
        )

    def _spelled(self, value: Any) -> str:
        """The first special token, or mark of this module, that a string of the value holds."""
        for text in _strings(value):
            for special in (*self.special_texts, BEGIN, END):
                if special in text:
                    return special
        return ""

    def _prefix_spans(
        self, messages: list[dict[str, Any]], tools: Any, text: str
    ) -> tuple[Spans, Fault | None]:
        """The trained characters, by what each turn of the assistant adds."""
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[:number], tools, ask=True)
            after = self._render(messages[: number + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                detail = f"turn {number} is rendered in another way where others follow"
                return (), Fault("prefixes differ", detail=detail)
            spans.append((len(before), self._turn_end(text, len(before), len(after))))
        return tuple(spans), None

    def _turn_end(self, text: str, start: int, stop: int) -> int:
        """The end of a turn: that of its last special token, if only white space follows."""
        turn = text[start:stop]
        ends = [turn.rfind(token) + len(token) for token in self.special_texts if token in turn]
        end = max(ends, default=len(turn))
        return start + (len(turn) if turn[end:].strip() else end)


def chat_form(
    tokenizer: Tokenizer, keys: ChatKeys, template: str | None = None, allow_special: bool = False
) -> ChatForm:
    """The form of conversations for a tokenizer, by its own template or the file `template`.

    Raises DataError if there is none, or it is not a template.
    """
    path = tokenizer.files.path
    if template is None:
        source, name = tokenizer.files.chat_template, str(path)
        if source is None:
            raise DataError(
                f"tokenizer {path}: has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give one with --chat-template FILE"
            )
    else:
        name = template
        try:
            source = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"chat template {template}: cannot be read: {error}") from error
    try:
        _compiled(source)
    except jinja2.TemplateError as error:
        raise DataError(f"chat template of {name}: not a jinja template: {error}") from error

    texts = {number: text for text, number in tokenizer.special_texts.items()}
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    known = {role: texts[number] for role, number in ids.items() if number in texts}
    named = {**known, **tokenizer.files.special_tokens}
    return ChatForm(keys, source, name, named, tuple(tokenizer.special_texts), allow_special)


class _GenerationTag(Extension):
    """`{% generation %}`: what it encloses comes out between BEGIN and END."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

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
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt: unlike jinja's own filter it escapes nothing of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _marked_spans(marked: str) -> tuple[str, Spans]:
    """The text without its marks, and the characters that stood between them."""
    parts, spans, place = [], [], 0
    for number, part in enumerate(re.split(f"[{BEGIN}{END}]", marked)):
        if number % 2:
            spans.append((place, place + len(part)))
        parts.append(part)
        place += len(part)
    return "".join(parts), tuple(spans)


def _strings(value: Any) -> Iterator[str]:
    """All strings in a value of JSON, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _listed(value: Any) -> Any:
    """A list of messages; tables may keep it as an object of lists."""
    if not isinstance(value, dict) or not all(isinstance(v, list) for v in value.values()):
        return value
    rows = zip(*value.values(), strict=False)
    return [dict(zip(value, row, strict=True)) for row in rows]
