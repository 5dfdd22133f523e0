"""Reading the rows of parquet and Arrow files as documents, in small batches.

Arrow files are those that `datasets` saves: streams, or files of its older form. Memory: a batch of
about BATCH_BYTES and pyarrow's pages of one row group, or one batch of an Arrow file. A file
without the columns, or with a text column of another type, gives a fault for each of its rows.
Needs pyarrow, an extra.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from megalite.checks.packages import install_command
from megalite.corpus.documents import Fault, Form, TextForm, missing_key
from megalite.errors import DataError

TABLE_SUFFIXES = {".parquet": "parquet", ".arrow": "Arrow"}
BATCH_BYTES = 1 << 20
MAX_BATCH_ROWS = 4096


def read_table(path: Path, form: Form) -> Iterator[tuple[str, bytes, Fault | None, int]]:
    """(place, content, fault, bytes of the file read by then) of each row, from row 1.

    Raises OSError for a file that is not sound, DataError if pyarrow is missing.
    """
    arrow = require_pyarrow(path, "convert the file to JSONL")
    read = _parquet if path.suffix.lower() == ".parquet" else _arrow
    try:
        for number, (content, fault, done_bytes) in enumerate(read(arrow, path, form), 1):
            yield f"{path}:row {number}", content, fault, done_bytes
    except arrow.ArrowInvalid as error:
        raise OSError(f"not a sound {path.suffix[1:]} file: {error}") from error


def _parquet(arrow: Any, path: Path, form: Form) -> Iterator[tuple[bytes, Fault | None, int]]:
    """(content, fault, bytes read by then) of each row of a parquet file."""
    file_bytes = path.stat().st_size
    with arrow.parquet.ParquetFile(path, pre_buffer=False, memory_map=False) as file:
        total = max(file.metadata.num_rows, 1)
        fault, columns = _columns(arrow, file.schema_arrow, form)
        if fault is not None:
            rows: Any = repeat((b"", fault), file.metadata.num_rows)
        else:
            size = _batch_rows(file, columns)
            batches = file.iter_batches(batch_size=size, columns=columns)
            rows = (row for batch in batches for row in _contents(arrow, batch, form, columns))
        for number, row in enumerate(rows, 1):
            yield *row, file_bytes * number // total


def _arrow(arrow: Any, path: Path, form: Form) -> Iterator[tuple[bytes, Fault | None, int]]:
    """(content, fault, bytes read by then) of each row of an Arrow stream or file."""
    with arrow.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        opened = (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(source)
        batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
        fault, columns = _columns(arrow, opened.schema, form)
        for batch in batches:
            done_bytes = source.tell()
            for start in range(0, batch.num_rows, MAX_BATCH_ROWS):
                part = batch.slice(start, MAX_BATCH_ROWS)
                rows = repeat((b"", fault), part.num_rows)
                for row in _contents(arrow, part, form, columns) if fault is None else rows:
                    yield *row, done_bytes


def _columns(arrow: Any, schema: Any, form: Form) -> tuple[Fault | None, list[str]]:
    """(the fault of all rows, if any; the columns to read) of a table."""
    for key in form.columns:
        if key not in schema.names:
            return missing_key(key, schema.names), []
        if isinstance(form, TextForm) and not _is_text(arrow, schema.field(key).type):
            return Fault("not a string"), []
    return None, [*form.columns, *(k for k in form.optional_columns if k in schema.names)]


def _contents(
    arrow: Any, batch: Any, form: Form, columns: list[str]
) -> Iterator[tuple[bytes, Fault | None]]:
    """(content, fault) of each row of a batch: its text, or of another form its values in JSON."""
    if not isinstance(form, TextForm):
        for record in batch.select(columns).to_pylist():
            yield json.dumps(record, ensure_ascii=False, default=str).encode(errors="replace"), None
        return
    column = batch.column(columns[0])
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for content in column.cast(arrow.large_binary()).to_pylist():
        yield (b"", Fault("null")) if content is None else (content, None)


def _is_text(arrow: Any, kind: Any) -> bool:
    """True for a column of strings, also as a dictionary or, in newer pyarrow, as string views."""
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    view = getattr(arrow.types, "is_string_view", lambda kind: False)
    return bool(arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or view(kind))


def _batch_rows(file: Any, columns: list[str]) -> int:
    """The number of rows that hold about BATCH_BYTES, by the sizes in the file's metadata."""
    groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
    parts = [g.column(n) for g in groups[:16] for n in range(g.num_columns)]
    nested = tuple(f"{name}." for name in columns)
    wanted = [
        c for c in parts if c.path_in_schema in columns or c.path_in_schema.startswith(nested)
    ]
    held = sum(column.total_uncompressed_size for column in wanted)
    rows = sum(group.num_rows for group in groups[:16])
    fitting = int(BATCH_BYTES * rows // max(held, 1))
    return max(1, min(MAX_BATCH_ROWS, fitting))


def require_pyarrow(path: Path, remedy: str) -> Any:
    """The module pyarrow with its parquet; DataError, with a `remedy`, if it is not installed."""
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: needs pyarrow, which is not installed: {install_command('pyarrow')}, or "
            f"{remedy}"
        ) from error
    return pyarrow
