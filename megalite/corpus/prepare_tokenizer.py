"""Training a tokenizer on a corpus: by itself (`data tokenizer`), or as a part of `prepare`.

For `prepare` it is kept in the unfinished folder until the dataset is made. It is taken over from
an interrupted run if the settings and the files' names, sizes and times are the same. A change that
those do not show is found at the end, when the digest of the source that was trained on is compared
with that of the source that was encoded.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import CorpusChunk, CorpusReport
from megalite.corpus.publish import write_errors_as_data_errors, write_synced
from megalite.corpus.tokenizer_training import ModelType, TrainReport, train_tokenizer
from megalite.corpus.unfinished import Unfinished
from megalite.data.sentencepiece_tokenizer import library_version
from megalite.errors import DataError


@dataclass(frozen=True)
class Progress:
    """The progress of a run, in bytes of the source's files, or of text if max_bytes limits it."""

    phase: str
    done_bytes: int
    total_bytes: int
    num_tokens: int = 0


@dataclass(frozen=True)
class Trained:
    """The content of a trained tokenizer's file, and the text that it was trained on."""

    content: bytes
    report: TrainReport
    source_digest: str  # over the digests of the chunks that were offered


OnProgress = Callable[[Progress], None]
# (chunk, text bytes so far, tokens so far), called for each chunk
ReportChunk = Callable[[CorpusChunk, int, int], None]


def trained_tokenizer(
    corpus: Corpus,
    unfinished: Unfinished,
    settings: dict[str, Any],
    on_progress: OnProgress,
) -> Trained:
    """Train on the corpus, or take over the tokenizer of an interrupted run.

    `settings` are arguments of train_tokenizer.
    """
    key = hashlib.sha256(json.dumps([_corpus_key(corpus), settings]).encode()).hexdigest()
    model = unfinished.path("tokenizer.model")
    record = unfinished.read_json("tokenizer.json")
    if record is not None and record["key"] == key and model.is_file():
        content = model.read_bytes()
        if hashlib.sha256(content).hexdigest() == record["sha256"]:
            unfinished.has_tokenizer = True
            return Trained(content, TrainReport(**record["report"]), record["source_digest"])

    content, report, digest = _train(corpus, settings, CorpusReport(), on_progress)

    # The model first: the record, once there, is trusted as far as the model has its sha256.
    write_synced(model, content)
    unfinished.write_json(
        "tokenizer.json",
        {
            "key": key,
            "sha256": hashlib.sha256(content).hexdigest(),
            "report": asdict(report),
            "source_digest": digest,
        },
    )
    unfinished.has_tokenizer = True
    return Trained(content, report, digest)


def make_tokenizer(
    corpus: Corpus,
    out: str,
    *,
    vocab_size: int,
    model_type: ModelType,
    sample_bytes: int | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = lambda progress: None,
) -> tuple[TrainReport, CorpusReport]:
    """Train a tokenizer and write it to `out`, atomically.

    Raises DataError as train_tokenizer does, if `out` exists and `overwrite` is not set, and if it
    cannot be written.
    """
    path = Path(out)
    if path.exists() and not overwrite:
        raise DataError(f"{out} exists; choose another --out, or replace it with --overwrite")

    # Training may take hours, so whether the place can be written is found out before it.
    unfinished = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    found = CorpusReport()
    settings = {"vocab_size": vocab_size, "model_type": model_type, "sample_bytes": sample_bytes}
    try:
        with write_errors_as_data_errors(out):
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.touch()
            content, report, _ = _train(corpus, settings, found, on_progress)
            write_synced(unfinished, content)
            os.replace(unfinished, path)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return report, found


def progress_reporter(corpus: Corpus, phase: str, on_progress: OnProgress) -> ReportChunk:
    """A function of a chunk and the counts so far that calls `on_progress`."""
    total = corpus.source_bytes() if corpus.max_bytes is None else corpus.max_bytes

    def report_chunk(chunk: CorpusChunk, text_bytes: int, num_tokens: int) -> None:
        done = chunk.source_bytes if corpus.max_bytes is None else text_bytes
        on_progress(Progress(phase, done, total, num_tokens))

    return report_chunk


def _train(
    corpus: Corpus,
    settings: dict[str, Any],
    found: CorpusReport,
    on_progress: OnProgress,
) -> tuple[bytes, TrainReport, str]:
    """(model, its training text, digest of the source); counts documents into `found`."""
    digests = hashlib.sha256()
    report_chunk = progress_reporter(corpus, "training", on_progress)

    def on_chunk(chunk: CorpusChunk) -> None:
        digests.update(chunk.digest().encode())
        report_chunk(chunk, found.text_bytes, 0)

    content, report = train_tokenizer(corpus.documents(found, on_chunk), **settings)
    return content, report, digests.hexdigest()


def _corpus_key(corpus: Corpus) -> list[Any]:
    """JSON values that differ if a tokenizer may have to be trained again."""
    files = hashlib.sha256()
    for path in corpus.files:
        status = path.stat() if path.is_file() else None
        known = (status.st_size, status.st_mtime_ns) if status else None
        files.update(json.dumps([str(path), known]).encode())
    return [
        library_version(),
        corpus.description,
        corpus.form.describe(),
        corpus.policy,
        corpus.max_bytes,
        corpus.encoding,
        files.hexdigest(),
    ]
