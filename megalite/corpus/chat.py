"""Conversations as documents: rendered by a chat template, with the characters to train on.

A record holds a list of messages, or a prompt and a response, which a `ChatTemplate` renders.
Trained are the turns of the assistant, with the token that ends a turn: what stands between
generation tags where the template has them, else the difference between the conversation up to a
turn and with it. A template that renders a turn in another way once others follow is refused, as is
text that spells a special token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megalite.corpus.documents import Content, Fault, check_record, check_text, missing_key
from megalite.data.chat_template import BEGIN, END, ChatTemplate, Spans, unmarked
from megalite.errors import DataError

ASSISTANT = "assistant"
TOOLS = "tools"  # the key of a record that templates know


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
    """Records as conversations, see the top; `special_texts`: those of the tokenizer.

    Text may not spell them, unless `allow_special`.
    """

    keys: ChatKeys
    template: ChatTemplate
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
        return "generation" if self.template.has_tags else "prefixes"

    def describe(self) -> Any:
        """JSON values that differ if the same record may give another document."""
        keys = {**vars(self.keys), "roles": dict(self.keys.roles)}
        return [keys, self.template.sha256, dict(self.template.tokens), self.allow_special]

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
            text, spans = unmarked(self.template.render(messages, tools))
            if not self.template.has_tags:
                spans, fault = self._prefix_spans(messages, tools, text)
        except DataError as error:
            return Content("", None, Fault("template", detail=f"{error}"[:200]))
        if fault is None:
            text, fault = check_text(text)
        if fault is None and not any(stop > start for start, stop in spans):
            fault = Fault("no assistant turn", detail="the template marks none")
        return Content("", None, fault) if fault is not None else Content(text, spans, None)

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
            before = self.template.render(messages[:number], tools, ask=True)
            after = self.template.render(messages[: number + 1], tools)
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
