"""Joining indexed datasets into one, with the files that one run over all their text would make.

Token files are copied, the index is written anew; documents of several sequences, and modes, are
kept. Datasets must agree in dtype and, by their sidecars, in tokenizer. Memory: a few megabytes.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.corpus.publish import (
    check_prefix,
    publish_files,
    require_free,
    sync,
    write_errors_as_data_errors,
    write_index,
    write_synced,
)
from megalite.data.fingerprint import checksum_files, fingerprint_files, sha256_file
from megalite.data.indexed import IndexedDataset, file_of
from megalite.data.loss_mask import SUFFIX, header
from megalite.data.sidecar import (
    MaskInfo,
    Sidecar,
    SourceInfo,
    TokenizerInfo,
    read_sidecar,
    require_checksum,
    require_fingerprint,
)
from megalite.errors import DataError
from megalite.wording import number_of

BLOCK = 1 << 20  # bytes, or entries of an index, at a time


def merge(out_prefix: str, prefixes: Sequence[str], overwrite: bool = False) -> IndexedDataset:
    """The dataset at `out_prefix`, made by joining those at `prefixes` in this order.

    Raises DataError if they do not fit each other, one is damaged, the disk cannot be written, or
    a dataset exists at `out_prefix` and `overwrite` is not set; then nothing is made.
    """
    _check_names(out_prefix, prefixes, overwrite)
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    sidecars = [_own_sidecar(part) for part in parts]
    _check_fit(parts, sidecars)

    # All files are written under temporary names, beside their final ones so a rename suffices.
    temporary = f".tmp-{secrets.token_hex(4)}"
    with write_errors_as_data_errors(out_prefix):
        Path(out_prefix).parent.mkdir(parents=True, exist_ok=True)
        made = {
            suffix: file_of(out_prefix, suffix + temporary)
            for suffix in (".bin", ".idx", ".lengths", ".documents", ".json", ".model", SUFFIX)
        }
        try:
            _write(made, parts)
            _describe(out_prefix, made, parts, [s for s in sidecars if s is not None])
            for name in (".lengths", ".documents"):
                made.pop(name).unlink()
            publish_files(Path(out_prefix), {s: p for s, p in made.items() if p.exists()})
        finally:
            for path in made.values():
                with suppress(OSError):  # the first error is the one to report
                    path.unlink(missing_ok=True)
    return IndexedDataset(out_prefix)


def _check_names(out_prefix: str, prefixes: Sequence[str], overwrite: bool) -> None:
    check_prefix(out_prefix)
    if not prefixes:
        raise DataError("no dataset to merge; give one PREFIX or more after OUT")
    if Path(out_prefix).resolve() in {Path(prefix).resolve() for prefix in prefixes}:
        raise DataError(f"{out_prefix} is one of the datasets to merge; choose another OUT")
    if not overwrite:
        require_free(out_prefix)


def _own_sidecar(part: IndexedDataset) -> Sidecar | None:
    """The sidecar of a dataset, None if it has none; DataError if it describes other content."""
    sidecar = read_sidecar(part)
    if sidecar is not None:
        require_fingerprint(sidecar, part, fingerprint_files(*part.files))
        require_checksum(sidecar, part)
    return sidecar


def _check_fit(parts: list[IndexedDataset], sidecars: list[Sidecar | None]) -> None:
    """Raise DataError unless one run could have made all the datasets."""
    names = [str(part.prefix) for part in parts]
    _require_one("dtype", names, [part.dtype.name for part in parts])

    have_masks = [part.loss_mask is not None for part in parts]
    _require_one("loss mask (PREFIX.mask) present", names, have_masks)

    # A dataset without sequences has no modes to show, and fits either way.
    filled = [part for part in parts if part.num_sequences]
    have_modes = [part.modes is not None for part in filled]
    _require_one("multimodal modes", [str(part.prefix) for part in filled], have_modes)

    # After this check all datasets have a sidecar or none has: `known` matches `names` or is empty.
    _require_one("sidecar (PREFIX.json) present", names, [side is not None for side in sidecars])
    known = [side for side in sidecars if side is not None]
    _require_one("vocab_size", names, [side.vocab_size for side in known])
    _require_one("end id", names, [side.eos_id for side in known])
    masks = [side.loss_mask for side in known if side.loss_mask is not None]
    _require_one("chat template (sha256)", names, [mask.template_sha256 for mask in masks])
    _require_one("tokenizer (sha256)", names, [side.tokenizer.sha256 for side in known])


def _require_one(what: str, names: list[str], values: Sequence[object]) -> None:
    """Raise DataError unless all datasets have the same value; no values are the same."""
    for name, value in zip(names, values, strict=False):
        if value != values[0]:
            raise DataError(
                f"{what} differs: {names[0]} has {values[0]}, {name} has {value}; only datasets "
                "that one run could have made are merged: prepare them with the same tokenizer"
            )


def _write(made: dict[str, Path], parts: list[IndexedDataset]) -> None:
    """Write the token file and the index; `.lengths` and `.documents` are for its tables."""
    with made[".bin"].open("wb") as stream:
        for part in parts:
            _copy(part, stream)
        sync(stream)
    if parts[0].loss_mask is not None:
        with made[SUFFIX].open("wb") as stream:
            stream.write(header(sum(part.num_tokens for part in parts)))
            for part in parts:
                for at in range(0, part.num_tokens, BLOCK):
                    assert part.loss_mask is not None
                    stop = min(at + BLOCK, part.num_tokens)
                    stream.write(part.loss_mask.read(at, stop).tobytes())
            sync(stream)
    lengths = _spool(made[".lengths"], (part.lengths for part in parts), "<i4")
    documents = _spool(made[".documents"], _boundaries(parts), "<i8")
    modes = [part.modes for part in parts if part.modes is not None]
    joined = np.concatenate(modes) if modes else None  # one byte a sequence
    write_index(made[".idx"], parts[0].dtype, lengths, documents, joined)


def _copy(part: IndexedDataset, stream: Any) -> None:
    """Copy the part's token file; DataError if it has become shorter."""
    size = part.num_tokens * part.dtype.itemsize
    with part.bin_path.open("rb") as source:
        for start in range(0, size, BLOCK):
            wanted = min(BLOCK, size - start)
            block = source.read(wanted)
            if len(block) < wanted:
                found = start + len(block)
                raise DataError(
                    f"{part.bin_path}: file length: found {number_of(found, 'byte')}, wanted "
                    f"{size}: "
                    "it was shortened while it was read"
                )
            stream.write(block)


def _boundaries(parts: list[IndexedDataset]) -> Iterator[NDArray[np.int64]]:
    """Blocks of the document boundaries, as sequence indices of the whole."""
    yield np.zeros(1, dtype=np.int64)
    before = 0
    for part in parts:
        for at in range(1, len(part.documents), BLOCK):
            yield part.documents[at : at + BLOCK] + np.int64(before)
        before += part.num_sequences


def _spool(path: Path, arrays: Iterable[NDArray[Any]], dtype: str) -> NDArray[Any]:
    """Concatenate arrays in a file, mapped into memory, so memory does not grow with them."""
    with path.open("wb") as stream:
        for array in arrays:
            for at in range(0, len(array), BLOCK):
                stream.write(array[at : at + BLOCK].astype(dtype).tobytes())
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _describe(
    out_prefix: str, made: dict[str, Path], parts: list[IndexedDataset], sidecars: list[Sidecar]
) -> None:
    """Write the sidecar of the whole, and the tokenizer's file if it lies beside a part."""
    if not sidecars:
        return

    # A tokenizer that a part was prepared with lies beside that part: the whole gets a copy, so it
    # can be used without the parts.
    first = sidecars[0]
    info = first.tokenizer
    for path in (file_of(part.prefix, ".model") for part in parts):
        if path.is_file() and sha256_file(path) == info.sha256:
            write_synced(made[".model"], path.read_bytes())
            info = TokenizerInfo(
                file=os.path.basename(out_prefix) + ".model", sha256=info.sha256, trained=True
            )
            break

    files = [made[suffix] for suffix in (".bin", ".idx", SUFFIX) if made[suffix].exists()]
    skipped = sum((Counter(side.source.skipped) for side in sidecars), Counter[str]())
    whole = Sidecar(
        vocab_size=first.vocab_size,
        eos_id=first.eos_id,
        max_id=max(side.max_id for side in sidecars),
        num_tokens=sum(side.num_tokens for side in sidecars),
        num_documents=sum(side.num_documents for side in sidecars),
        dtype=first.dtype,
        fingerprint=fingerprint_files(*files),
        checksum=checksum_files(*files),
        tokenizer=info,
        source=SourceInfo(
            description="merge of " + " + ".join(side.source.description for side in sidecars),
            text_bytes=sum(side.source.text_bytes for side in sidecars),
            skipped=dict(sorted(skipped.items())),
            unknown_ids=_sum(side.source.unknown_ids for side in sidecars),
            unknown_bytes=_sum(side.source.unknown_bytes for side in sidecars),
        ),
        loss_mask=_mask_of([side.loss_mask for side in sidecars if side.loss_mask is not None]),
    )
    write_synced(made[".json"], whole.to_bytes())


def _mask_of(masks: list[MaskInfo]) -> MaskInfo | None:
    """The mask of the whole; its parts have one template."""
    if not masks:
        return None
    trained = sum(mask.trained_tokens for mask in masks)
    return masks[0].model_copy(update={"trained_tokens": trained})


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum, None if one of the counts is not known."""
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)
