"""Options that several verbs of `megalite data` take, and lines about their source."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalite.cli.options import path
from megalite.wording import number_of

if TYPE_CHECKING:
    from megalite.corpus.chat import ChatForm
    from megalite.corpus.corpus import Corpus
    from megalite.corpus.documents import CorpusReport, Form


class PolicyName(StrEnum):
    """Policies for bad documents."""

    fail = "fail"
    skip = "skip"


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        parser=path,
        help="Folder of text, JSONL, parquet or Arrow files, one such file (.jsonl, .jsonl.gz, "
        ".jsonl.zst, .parquet, .arrow, .txt, ...), or the word builtin: this Python's standard "
        "library.",
    ),
]
Out = Annotated[
    str,
    typer.Option(
        metavar="PREFIX", parser=path, help="The dataset to make: PREFIX.bin, .idx and .json."
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace existing files of this name.")
]
Key = Annotated[
    str, typer.Option(metavar="NAME", help="JSONL key or table column that holds the text.")
]
OnBad = Annotated[
    PolicyName | None,
    typer.Option(
        metavar="fail|skip",
        help="Bad documents: fail at the first (default), or skip and count them "
        "(default for builtin).",
    ),
]
MaxBytes = Annotated[
    int | None, typer.Option(metavar="N", help="Stop after this many bytes of text.")
]
Suffix = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SUFFIX",
        help="Files of a folder to read, such as .txt; may be repeated (default: JSONL and "
        "parquet, or text where there are none).",
    ),
]
Encoding = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Encoding of text and JSONL, such as cp1252, latin-1, utf-16."
    ),
]


def open_source(
    source: str,
    key: str | Form,
    on_bad: PolicyName | None,
    max_bytes: int | None,
    suffix: list[str] | None,
    encoding: str,
) -> Corpus:
    """The corpus of these options; prints which files of a folder are taken and left out."""
    from megalite.corpus.corpus import open_corpus

    corpus = open_corpus(
        source,
        key=key,
        policy=None if on_bad is None else on_bad.value,
        max_bytes=max_bytes,
        suffixes=suffix,
        encoding=encoding,
    )
    if corpus.selection:
        typer.echo(f"files      {corpus.selection}")
    return corpus


def open_chats(
    tokenizer: str | None,
    names: tuple[str | None, str | None, str | None, str, str, str],
    chat_template: str | None,
    allow_special: bool,
    key: str,
) -> ChatForm:
    """The form of conversations of these options; `names` are those of ChatKeys, in its order."""
    from megalite.corpus.chat import ChatForm, ChatKeys
    from megalite.data.chat_template import ChatTemplate
    from megalite.data.tokenizer import open_tokenizer
    from megalite.errors import DataError

    messages, prompt, response, role, content, roles = names
    pairs = [(old, new) for old, _, new in (e.partition("=") for e in roles.split(",") if e)]
    if not all(old and new for old, new in pairs):
        raise DataError(f"--roles {roles}: write human=user,gpt=assistant")
    if tokenizer is None:
        raise DataError(
            "conversations need the special tokens of a tokenizer that exists; give --tokenizer"
        )
    if key != "text":
        raise DataError(f"--key {key} is of texts; conversations have --messages, or --prompt")
    made = ChatKeys(messages, prompt, response, role, content, dict(pairs))
    opened = open_tokenizer(tokenizer)
    template = ChatTemplate.of(opened, None if chat_template is None else Path(chat_template))
    return ChatForm(made, template, tuple(opened.special_texts), allow_special)


def require_no_chat_options(
    role_key: str, content_key: str, roles: str, chat_template: str | None, allow_special: bool
) -> None:
    """Raise DataError for an option of conversations where there are none."""
    from megalite.errors import DataError

    given = (role_key, content_key, roles, chat_template, allow_special)
    if given != ("role", "content", "", None, False):
        raise DataError(
            "--role-key, --content-key, --roles, --chat-template and --allow-special are of "
            "conversations; give --messages NAME, or --prompt NAME and --response NAME"
        )


def unknown(num_ids: int, num_bytes: int, text_bytes: int) -> str:
    """A line about the text that became unknown ids."""
    share = num_bytes / text_bytes if text_bytes else 0.0
    return (
        f"unknown    {number_of(num_ids, 'id', ',')} for {number_of(num_bytes, 'byte', ',')} of "
        f"text ({share:.2%})"
    )


def left_out(corpus: CorpusReport) -> list[str]:
    """Lines about documents that were skipped, and about oddities that were noticed."""
    lines = []
    if corpus.skipped:
        counts = ", ".join(f"{fault}: {count:,}" for fault, count in sorted(corpus.skipped.items()))
        lines.append(f"skipped    {number_of(corpus.skipped.total(), 'document', ',')} ({counts})")
        lines += [f"           {place}" for place in corpus.places]
        if (more := corpus.skipped.total() - len(corpus.places)) > 0:
            lines.append(f"           and {more:,} more")
    for name, count in sorted(corpus.noticed.items()):
        lines.append(f"noticed    {name}: {count:,} (first at {corpus.noticed_first[name]})")
    if corpus.reached_max_bytes:
        lines.append(
            "           stopped at --max-bytes, which cut the last document; the source holds more"
        )
    return lines
