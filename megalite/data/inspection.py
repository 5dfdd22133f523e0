"""The content of an indexed dataset, and checks that it is sound: for `megalite data inspect`.

Every entry of the index is checked (opening checks very large ones by sample), and every byte by
the sidecar's checksum; ids are scanned up to SCAN_TOKENS. Prints nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.data.fingerprint import checksum_files, fingerprint_files
from megalite.data.indexed import IndexedDataset
from megalite.data.loss_mask import LossMask
from megalite.data.sidecar import Sidecar, read_sidecar
from megalite.data.tokenizer import Tokenizer, open_tokenizer
from megalite.data.vocab import SCAN_TOKENS, largest_id
from megalite.errors import DataError
from megalite.wording import number_of

QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
MAX_LENGTHS = 1 << 24  # lengths of documents held in memory; of more, an even sample
BLOCK = 1 << 20  # documents, or tokens of a loss mask, at a time
OPEN, CLOSE = "\u27e6", "\u27e7"  # around what is trained on: white brackets, rare in text


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    good: bool
    detail: str


@dataclass(frozen=True)
class Shown:
    """The beginning of one document."""

    number: int
    num_tokens: int
    text: str  # decoded, or ids if there is no tokenizer for them


@dataclass(frozen=True)
class Inspection:
    """Counts, lengths, beginnings and checks of one dataset."""

    prefix: str
    dtype: str
    num_tokens: int
    num_documents: int
    num_sequences: int
    sidecar: Sidecar | None
    tokenizer: str | None  # the file that texts are decoded with
    quantiles: dict[float, int]  # share of documents -> length in tokens
    histogram: list[tuple[int, int, int]]  # (from, to, documents) by powers of two
    shown: list[Shown]
    checks: list[Check]
    trained_tokens: int | None  # of the loss mask; None: all are trained on

    @property
    def mean_tokens(self) -> float:
        """Mean length of a document in tokens; 0 without documents."""
        return self.num_tokens / self.num_documents if self.num_documents else 0.0

    @property
    def good(self) -> bool:
        """True if all checks passed."""
        return all(check.good for check in self.checks)


def inspect_dataset(
    prefix: str,
    tokenizer: str | None = None,
    num_shown: int = 3,
    shown_tokens: int = 64,
    rendered: bool = False,
) -> Inspection:
    """Inspect the dataset at `prefix`; raises DataError if it cannot be opened.

    `tokenizer` is a file or folder to use in place of the one that the sidecar names. The first
    `num_shown` documents are shown, `shown_tokens` of each; `rendered`: with their special tokens,
    and what is trained on between brackets.
    """
    if num_shown < 0 or shown_tokens < 1:
        raise DataError(
            f"documents={num_shown}, tokens={shown_tokens}; must be at least 0 and at least 1"
        )
    data = IndexedDataset(prefix)
    sidecar = read_sidecar(data)
    found = Path(tokenizer) if tokenizer is not None else _tokenizer_file(prefix, sidecar)
    model = None if found is None else open_tokenizer(found)

    # A dataset from elsewhere has no sidecar, and perhaps no tokenizer: then less can be checked.
    vocab_size = eos_id = None
    if sidecar is not None:
        vocab_size, eos_id = sidecar.vocab_size, sidecar.eos_id
    elif model is not None:
        vocab_size, eos_id = model.vocab_size, model.eos_id
    checks = [_check_index(data)]
    if sidecar is not None:
        checks += _check_sidecar(data, sidecar, model)
    if vocab_size is not None and data.dtype.kind in "iu":
        checks.append(_check_ids(data, vocab_size))
    trained = None if data.loss_mask is None else _count_trained(data.loss_mask)
    if trained is not None:
        checks.append(_check_mask(trained, sidecar))
    elif eos_id is not None:  # conversations end as their template ends
        checks.append(_check_ends(data, eos_id, sidecar is not None))

    lengths = _document_lengths(data)
    numbers = range(min(num_shown, data.num_documents))
    return Inspection(
        prefix=prefix,
        dtype=data.dtype.name,
        num_tokens=data.num_tokens,
        num_documents=data.num_documents,
        num_sequences=data.num_sequences,
        sidecar=sidecar,
        tokenizer=None if found is None else str(found),
        quantiles=_quantiles(lengths),
        histogram=_histogram(lengths),
        shown=[_show(data, number, model, shown_tokens, rendered) for number in numbers],
        checks=checks,
        trained_tokens=trained,
    )


def _tokenizer_file(prefix: str, sidecar: Sidecar | None) -> Path | None:
    """The tokenizer that the sidecar names, if it exists: a trained one lies beside it."""
    if sidecar is None:
        return None
    name = sidecar.tokenizer.file
    path = Path(prefix).parent / name if sidecar.tokenizer.trained else Path(name)
    return path if path.exists() else None


def _check_index(data: IndexedDataset) -> Check:
    try:
        data.check_all()
    except DataError as error:
        return Check("index", False, str(error))
    return Check("index", True, "every length, offset and document boundary")


def _check_sidecar(data: IndexedDataset, sidecar: Sidecar, model: Tokenizer | None) -> list[Check]:
    files = data.files
    checks = [_check_same("fingerprint", fingerprint_files(*files), sidecar.fingerprint)]
    if sidecar.checksum is not None:
        checks.append(_check_same("checksum", checksum_files(*files), sidecar.checksum))
    if model is None:
        detail = f"{sidecar.tokenizer.file} is not there; give it with --tokenizer"
        return [*checks, Check("tokenizer", True, detail)]
    digest, path = model.files.sha256, model.files.path
    same = digest == sidecar.tokenizer.sha256
    detail = f"{path} made these ids"
    if not same:
        detail = f"{path} has sha256 {digest}, ids were made by {sidecar.tokenizer.sha256}"
    return [*checks, Check("tokenizer", same, detail)]


def _check_same(name: str, found: str, stated: str) -> Check:
    if found == stated:
        return Check(name, True, "files are those that were prepared")
    detail = f"found {found}, the sidecar states {stated}: files were replaced or damaged"
    return Check(name, False, detail)


def _count_trained(mask: LossMask) -> int:
    """The tokens that are trained on; -1 if the mask holds anything but 0 and 1."""
    trained = 0
    for start in range(0, mask.num_tokens, BLOCK):
        part = mask.read(start, min(start + BLOCK, mask.num_tokens))
        if part.max(initial=0) > 1:
            return -1
        trained += int(part.sum())
    return trained


def _check_mask(trained: int, sidecar: Sidecar | None) -> Check:
    if trained < 0:
        return Check("loss mask", False, "holds bytes other than 0 and 1: it is damaged")
    stated = None if sidecar is None or sidecar.loss_mask is None else sidecar.loss_mask
    good = stated is None or stated.trained_tokens == trained
    more = "" if good or stated is None else f", the sidecar states {stated.trained_tokens}"
    return Check("loss mask", good, f"{number_of(trained, 'token')} to train on{more}")


def _check_ids(data: IndexedDataset, vocab_size: int) -> Check:
    try:
        found = largest_id(data, None, vocab_size)
    except DataError as error:
        return Check("ids", False, str(error))
    wanted = f"largest id {found.max_id} ({found.detail}), vocabulary {vocab_size}"
    return Check("ids", found.max_id < vocab_size, wanted)


def _check_ends(data: IndexedDataset, eos_id: int, strict: bool) -> Check:
    """Check that each document has one end id, as its last token; up to SCAN_TOKENS.

    Without `strict`, for data from elsewhere, a document that differs is reported but good.
    """
    checked = 0
    for first in range(0, data.num_documents, BLOCK):
        starts = data.document_starts(first, min(first + BLOCK, data.num_documents) + 1).tolist()
        for number, (start, stop) in enumerate(pairwise(starts), first):
            ids = data.read(start, stop)
            if not len(ids) or ids[-1] != eos_id:
                return Check("ends", not strict, f"document {number} lacks end id {eos_id}")
            if np.count_nonzero(ids == eos_id) != 1:
                return Check("ends", not strict, f"document {number} holds {eos_id} inside")
            checked += 1
            if stop >= SCAN_TOKENS:
                return Check("ends", True, f"one end id {eos_id} in each of the first {checked}")
    return Check("ends", True, f"one end id {eos_id} in each of {number_of(checked, 'document')}")


def _document_lengths(data: IndexedDataset) -> NDArray[np.int64]:
    """Lengths of documents in tokens, of at most about MAX_LENGTHS."""
    every = -(-data.num_documents // MAX_LENGTHS) or 1
    parts = []
    for first in range(0, data.num_documents, BLOCK):
        starts = data.document_starts(first, min(first + BLOCK, data.num_documents) + 1)
        parts.append(np.diff(starts)[::every])
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _quantiles(lengths: NDArray[np.int64]) -> dict[float, int]:
    """Share of documents -> the length that they do not exceed."""
    if not len(lengths):
        return {}
    ordered = np.sort(lengths)
    return {share: int(ordered[round(share * (len(ordered) - 1))]) for share in QUANTILES}


def _histogram(lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Documents of 0 tokens, 1, 2-3, 4-7, ...; from the first bin that is not empty to the last."""
    edges = np.array([0, *(1 << n for n in range(33)), np.iinfo(np.int64).max])
    counts = np.histogram(lengths, edges)[0]
    held = np.flatnonzero(counts)
    if not len(held):
        return []
    return [
        (int(edges[n]), int(edges[n + 1]) - 1, int(counts[n]))
        for n in range(int(held[0]), int(held[-1]) + 1)
    ]


def _show(
    data: IndexedDataset, number: int, model: Tokenizer | None, limit: int, rendered: bool
) -> Shown:
    start, stop = data.document_start(number), data.document_start(number + 1)
    ids = data.read(start, min(stop, start + limit)).tolist()
    if model is None or any(not 0 <= token < model.vocab_size for token in ids):
        return Shown(number, stop - start, " ".join(map(str, ids)))
    if not rendered:
        return Shown(number, stop - start, model.decode(ids))
    if data.loss_mask is None:
        return Shown(number, stop - start, model.decode(ids, special=True))
    mask = data.loss_mask.read(start, start + len(ids)).tolist()
    parts = []
    for trained, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        text = model.decode([token for token, _ in run], special=True)
        parts.append(f"{OPEN}{text}{CLOSE}" if trained else text)
    return Shown(number, stop - start, "".join(parts))
