"""`megalite data`: make, inspect and join token datasets. Thin: options in, a summary out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from megalite.cli.data.inspect import inspect
from megalite.cli.data.merge import merge
from megalite.cli.data.source import (
    Encoding,
    Key,
    MaxBytes,
    OnBad,
    Out,
    Overwrite,
    Source,
    Suffix,
    left_out,
    open_chats,
    open_source,
    require_no_chat_options,
    unknown,
)
from megalite.cli.data.tokenizer import ModelTypeName, tokenizer, training
from megalite.cli.options import Group, Verb, path
from megalite.wording import number_of

if TYPE_CHECKING:
    from megalite.corpus.documents import Form
    from megalite.corpus.prepare import PrepareReport
    from megalite.data.sidecar import Sidecar

_OTHER_OPTIONS = "restarted  what an interrupted run with other options had done was dropped"

app = typer.Typer(
    cls=Group,
    help="Prepare, inspect and merge token datasets; train tokenizers.",
    no_args_is_help=True,
)


@app.command(cls=Verb)
def prepare(
    source: Source,
    out: Out,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            parser=path,
            help="Tokenizer to use: a sentencepiece model, a tokenizer.json, or a Hugging Face "
            "folder; --vocab-size trains one instead.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Train a tokenizer of this many entries, saved as PREFIX.model."
        ),
    ] = None,
    model_type: Annotated[
        ModelTypeName | None,
        typer.Option(metavar="bpe|unigram", help="Kind of tokenizer to train (default: bpe)."),
    ] = None,
    key: Key = "text",
    messages: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Key of conversations: a list of messages a record."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Key of a prompt, whose answer is at --response."),
    ] = None,
    response: Annotated[
        str | None, typer.Option(metavar="NAME", help="Key of the response to a --prompt.")
    ] = None,
    role_key: Annotated[
        str, typer.Option(metavar="NAME", help="Key of a message's role.")
    ] = "role",
    content_key: Annotated[
        str, typer.Option(metavar="NAME", help="Key of a message's text.")
    ] = "content",
    roles: Annotated[
        str,
        typer.Option(metavar="MAP", help="Other names of roles, such as human=user,gpt=assistant."),
    ] = "",
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            parser=path,
            help="Jinja template of conversations (default: the tokenizer's own).",
        ),
    ] = None,
    allow_special: Annotated[
        bool,
        typer.Option(
            "--allow-special", help="Text in messages may spell special tokens, and becomes them."
        ),
    ] = False,
    on_bad: OnBad = None,
    max_bytes: MaxBytes = None,
    suffix: Suffix = None,
    encoding: Encoding = "utf-8",
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Processes that encode (default: the CPUs); any N makes the same files.",
        ),
    ] = None,
    max_unknown: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Largest share of the text that may become unknown ids; 1: any."
        ),
    ] = 0.01,
    overwrite: Overwrite = False,
    go_on: Annotated[
        bool,
        typer.Option("--continue/--restart", help="Use or drop the work of an interrupted run."),
    ] = True,
) -> None:
    """Tokenise documents into PREFIX.bin and PREFIX.idx.

    Each document ends with the end-of-document id. Conversations (--messages, or --prompt and
    --response) are rendered by the chat template, and PREFIX.mask marks the assistant's turns, of
    which alone the loss counts. Interrupted, or stopped by a bad document, it
    keeps what is done in PREFIX.unfinished, and the same command continues from there. Exit codes:
    0 made, 2 refused or failed, 75 interrupted.
    """
    from megalite.cli.interrupt import interruptible
    from megalite.cli.progress import ProgressBar
    from megalite.corpus.prepare import prepare as run
    from megalite.corpus.publish import require_free
    from megalite.errors import EXIT_SAVED

    if not overwrite:
        require_free(out)

    if messages or prompt or response:
        names = (messages, prompt, response, role_key, content_key, roles)
        form: Form | str = open_chats(tokenizer, names, chat_template, allow_special, key)
    else:
        form = key
        require_no_chat_options(role_key, content_key, roles, chat_template, allow_special)
    corpus = open_source(source, form, on_bad, max_bytes, suffix, encoding)

    # The bar is inside: it must be gone before the message of an interruption is printed.
    with interruptible("dataset", EXIT_SAVED), ProgressBar() as bar:
        report = run(
            corpus,
            out,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            model_type=None if model_type is None else model_type.value,
            num_workers=workers,
            max_unknown=max_unknown,
            restart=not go_on,
            on_progress=bar,
        )
    for line in summary(report):
        typer.echo(line)


app.command(cls=Verb)(tokenizer)
app.command(cls=Verb)(inspect)
app.command(cls=Verb)(merge)


def trained(made: Sidecar) -> list[str]:
    """A line about the tokens to train on, if a loss mask marks them."""
    if made.loss_mask is None:
        return []
    mask, share = made.loss_mask, made.loss_mask.trained_tokens / max(made.num_tokens, 1)
    tags = "its generation tags" if mask.marked_by == "generation" else "what each turn adds"
    return [
        f"trained    {number_of(mask.trained_tokens, 'token', ',')} ({share:.1%}), found by {tags}",
        f"template   {mask.template}",
    ]


def summary(report: PrepareReport) -> list[str]:
    """Lines about the dataset that was made, the documents left out, and the time it took."""
    made, counts = report.sidecar, report.counts
    text_bytes = made.source.text_bytes
    rate = text_bytes / 1e6 / max(report.encode_s, 1e-9)
    lines = [
        f"source     {made.source.description}",
        f"documents  {made.num_documents:,} ({number_of(text_bytes, 'byte', ',')} of text)",
        *left_out(counts.corpus),
        f"tokenizer  {report.tokenizer} ({number_of(made.vocab_size, 'entry', ',')})",
    ]
    if report.training is not None:
        lines += training(report.training)
    lines += [
        f"tokens     {made.num_tokens:,} ({made.dtype}, "
        f"{text_bytes / made.num_tokens:.2f} bytes a token)",
        *trained(made),
        unknown(counts.unknown_ids, counts.unknown_bytes, text_bytes),
        f"round trip {counts.round_trips_exact} of the first {counts.round_trips} "
        "documents decode to their exact text",
        *([f"           {counts.first_change}"] if counts.first_change else []),
        f"seconds    {report.train_s:.1f} training, {report.encode_s:.1f} encoding "
        f"({rate:.2f} MB/s, {number_of(report.num_workers, 'worker')})",
    ]

    # A continuation, or its end by other options, is reported: the seconds are this process's.
    if report.started_over:
        lines.append(_OTHER_OPTIONS)
    if report.num_kept_documents:
        lines.append(
            f"continued  {number_of(report.num_kept_documents, 'document', ',')} kept of an "
            "interrupted run"
        )
    model = " .model" if report.training is not None else ""
    model += " .mask" if made.loss_mask is not None else ""
    lines.append(f"wrote      {report.prefix}.bin .idx .json{model}")
    return lines
