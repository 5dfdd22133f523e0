"""`PREFIX.json`, the sidecar: the description of a prepared dataset beside Megatron's two files
and the loss mask, if any.

Optional on reading: a dataset from elsewhere has none. One that does not describe the files beside
it is refused: counts and fingerprint whenever a dataset is opened for training, the checksum, which
takes reading the whole of it, where the files are not too large for that. Its only paths are the
names that the user gave.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megalite.data.fingerprint import checksum_files
from megalite.data.indexed import IndexedDataset, file_of
from megalite.data.tokenizer_files import read_tokenizer_files
from megalite.errors import DataError


class TokenizerInfo(BaseModel):
    """The tokenizer that made the ids; `trained` for this dataset, it lies beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    sha256: str
    trained: bool


class SourceInfo(BaseModel):
    """The source of the text; `skipped`: fault -> number of documents that were left out for it.

    `unknown_ids` are those of the tokenizer's unknown id, which stand for `unknown_bytes` of the
    text; None: not counted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    text_bytes: int = Field(ge=0)
    skipped: dict[str, int]
    unknown_ids: int | None = Field(default=None, ge=0)
    unknown_bytes: int | None = Field(default=None, ge=0)


class MaskInfo(BaseModel):
    """The loss mask beside the dataset: tokens of which the loss counts, and what marked them.

    `template`: the chat template's file, or the tokenizer that it came with; `marked_by`: its own
    generation tags, or the difference between renderings of one message more.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    trained_tokens: int = Field(ge=0)
    template: str
    template_sha256: str
    marked_by: Literal["generation", "prefixes"]


class Sidecar(BaseModel):
    """The content of PREFIX.json. `max_id` is -1 for a dataset without tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["megalite-dataset"] = "megalite-dataset"
    version: Literal[1] = 1
    vocab_size: int = Field(ge=1)
    eos_id: int = Field(ge=0)
    max_id: int = Field(ge=-1)
    num_tokens: int = Field(ge=0)
    num_documents: int = Field(ge=0)
    dtype: str
    fingerprint: str
    checksum: str | None = None  # of all files, whole; None: the writer made none
    tokenizer: TokenizerInfo
    source: SourceInfo
    loss_mask: MaskInfo | None = None  # None: every token counts

    def to_bytes(self) -> bytes:
        """The file's content."""
        return (self.model_dump_json(indent=2) + "\n").encode()


def read_sidecar(data: IndexedDataset) -> Sidecar | None:
    """The sidecar of an opened dataset, None if it has none; DataError if it describes another."""
    sidecar = stated_sidecar(data.prefix)
    if sidecar is None:
        return None
    path = file_of(data.prefix, ".json")
    stated = (sidecar.num_tokens, sidecar.num_documents, sidecar.dtype)
    found = (data.num_tokens, data.num_documents, data.dtype.name)
    if stated != found:
        raise DataError(
            f"{path} states (tokens, documents, dtype) = {stated}, the files beside it hold "
            f"{found}: they were replaced; prepare the dataset again, or delete {path.name}"
        )
    if (sidecar.loss_mask is None) != (data.loss_mask is None):
        stands = "is missing" if data.loss_mask is None else "is not one that it states"
        raise DataError(
            f"{path}: PREFIX.mask beside it {stands}, so that other tokens would be trained on; "
            "copy all files of the dataset again, or prepare it again"
        )
    return sidecar


def stated_sidecar(prefix: str | Path) -> Sidecar | None:
    """The sidecar at a prefix, None if there is none; it is not compared with the dataset."""
    path = file_of(prefix, ".json")
    return _parse(path) if path.is_file() else None


def require_fingerprint(sidecar: Sidecar, data: IndexedDataset, found: str) -> None:
    """Raise DataError if the fingerprint `found` of a dataset is not the one of its sidecar."""
    _require_same("fingerprint", data, found, sidecar.fingerprint)


def require_checksum(sidecar: Sidecar, data: IndexedDataset) -> None:
    """Raise DataError if any byte of a dataset is not the one that was prepared; reads all."""
    if sidecar.checksum is not None:
        found = checksum_files(*data.files)
        _require_same("checksum", data, found, sidecar.checksum)


def _require_same(what: str, data: IndexedDataset, found: str, stated: str) -> None:
    if found != stated:
        raise DataError(
            f"{data.prefix}.json: {what}: found {found} in the files, the sidecar states {stated}: "
            "they were replaced or damaged; copy them again, or prepare the dataset again"
        )


def require_tokenizer(sidecar: Sidecar, prefix: str | Path, tokenizer: str) -> None:
    """Raise DataError if data.tokenizer is not the one that made the dataset."""
    made_by = sidecar.tokenizer
    found = read_tokenizer_files(tokenizer).sha256
    if found != made_by.sha256:
        raise DataError(
            f"data.tokenizer={tokenizer} (sha256 {found[:12]}...) did not make "
            f"{prefix}, which {made_by.file} did (sha256 {made_by.sha256[:12]}...); "
            f"set data.tokenizer to that one"
        )


def _parse(path: Path) -> Sidecar:
    try:
        return Sidecar.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "content"
        raise DataError(
            f"{path}: {field}: {first['msg']}; wanted what `megalite data prepare` writes: "
            "prepare the dataset again, or delete this file"
        ) from error
