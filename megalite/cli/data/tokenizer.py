"""`megalite data tokenizer`: train a sentencepiece model; options and lines of `data prepare`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from megalite.cli.options import path

if TYPE_CHECKING:
    from megalite.corpus.documents import CorpusReport
    from megalite.corpus.tokenizer_training import TrainReport


class PolicyName(StrEnum):
    """Policies for bad documents."""

    fail = "fail"
    skip = "skip"


class ModelTypeName(StrEnum):
    """Kinds of tokenizer."""

    unigram = "unigram"
    bpe = "bpe"


def tokenizer(
    source: Annotated[
        str,
        typer.Argument(
            parser=path,
            help="Folder of text, JSONL or parquet files, one such file, or the word builtin.",
        ),
    ],
    out: Annotated[
        str, typer.Option(parser=path, help="The file to write, such as data/tokenizer.model.")
    ],
    vocab_size: Annotated[int, typer.Option(help="Entries, with 4 control ids and 256 bytes.")],
    model_type: Annotated[
        ModelTypeName, typer.Option(help="Kind of tokenizer.")
    ] = ModelTypeName.bpe,
    key: Annotated[str, typer.Option(help="JSONL key or column that holds the text.")] = "text",
    on_bad: Annotated[
        PolicyName | None,
        typer.Option(
            help="Bad documents: fail at the first (default), or skip and count them "
            "(default for builtin)."
        ),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(help="Stop after this many bytes of text.")
    ] = None,
    suffix: Annotated[
        list[str] | None, typer.Option(help="Which files of a folder; may be repeated.")
    ] = None,
    sample_bytes: Annotated[
        int | None, typer.Option(help="Train on an even sample of so much text.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file of this name.")
    ] = False,
) -> None:
    """Train a tokenizer that gives any text back: bytes for rare characters, no control ids from
    text. Other datasets can then be prepared with the same one (prepare --tokenizer)."""
    from megalite.cli.progress import ProgressBar
    from megalite.corpus.prepare_tokenizer import make_tokenizer

    # Not `interruptible`: nothing is kept of an interrupted training, so it is not continued.
    with ProgressBar() as bar:
        report, found = make_tokenizer(
            source,
            out,
            vocab_size=vocab_size,
            model_type=model_type.value,
            key=key,
            policy=None if on_bad is None else on_bad.value,
            max_bytes=max_bytes,
            suffixes=suffix,
            sample_bytes=sample_bytes,
            overwrite=overwrite,
            on_progress=bar,
        )
    typer.echo(f"documents  {found.num_documents:,} ({found.text_bytes:,} bytes of text)")
    for line in [*left_out(found), *training(report)]:
        typer.echo(line)
    typer.echo(f"wrote      {out} ({report.vocab_size:,} entries)")


def left_out(corpus: CorpusReport) -> list[str]:
    """Lines about documents that were skipped, and about oddities that were noticed."""
    lines = []
    if corpus.skipped:
        counts = ", ".join(f"{fault}: {count:,}" for fault, count in sorted(corpus.skipped.items()))
        lines.append(f"skipped    {corpus.skipped.total():,} documents ({counts})")
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


def training(report: TrainReport) -> list[str]:
    """Lines about the text that a tokenizer was trained on."""
    share = report.sample_bytes / report.corpus_bytes
    return [
        f"           {report.model_type}, trained on {report.sample_bytes:,} bytes "
        f"({share:.1%} of the text)",
        f"           {report.num_lines_cut:,} long lines split ({report.cut_share:.2%} of bytes), "
        f"{report.skipped_share:.4%} of bytes skipped",
    ]
