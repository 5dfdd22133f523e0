"""Preparing an indexed dataset from text: PREFIX.bin, PREFIX.idx and PREFIX.json.

Each document is encoded whole and ended with one eos id. The tokenizer is a given file, or is
trained on the same corpus first and then saved as PREFIX.model. Any number of workers makes the
same files. Memory stays at a few chunks of text per worker, whatever the size of the corpus. A run
that ends too early leaves PREFIX.unfinished/ if the same call can continue from it, and adds a note
about it to the error. Prints nothing; `PrepareReport` has the results.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat

import numpy as np

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import CorpusChunk, CorpusReport
from megalite.corpus.encode_pool import EncodePool
from megalite.corpus.encoding import Encoded, EncodeOptions, Encoder, Entry
from megalite.corpus.prepare_tokenizer import (
    Progress,
    Trained,
    progress_reporter,
    trained_tokenizer,
)
from megalite.corpus.publish import (
    publish_files,
    write_errors_as_data_errors,
    write_index,
    write_synced,
)
from megalite.corpus.tokenizer_training import ModelType, TrainReport
from megalite.corpus.unfinished import Unfinished
from megalite.data.fingerprint import checksum_files, fingerprint_files
from megalite.data.indexed import dtype_for_vocab
from megalite.data.sidecar import Sidecar, SourceInfo, TokenizerInfo
from megalite.data.tokenizer import Tokenizer, library_version
from megalite.errors import DataError

FORMAT = 2  # to be raised when the same text gives other files, so unfinished runs start over
MAX_UNKNOWN = 0.01  # share of the text


@dataclass(frozen=True)
class PrepareReport:
    """The dataset that `prepare` made, its source, and counts."""

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
    unknown_ids: int
    unknown_bytes: int  # of text, that these stand for
    num_round_trips: int  # documents at the start that were decoded and compared
    num_round_trips_exact: int
    first_change: str  # of the first of them that does not come back, in words
    num_kept_documents: int  # taken over from an interrupted run
    started_over: bool  # the work of an interrupted run with other options was dropped
    num_workers: int
    train_s: float
    encode_s: float


@dataclass
class _Totals:
    """Sums over the chunks done, in the order of the corpus."""

    report: CorpusReport = field(default_factory=CorpusReport)
    num_tokens: int = 0
    max_id: int = -1
    unknown_ids: int = 0
    unknown_bytes: int = 0
    round_trips: int = 0
    round_trips_exact: int = 0
    first_change: str = ""
    num_kept_documents: int = 0
    started_over: bool = False
    digests: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, entry: Entry) -> None:
        self.report.add(entry.report)
        self.num_tokens += entry.num_tokens
        self.max_id = max(self.max_id, entry.max_id)
        self.unknown_ids += entry.unknown_ids
        self.unknown_bytes += entry.unknown_bytes
        self.round_trips += entry.round_trips
        self.round_trips_exact += entry.round_trips_exact
        self.first_change = self.first_change or entry.first_change
        self.digests.update(entry.digest.encode())


def prepare(
    corpus: Corpus,
    out_prefix: str,
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    model_type: ModelType | None = None,
    num_workers: int | None = None,
    max_unknown: float = MAX_UNKNOWN,
    restart: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> PrepareReport:
    """Make an indexed dataset from a corpus, with a given or a trained tokenizer.

    Give either `tokenizer`, a file, or the `vocab_size` of one to train. `num_workers` processes
    encode; by default one per CPU. At most a share of `max_unknown` of the text's bytes may become
    unknown ids. The work of an interrupted run is taken over, or dropped with
    `restart`. Raises DataError for a bad setting, file or (under policy fail) document; then there
    is no dataset, but finished chunks may be kept.
    """
    _check_choice(tokenizer, vocab_size, model_type)
    given = None if tokenizer is None else Tokenizer(tokenizer)
    if vocab_size is not None:
        dtype_for_vocab(vocab_size)
    workers = num_cpus() if num_workers is None else num_workers
    if workers < 1:
        raise DataError(f"num_workers={workers}; --workers must be 1 or more, or left out")
    if not 0 <= max_unknown <= 1:
        raise DataError(f"max_unknown={max_unknown}; --max-unknown must be a share from 0 to 1")

    start_s = time.perf_counter()
    with Unfinished(out_prefix) as unfinished, write_errors_as_data_errors(out_prefix):
        if restart:
            unfinished.forget()

        trained: Trained | None = None
        if given is not None:
            model = given
        else:
            settings = {"vocab_size": vocab_size, "model_type": model_type or "bpe"}
            report_chunk = progress_reporter(corpus, "training", on_progress)
            trained = trained_tokenizer(corpus, unfinished, settings, report_chunk)
            model = Tokenizer.from_bytes(trained.content, f"{out_prefix}.model")
        trained_s = time.perf_counter()

        # The source is read again for encoding; it may have changed since the training.
        encoder = Encoder(model, EncodeOptions(corpus.key, corpus.policy))
        totals = _encode(corpus, encoder, unfinished, workers, on_progress)
        _check_unchanged(corpus, trained, totals, unfinished)
        _check_unknown(model, totals, max_unknown)
        sidecar = _publish(corpus, encoder, unfinished, totals, trained)

    return PrepareReport(
        prefix=out_prefix,
        source=corpus.description,
        num_tokens=totals.num_tokens,
        num_documents=totals.report.num_documents,
        text_bytes=totals.report.text_bytes,
        vocab_size=model.vocab_size,
        dtype=sidecar.dtype,
        tokenizer=str(model.path),
        corpus=totals.report,
        training=None if trained is None else trained.report,
        unknown_ids=totals.unknown_ids,
        unknown_bytes=totals.unknown_bytes,
        num_round_trips=totals.round_trips,
        num_round_trips_exact=totals.round_trips_exact,
        first_change=totals.first_change,
        num_kept_documents=totals.num_kept_documents,
        started_over=totals.started_over,
        num_workers=workers,
        train_s=trained_s - start_s,
        encode_s=time.perf_counter() - trained_s,
    )


def num_cpus() -> int:
    """The number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # on Linux: a job may have a part of the machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_choice(
    tokenizer: str | None, vocab_size: int | None, model_type: ModelType | None
) -> None:
    """Raise DataError unless there is either a tokenizer or a vocabulary size to train one."""
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


def _encode(
    corpus: Corpus,
    encoder: Encoder,
    unfinished: Unfinished,
    num_workers: int,
    on_progress: Callable[[Progress], None],
) -> _Totals:
    """Encode all chunks into the unfinished folder, after those kept from an earlier run.

    Raises DataError for a bad document under policy fail, and if there is no good one.
    """
    started_over = unfinished.begin(
        {
            "format": FORMAT,
            "sentencepiece": library_version(),
            "tokenizer": encoder.tokenizer.sha256,
            "source": corpus.description,
            "key": corpus.key,
            "max_bytes": corpus.max_bytes,
        }
    )
    totals = _Totals(started_over=started_over)
    report_chunk = progress_reporter(corpus, "encoding", on_progress)
    chunks = _take_over(corpus, unfinished, totals)
    with EncodePool(encoder, num_workers) as pool:
        for chunk, found in pool.encode(chunks, check_first=unfinished.num_chunks == 0):
            # `max_bytes` and the check of the first documents depend on the chunks before.
            encoded = _corrected(found, chunk, corpus.max_bytes, encoder, totals)
            if encoded.failure:
                raise corpus.refusal(chunk, encoded.failure)
            unfinished.append(encoded)
            totals.add(encoded.entry)
            report_chunk(chunk, totals.report.text_bytes, totals.num_tokens)
            if totals.report.reached_max_bytes:
                break

    # The corpus was read to its end without a document: there is nothing to continue from.
    if not totals.report.num_documents and unfinished.num_chunks:
        unfinished.forget()
    corpus.require_some(totals.report)
    return totals


def _take_over(corpus: Corpus, unfinished: Unfinished, totals: _Totals) -> Iterator[CorpusChunk]:
    """Take over chunks that an earlier run did, into `totals`; returns the chunks left to encode.

    The policy of that run may have been another: a chunk without a bad document is the same under
    both, so under fail only one with a bad document is encoded again.
    """
    chunks = corpus.chunks()
    for chunk, entry in zip(chunks, chain(unfinished.kept(), repeat(None)), strict=False):
        if entry is None or entry.digest != chunk.digest():
            return chain([chunk], chunks)
        if corpus.policy == "fail" and entry.report.skipped:
            return chain([chunk], chunks)
        unfinished.accept()
        totals.add(entry)
        totals.num_kept_documents = totals.report.num_documents
        if entry.report.reached_max_bytes:
            break
    return iter(())


def _corrected(
    encoded: Encoded, chunk: CorpusChunk, max_bytes: int | None, encoder: Encoder, totals: _Totals
) -> Encoded:
    """The chunk's result, encoded again if it depends on the chunks before it.

    Those are not known to a worker. The text may exceed `max_bytes` in this chunk (then a bad
    document after the limit is no failure), or it may have the first documents of the corpus, of
    which round trips are checked, though it is not the first chunk.
    """
    report = encoded.entry.report
    has_first = totals.report.num_documents == 0
    left_bytes = None if max_bytes is None else max_bytes - totals.report.text_bytes
    may_exceed = left_bytes is not None and (
        bool(encoded.failure) or report.text_bytes > left_bytes
    )
    is_unchecked = (
        has_first
        and report.num_documents > 0
        and not encoded.entry.round_trips
        and not encoded.failure
    )
    if may_exceed or is_unchecked:
        return encoder.encode(chunk, has_first, left_bytes)
    return encoded


def _check_unchanged(
    corpus: Corpus, trained: Trained | None, totals: _Totals, unfinished: Unfinished
) -> None:
    """Raise DataError if the corpus that was encoded is not the one that was trained on."""
    if trained is not None and trained.source_digest != totals.digests.hexdigest():
        unfinished.forget()
        raise DataError(
            f"{corpus.description}: changed after the tokenizer was trained on it; "
            "let it rest, and prepare it again"
        )


def _check_unknown(model: Tokenizer, totals: _Totals, max_unknown: float) -> None:
    """Raise DataError if more of the text became unknown ids than is allowed."""
    text_bytes = totals.report.text_bytes
    if totals.unknown_bytes > max_unknown * text_bytes:
        raise DataError(
            f"tokenizer {model.path}: {totals.unknown_ids:,} unknown ids stand for "
            f"{totals.unknown_bytes:,} of {text_bytes:,} bytes of text "
            f"({totals.unknown_bytes / text_bytes:.2%}), and --max-unknown is {max_unknown:.2%}; "
            "use a tokenizer with byte fallback (--vocab-size trains one), or raise --max-unknown, "
            "which 1 lifts"
        )


def _publish(
    corpus: Corpus,
    encoder: Encoder,
    unfinished: Unfinished,
    totals: _Totals,
    trained: Trained | None,
) -> Sidecar:
    """Make the dataset's files from the unfinished folder, rename them, and remove the folder."""
    unfinished.seal()
    ids, index = unfinished.path("ids"), unfinished.path("index")
    lengths = np.memmap(unfinished.path("lengths"), dtype="<i4", mode="r")
    write_index(index, encoder.dtype, lengths)

    # A trained tokenizer lies beside the dataset, so the sidecar has its name without a folder.
    tokenizer = encoder.tokenizer
    sidecar = Sidecar(
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        max_id=totals.max_id,
        num_tokens=totals.num_tokens,
        num_documents=totals.report.num_documents,
        dtype=encoder.dtype.name,
        fingerprint=fingerprint_files(ids, index),
        checksum=checksum_files(ids, index),
        tokenizer=TokenizerInfo(
            file=str(tokenizer.path if trained is None else tokenizer.path.name),
            sha256=tokenizer.sha256,
            trained=trained is not None,
        ),
        source=SourceInfo(
            description=corpus.description,
            text_bytes=totals.report.text_bytes,
            skipped=dict(sorted(totals.report.skipped.items())),
            unknown_ids=totals.unknown_ids,
            unknown_bytes=totals.unknown_bytes,
        ),
    )

    # Everything is on disk under other names before the first file gets its final one.
    made = {".bin": ids}
    extras = {".json": sidecar.to_bytes()}
    if trained is not None:
        extras[".model"] = tokenizer.content
    for suffix, content in extras.items():
        made[suffix] = unfinished.path("published" + suffix)
        write_synced(made[suffix], content)
    publish_files(unfinished.prefix, {**made, ".idx": index})
    unfinished.remove()
    return sidecar
