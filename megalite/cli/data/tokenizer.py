"""`megalite data tokenizer`: train a sentencepiece model; options and lines of `data prepare`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from megalite.cli.data.source import (
    Encoding,
    Key,
    MaxBytes,
    OnBad,
    Overwrite,
    Source,
    Suffix,
    left_out,
    open_source,
)
from megalite.cli.options import path
from megalite.wording import number_of

if TYPE_CHECKING:
    from megalite.corpus.tokenizer_training import TrainReport


class ModelTypeName(StrEnum):
    """Kinds of tokenizer."""

    unigram = "unigram"
    bpe = "bpe"


def tokenizer(
    source: Source,
    out: Annotated[
        str,
        typer.Option(
            metavar="FILE", parser=path, help="The model to write, such as data/tokenizer.model."
        ),
    ],
    vocab_size: Annotated[
        int, typer.Option(metavar="N", help="Entries, with 4 control ids and 256 bytes.")
    ],
    model_type: Annotated[
        ModelTypeName, typer.Option(metavar="bpe|unigram", help="Kind of tokenizer to train.")
    ] = ModelTypeName.bpe,
    key: Key = "text",
    on_bad: OnBad = None,
    max_bytes: MaxBytes = None,
    suffix: Suffix = None,
    encoding: Encoding = "utf-8",
    sample_bytes: Annotated[
        int | None,
        typer.Option(metavar="N", help="Train on an even sample of this many bytes of text."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a tokenizer without making a dataset.

    It gives any text back: rare characters become bytes, and no text becomes a control id.
    Datasets are prepared with it by `data prepare --tokenizer`.
    """
    from megalite.cli.interrupt import interruptible
    from megalite.cli.progress import ProgressBar
    from megalite.corpus.prepare_tokenizer import make_tokenizer
    from megalite.errors import EXIT_INTERRUPTED

    corpus = open_source(source, key, on_bad, max_bytes, suffix, encoding)

    # Nothing is kept of an interrupted training, so it is not continued.
    with interruptible("tokenizer", EXIT_INTERRUPTED), ProgressBar() as bar:
        report, found = make_tokenizer(
            corpus,
            out,
            vocab_size=vocab_size,
            model_type=model_type.value,
            sample_bytes=sample_bytes,
            overwrite=overwrite,
            on_progress=bar,
        )
    typer.echo(
        f"documents  {found.num_documents:,} ({number_of(found.text_bytes, 'byte', ',')} of text)"
    )
    for line in [*left_out(found), *training(report)]:
        typer.echo(line)
    typer.echo(f"wrote      {out} ({number_of(report.vocab_size, 'entry', ',')})")


def training(report: TrainReport) -> list[str]:
    """Lines about the text that a tokenizer was trained on."""
    share = report.sample_bytes / report.corpus_bytes
    return [
        f"           {report.model_type}, trained on {number_of(report.sample_bytes, 'byte', ',')} "
        f"({share:.1%} of the text)",
        f"           {number_of(report.num_lines_cut, 'long line', ',')} split "
        f"({report.cut_share:.2%} of bytes), "
        f"{report.skipped_share:.4%} of bytes skipped",
    ]
