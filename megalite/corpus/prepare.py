"""Preparing an indexed dataset from text: PREFIX.bin, PREFIX.idx and PREFIX.json.

Conversations also give PREFIX.mask, the tokens to train on.

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megalite.corpus.chat import ChatForm
from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import CorpusChunk
from megalite.corpus.encode_pool import EncodePool
from megalite.corpus.encoding import Counts, Encoded, Encoder, Entry
from megalite.corpus.prepare_tokenizer import (
    OnProgress,
    Trained,
    progress_reporter,
    trained_tokenizer,
)
from megalite.corpus.publish import write_errors_as_data_errors, write_index, write_synced
from megalite.corpus.tokenizer_training import ModelType, TrainReport
from megalite.corpus.unfinished import Chunks, Unfinished
from megalite.data.fingerprint import checksum_files, fingerprint_files
from megalite.data.indexed import dtype_for_vocab
from megalite.data.loss_mask import SUFFIX
from megalite.data.sidecar import MaskInfo, Sidecar, SourceInfo, TokenizerInfo
from megalite.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_of
from megalite.data.tokenizer_files import model_files
from megalite.errors import DataError
from megalite.wording import number_of

FORMAT = 3  # to be raised when the same text gives other files, so unfinished runs start over
MAX_UNKNOWN = 0.01  # share of the text


@dataclass(frozen=True)
class PrepareReport:
    """The dataset that `prepare` made, and how it was made."""

    prefix: str
    tokenizer: str
    sidecar: Sidecar
    counts: Counts
    training: TrainReport | None  # None: the tokenizer was given
    num_kept_documents: int  # taken over from an interrupted run
    started_over: bool  # the work of an interrupted run with other options was dropped
    num_workers: int
    train_s: float
    encode_s: float


@dataclass
class _Done:
    """The chunks that are done, in the order of the corpus."""

    counts: Counts = field(default_factory=Counts)
    num_kept_documents: int = 0
    digests: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, entry: Entry) -> None:
        self.counts.add(entry.counts)
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
    on_progress: OnProgress = lambda progress: None,
) -> PrepareReport:
    """Make an indexed dataset from a corpus, with a given or a trained tokenizer.

    Give either `tokenizer`, a file or a folder, or the `vocab_size` of one to train. `num_workers`
    processes encode; by default one per CPU. At most a share of `max_unknown` of the text's bytes
    may be unknown to the tokenizer. The work of an interrupted run is taken over, or dropped with
    `restart`. Raises DataError for a bad setting, file or (under policy fail) document; then there
    is no dataset, but finished chunks may be kept.
    """
    _check_choice(tokenizer, vocab_size, model_type)
    if isinstance(corpus.form, ChatForm) and tokenizer is None:
        raise DataError(
            "conversations need the special tokens of a tokenizer that exists; give --tokenizer"
        )
    given = None if tokenizer is None else open_tokenizer(tokenizer)
    workers = num_cpus() if num_workers is None else num_workers
    _check_numbers(vocab_size, workers, max_unknown)

    start_s = time.perf_counter()
    with Unfinished(out_prefix) as unfinished, write_errors_as_data_errors(out_prefix):
        if restart:
            unfinished.forget()
        trained: Trained | None = None
        if given is None:
            settings = {"vocab_size": vocab_size, "model_type": model_type or "bpe"}
            trained = trained_tokenizer(corpus, unfinished, settings, on_progress)
            given = tokenizer_of(model_files(trained.content, f"{out_prefix}.model"))
        trained_s = time.perf_counter()

        # The source is read again for encoding; it may have changed since the training.
        encoder = Encoder(given, corpus.form, corpus.policy)
        chunks = unfinished.chunks(_options(corpus, given))
        done = _encode(corpus, encoder, chunks, workers, on_progress)
        _check_corpus(corpus, done, trained, unfinished)
        _check_unknown(given, done.counts, max_unknown)
        sidecar = _publish(corpus, encoder, unfinished, chunks, done.counts, trained)

    return PrepareReport(
        prefix=out_prefix,
        tokenizer=str(given.files.path),
        sidecar=sidecar,
        counts=done.counts,
        training=None if trained is None else trained.report,
        num_kept_documents=done.num_kept_documents,
        started_over=chunks.replaces_others,
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
            "one of them: --tokenizer PATH to use a tokenizer, or --vocab-size N to train one"
        )
    if tokenizer is not None and model_type is not None:
        raise DataError(
            f"model_type={model_type} has no effect on the given tokenizer {tokenizer}; "
            "leave --model-type out, or train one with --vocab-size"
        )


def _check_numbers(vocab_size: int | None, num_workers: int, max_unknown: float) -> None:
    """Raise DataError for a number that cannot be."""
    if vocab_size is not None:
        dtype_for_vocab(vocab_size)
    if num_workers < 1:
        raise DataError(f"num_workers={num_workers}; --workers must be 1 or more, or left out")
    if not 0 <= max_unknown <= 1:
        raise DataError(f"max_unknown={max_unknown}; --max-unknown must be a share from 0 to 1")


def _options(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """All that decides about the result of a chunk, but its content and the policy."""
    return {
        "format": FORMAT,
        "library": tokenizer.library,
        "tokenizer": tokenizer.files.sha256,
        "source": corpus.description,
        "form": corpus.form.describe(),
        "max_bytes": corpus.max_bytes,
    }


def _encode(
    corpus: Corpus, encoder: Encoder, chunks: Chunks, num_workers: int, on_progress: OnProgress
) -> _Done:
    """Encode what is left of the corpus after the chunks that can be taken over.

    Raises DataError for a bad document under policy fail.
    """
    done = _Done()
    report_chunk = progress_reporter(corpus, "encoding", on_progress)
    left = _take_over(corpus, chunks, done)
    with EncodePool(encoder, num_workers) as pool:
        for chunk, found in pool.encode(left, check_first=chunks.num_chunks == 0):
            # `max_bytes` and the check of the first documents depend on the chunks before.
            encoded = _corrected(found, chunk, corpus.max_bytes, encoder, done.counts)
            if encoded.failure:
                raise corpus.refusal(chunk, encoded.failure)
            chunks.append(encoded)
            done.add(encoded.entry)
            report_chunk(chunk, done.counts.corpus.text_bytes, done.counts.num_tokens)
            if done.counts.corpus.reached_max_bytes:
                break
    return done


def _take_over(corpus: Corpus, chunks: Chunks, done: _Done) -> Iterator[CorpusChunk]:
    """Take over chunks that an earlier run did, into `done`; returns the chunks left to encode.

    The policy of that run may have been another: a chunk without a bad document is the same under
    both, so under fail only one with a bad document is encoded again.
    """
    source = corpus.chunks()
    for chunk in source:
        entry = chunks.take(chunk.digest(), with_skipped=corpus.policy == "skip")
        if entry is None:
            return chain([chunk], source)
        done.add(entry)
        done.num_kept_documents = done.counts.corpus.num_documents
        if done.counts.corpus.reached_max_bytes:
            break
    return iter(())


def _corrected(
    encoded: Encoded, chunk: CorpusChunk, max_bytes: int | None, encoder: Encoder, before: Counts
) -> Encoded:
    """The chunk's result, encoded again if it depends on the chunks before it.

    Those are not known to a worker. The text may exceed `max_bytes` in this chunk (then a bad
    document after the limit is no failure), or it may have the first documents of the corpus, of
    which round trips are checked, though it is not the first chunk.
    """
    counts = encoded.entry.counts
    has_first = before.corpus.num_documents == 0
    left_bytes = None if max_bytes is None else max_bytes - before.corpus.text_bytes
    may_exceed = left_bytes is not None and (
        bool(encoded.failure) or counts.corpus.text_bytes > left_bytes
    )
    is_unchecked = (
        has_first
        and counts.corpus.num_documents > 0
        and not counts.round_trips
        and not encoded.failure
    )
    if may_exceed or is_unchecked:
        return encoder.encode(chunk, has_first, left_bytes)
    return encoded


def _check_corpus(
    corpus: Corpus, done: _Done, trained: Trained | None, unfinished: Unfinished
) -> None:
    """Raise DataError if the corpus held no document, or was not the one that was trained on.

    Then there is nothing to continue from.
    """
    if not done.counts.corpus.num_documents and unfinished.is_useful:
        unfinished.forget()
    corpus.require_some(done.counts.corpus)
    if trained is not None and trained.source_digest != done.digests.hexdigest():
        unfinished.forget()
        raise DataError(
            f"{corpus.description}: changed after the tokenizer was trained on it; "
            "let it rest, and prepare it again"
        )


def _check_unknown(tokenizer: Tokenizer, counts: Counts, max_unknown: float) -> None:
    """Raise DataError if more of the text became unknown ids than is allowed."""
    text_bytes = counts.corpus.text_bytes
    if counts.unknown_bytes > max_unknown * text_bytes:
        raise DataError(
            f"tokenizer {tokenizer.files.path}: "
            f"{number_of(counts.unknown_ids, 'unknown id', ',')} for "
            f"{counts.unknown_bytes:,} of {number_of(text_bytes, 'byte', ',')} of text "
            f"({counts.unknown_bytes / text_bytes:.2%}), and --max-unknown is {max_unknown:.2%}; "
            "use a tokenizer with byte fallback (--vocab-size trains one), or raise --max-unknown, "
            "which 1 lifts"
        )


def _publish(
    corpus: Corpus,
    encoder: Encoder,
    unfinished: Unfinished,
    chunks: Chunks,
    counts: Counts,
    trained: Trained | None,
) -> Sidecar:
    """Make the dataset's files from the unfinished folder, rename them, and remove the folder."""
    ids, lengths, mask = chunks.seal(counts.num_tokens)
    index = unfinished.path("index")
    write_index(index, encoder.dtype, np.memmap(lengths, dtype="<i4", mode="r"))

    form = corpus.form
    files: list[Path] = [ids, index]
    mask_info: MaskInfo | None = None
    if isinstance(form, ChatForm):
        files.append(mask)
        mask_info = MaskInfo(
            trained_tokens=counts.trained_tokens,
            template=form.template.name,
            template_sha256=form.template.sha256,
            marked_by=form.marked_by,
        )

    # A trained tokenizer lies beside the dataset, so the sidecar has its name without a folder.
    tokenizer = encoder.tokenizer
    sidecar = Sidecar(
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        max_id=counts.max_id,
        num_tokens=counts.num_tokens,
        num_documents=counts.corpus.num_documents,
        dtype=encoder.dtype.name,
        fingerprint=fingerprint_files(*files),
        checksum=checksum_files(*files),
        tokenizer=TokenizerInfo(
            file=str(tokenizer.files.path if trained is None else tokenizer.files.path.name),
            sha256=tokenizer.files.sha256,
            trained=trained is not None,
        ),
        source=SourceInfo(
            description=corpus.description,
            text_bytes=counts.corpus.text_bytes,
            skipped=dict(sorted(counts.corpus.skipped.items())),
            unknown_ids=counts.unknown_ids,
            unknown_bytes=counts.unknown_bytes,
        ),
        loss_mask=mask_info,
    )

    # Everything is on disk under other names before the first file gets its final one.
    made = {".bin": ids} if mask_info is None else {".bin": ids, SUFFIX: mask}
    extras = {".json": sidecar.to_bytes()}
    if trained is not None:
        extras[".model"] = tokenizer.files.content
    for suffix, content in extras.items():
        made[suffix] = unfinished.path("published" + suffix)
        write_synced(made[suffix], content)
    unfinished.publish({**made, ".idx": index})
    return sidecar
