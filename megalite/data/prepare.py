"""From text to an indexed dataset: documents in, PREFIX.bin, PREFIX.idx and PREFIX.json out.

Each document is encoded whole and ended with one eos id. The tokenizer is a given file, or is
trained on the same corpus first and then saved as PREFIX.model. Memory stays at a few megabytes of
text plus four bytes a document, whatever the corpus. Prints nothing: the report says it all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megalite.data.corpus import Corpus, CorpusReport, Policy, open_corpus
from megalite.data.indexed import dtype_for_vocab
from megalite.data.indexed_writer import IndexedWriter, Written
from megalite.data.sidecar import Sidecar, SourceInfo, TokenizerInfo
from megalite.data.tokenizer import Tokenizer
from megalite.data.tokenizer_training import ModelType, TrainReport, train_tokenizer
from megalite.errors import DataError

BATCH_TEXT_CHARS = 1 << 20  # encoded at a time
NUM_ROUND_TRIPS = 200  # documents at the start that are decoded again and compared


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` made, and from what."""

    prefix: str
    source: str
    num_tokens: int
    num_documents: int
    text_bytes: int
    vocab_size: int
    dtype: str
    tokenizer: str
    corpus: CorpusReport
    training: TrainReport | None  # None: the tokenizer was given
    num_round_trips: int  # documents decoded again
    num_round_trips_exact: int
    train_s: float
    encode_s: float


@dataclass
class _RoundTrips:
    """Documents decoded again and compared, the first NUM_ROUND_TRIPS of a run."""

    checked: int = 0
    exact: int = 0

    def check(self, text: str, ids: list[int], tokenizer: Tokenizer) -> None:
        if self.checked < NUM_ROUND_TRIPS:
            self.checked += 1
            self.exact += tokenizer.decode(ids) == text


def prepare(
    source: str,
    out_prefix: str,
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    model_type: ModelType | None = None,
    key: str = "text",
    policy: Policy | None = None,
    max_bytes: int | None = None,
    suffixes: list[str] | None = None,
    num_threads: int | None = None,
    on_phase: Callable[[str, int | None], None] = lambda phase, total_bytes: None,
    on_text_bytes: Callable[[int], None] = lambda done_bytes: None,
) -> PrepareReport:
    """Tokenise a corpus into an indexed dataset; give either a tokenizer or a vocab_size to train.

    `on_phase(name, total bytes or None)` and `on_text_bytes(done so far)` report progress.
    DataError for a bad setting, source or (under policy fail) document; nothing is left then.
    """
    _check_choice(tokenizer, vocab_size, model_type)
    corpus = open_corpus(source, key=key, policy=policy, max_bytes=max_bytes, suffixes=suffixes)
    start_s = time.perf_counter()
    on_phase("training" if tokenizer is None else "loading", corpus.size_hint_bytes())
    model, training = _tokenizer(
        corpus, out_prefix, tokenizer, vocab_size, model_type, on_text_bytes
    )
    trained_s = time.perf_counter()
    on_phase("encoding", corpus.size_hint_bytes())
    report, trips = CorpusReport(), _RoundTrips()
    threads = num_threads or _num_cpus()
    try:
        with IndexedWriter(out_prefix, model.vocab_size) as writer:
            for texts in _batches(corpus.documents(report)):
                _encode(texts, model, writer, threads, trips)
                on_text_bytes(report.text_bytes)
            written = writer.publish(lambda done: _extras(done, corpus, report, model, training))
    except OSError as error:
        raise DataError(
            f"{error.filename or out_prefix}: cannot be written: {error.strerror}; "
            "make room or give another --out. No dataset was made"
        ) from error
    return PrepareReport(
        prefix=out_prefix,
        source=corpus.description,
        num_tokens=written.num_tokens,
        num_documents=written.num_documents,
        text_bytes=report.text_bytes,
        vocab_size=model.vocab_size,
        dtype=written.dtype,
        tokenizer=str(model.path),
        corpus=report,
        training=training,
        num_round_trips=trips.checked,
        num_round_trips_exact=trips.exact,
        train_s=trained_s - start_s,
        encode_s=time.perf_counter() - trained_s,
    )


def _check_choice(
    tokenizer: str | None, vocab_size: int | None, model_type: ModelType | None
) -> None:
    if (tokenizer is None) == (vocab_size is None):
        raise DataError(
            f"{'no' if tokenizer is None else 'both a'} tokenizer and vocabulary size given; give "
            "one of them: --tokenizer FILE to use a tokenizer, or --vocab-size N to train one"
        )
    if tokenizer is not None and model_type is not None:
        raise DataError(
            f"model_type={model_type} has no effect on the given tokenizer {tokenizer}; "
            "leave --model-type out, or train one with --vocab-size"
        )


def _tokenizer(
    corpus: Corpus,
    out_prefix: str,
    path: str | None,
    vocab_size: int | None,
    model_type: ModelType | None,
    tell: Callable[[int], None],
) -> tuple[Tokenizer, TrainReport | None]:
    """The given tokenizer, or one trained on the corpus (not saved yet)."""
    if path is not None:
        return Tokenizer(path), None
    assert vocab_size is not None  # _check_choice
    dtype_for_vocab(vocab_size)
    content, training = train_tokenizer(
        _told(corpus.documents(), tell), vocab_size, model_type or "bpe"
    )
    return Tokenizer.from_bytes(content, f"{out_prefix}.model"), training


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):  # what this job may use, on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _told(documents: Iterable[str], tell: Callable[[int], None]) -> Iterator[str]:
    done = told = 0
    for text in documents:
        yield text
        done += len(text)
        if done - told >= BATCH_TEXT_CHARS:
            tell(done)
            told = done


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    chars = 0
    for text in documents:
        batch.append(text)
        chars += len(text)
        if chars >= BATCH_TEXT_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _encode(
    texts: list[str],
    tokenizer: Tokenizer,
    writer: IndexedWriter,
    threads: int,
    trips: _RoundTrips,
) -> None:
    end = tokenizer.eos_id
    for text, ids in zip(texts, tokenizer.encode_batch(texts, threads), strict=True):
        trips.check(text, ids, tokenizer)
        ids.append(end)
        writer.add_document(ids)


def _extras(
    written: Written,
    corpus: Corpus,
    report: CorpusReport,
    tokenizer: Tokenizer,
    training: TrainReport | None,
) -> dict[str, bytes]:
    name = tokenizer.path.name if training else str(tokenizer.path)
    sidecar = Sidecar(
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        max_id=written.max_id,
        num_tokens=written.num_tokens,
        num_documents=written.num_documents,
        dtype=written.dtype,
        fingerprint=written.fingerprint,
        tokenizer=TokenizerInfo(file=name, sha256=tokenizer.sha256, trained=training is not None),
        source=SourceInfo(
            description=corpus.description,
            text_bytes=report.text_bytes,
            skipped=dict(sorted(report.skipped.items())),
        ),
    )
    model = {".model": tokenizer.content} if training else {}
    return {**model, ".json": sidecar.to_bytes()}
