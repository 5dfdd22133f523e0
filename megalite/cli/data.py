"""`megalite data`: make token datasets. Thin: options in, a progress bar, a summary out."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megalite.data.prepare import PrepareReport

app = typer.Typer(help="Make token datasets.", no_args_is_help=True)


class PolicyName(StrEnum):
    fail = "fail"
    skip = "skip"


class ModelTypeName(StrEnum):
    unigram = "unigram"
    bpe = "bpe"


@app.callback()
def data() -> None:
    """Make token datasets from text."""  # keeps `prepare` a verb while it is the only one


@app.command()
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder of text or JSONL files, one such file (.jsonl, .jsonl.gz, .txt, ...), "
            "or the word builtin: this Python's standard library."
        ),
    ],
    out: Annotated[str, typer.Option(help="PREFIX of the .bin, .idx and .json files.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Sentencepiece model to use; or train one: --vocab-size.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Train a tokenizer of this size, saved as PREFIX.model.")
    ] = None,
    model_type: Annotated[
        ModelTypeName | None, typer.Option(help="Kind of tokenizer to train (default: bpe).")
    ] = None,
    key: Annotated[str, typer.Option(help="JSONL key that holds the text.")] = "text",
    policy: Annotated[
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
        list[str] | None,
        typer.Option(
            help="Which files of a folder; may be repeated (default: .txt .md .rst .py "
            ".jsonl .jsonl.gz)."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a dataset of this name.")
    ] = False,
) -> None:
    """Tokenise text into PREFIX.bin and PREFIX.idx, one end-of-document id per document."""
    from pathlib import Path

    from megalite.data.prepare import prepare as run
    from megalite.errors import DataError

    if Path(f"{out}.idx").exists() and not overwrite:
        raise DataError(
            f"{out}.idx exists, and runs that use this dataset would lose it; choose another "
            "--out, or replace it with --overwrite"
        )

    with _Bar() as bar:
        report = run(
            source,
            out,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            model_type=None if model_type is None else model_type.value,
            key=key,
            policy=None if policy is None else policy.value,
            max_bytes=max_bytes,
            suffixes=suffix,
            on_phase=bar.phase,
            on_text_bytes=bar.done,
        )
    for line in summary(report):
        typer.echo(line)


class _Bar:
    """Progress with rate and time left, on a terminal only (rich draws nothing elsewhere)."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def phase(self, name: str, total_bytes: int | None) -> None:
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total_bytes)

    def done(self, text_bytes: int) -> None:
        self._progress.update(self._task, completed=text_bytes)


def summary(report: PrepareReport) -> list[str]:
    """Lines that say what was made, what was left out, and how long it took."""
    lines = [
        f"source     {report.source}",
        f"documents  {report.num_documents:,} ({report.text_bytes:,} bytes of text)",
        *_left_out(report),
        f"tokenizer  {report.tokenizer} ({report.vocab_size:,} entries)",
        *_training(report),
        f"tokens     {report.num_tokens:,} ({report.dtype}, "
        f"{report.text_bytes / report.num_tokens:.2f} bytes a token)",
        f"round trip {report.num_round_trips_exact} of the first {report.num_round_trips} "
        "documents decode to their exact text",
        f"seconds    {report.train_s:.1f} training, {report.encode_s:.1f} encoding",
        f"wrote      {report.prefix}.bin .idx .json" + (" .model" if report.training else ""),
    ]
    return lines


def _left_out(report: PrepareReport) -> list[str]:
    corpus = report.corpus
    lines = []
    if corpus.skipped:
        counts = ", ".join(f"{fault}: {count}" for fault, count in sorted(corpus.skipped.items()))
        lines.append(f"skipped    {corpus.skipped.total():,} documents ({counts})")
        lines += [f"           {place}" for place in corpus.places]
        if (more := corpus.skipped.total() - len(corpus.places)) > 0:
            lines.append(f"           and {more:,} more")
    if corpus.reached_max_bytes:
        lines.append(
            "           stopped at --max-bytes, which cut the last document; the source holds more"
        )
    return lines


def _training(report: PrepareReport) -> list[str]:
    training = report.training
    if training is None:
        return []
    share = training.sample_bytes / training.corpus_bytes
    return [
        f"           {training.model_type}, trained on {training.sample_bytes:,} bytes "
        f"({share:.1%} of the text), {training.num_lines_cut:,} long lines cut, "
        f"{training.skipped_share:.4%} of bytes skipped"
    ]
