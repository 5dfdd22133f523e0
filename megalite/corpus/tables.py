"""Reading the rows of a parquet file as documents: one column of strings, in small batches.

Memory: a batch of about BATCH_BYTES and pyarrow's pages of one row group. A file without the
column, or with a column of another type, gives a fault for each of its rows. Needs pyarrow, an
extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from megalite.checks.packages import install_command
from megalite.corpus.documents import Fault, missing_key
from megalite.errors import DataError

BATCH_BYTES = 1 << 20
MAX_BATCH_ROWS = 4096


def read_parquet(path: Path, key: str) -> Iterator[tuple[str, bytes, Fault | None, int]]:
    """(place, content, fault, bytes of the file read by then) of each row, from row 1.

    Raises OSError for a file that is not sound, DataError if pyarrow is missing.
    """
    arrow = require_pyarrow(path, "convert the file to JSONL")
    file_bytes = path.stat().st_size
    try:
        with arrow.parquet.ParquetFile(path, pre_buffer=False, memory_map=False) as file:
            total = max(file.metadata.num_rows, 1)
            for number, (content, fault) in enumerate(_rows(arrow, file, key), 1):
                yield f"{path}:row {number}", content, fault, file_bytes * number // total
    except arrow.ArrowInvalid as error:
        raise OSError(f"not a sound parquet file: {error}") from error


def _rows(arrow: Any, file: Any, key: str) -> Iterator[tuple[bytes, Fault | None]]:
    """(content, fault) of each row."""
    schema = file.schema_arrow
    if key not in schema.names:
        yield from repeat((b"", missing_key(key, schema.names)), file.metadata.num_rows)
    elif not _is_text(arrow, schema.field(key).type):
        yield from repeat((b"", Fault("not a string")), file.metadata.num_rows)
    else:
        for batch in file.iter_batches(batch_size=_batch_rows(file, key), columns=[key]):
            column = batch.column(0)
            if arrow.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            for content in column.cast(arrow.large_binary()).to_pylist():
                if content is None:
                    yield b"", Fault("null")
                else:
                    yield content, None


def _is_text(arrow: Any, kind: Any) -> bool:
    """True for a column of strings, also as a dictionary or, in newer pyarrow, as string views."""
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    view = getattr(arrow.types, "is_string_view", lambda kind: False)
    return bool(arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or view(kind))


def _batch_rows(file: Any, key: str) -> int:
    """The number of rows that hold about BATCH_BYTES, by the sizes in the file's metadata."""
    groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
    columns = [g.column(n) for g in groups[:16] for n in range(g.num_columns)]
    held = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == key)
    rows = sum(group.num_rows for group in groups[:16])
    fitting = int(BATCH_BYTES * rows // max(held, 1))
    return max(1, min(MAX_BATCH_ROWS, fitting))


def require_pyarrow(path: Path, remedy: str) -> Any:
    """The module pyarrow with its parquet; DataError, with a `remedy`, if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: needs pyarrow, which is not installed: {install_command('pyarrow')}, or "
            f"{remedy}"
        ) from error
    return pyarrow
