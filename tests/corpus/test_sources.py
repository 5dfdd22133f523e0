"""Files cut into chunks: nothing lost, lines numbered right, every container read alike."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.corpus import sources
from megalite.corpus.corpus import open_corpus
from megalite.corpus.documents import CorpusChunk, CorpusReport, Fault, TextForm, parse
from megalite.corpus.sources import cut_lines
from megalite.errors import DataError
from tests.corpus.kit import write_container
from tests.data.kit import PROPERTY


class Dribble(io.BytesIO):
    """Gives fewer bytes than asked for, as decompressors do."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 0, 3))


@PROPERTY
@given(
    lines=st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=30),
    last=st.sampled_from([b"", b"\n"]),
    chunk_bytes=st.integers(4, 40),
)
def test_chunks_hold_every_line_with_its_number(
    lines: list[bytes], last: bytes, chunk_bytes: int
) -> None:
    content = b"\n".join(lines) + last
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
        chunks = list(cut_lines(io.BytesIO(content), "f"))
        dribbled = list(cut_lines(Dribble(content), "f"))
    assert b"".join(chunk.payload for chunk in chunks) == content
    assert chunks == dribbled  # how the file is cut depends on its content alone
    found = {
        chunk.first + index: line
        for chunk in chunks
        for index, line in enumerate(chunk.payload.removesuffix(b"\n").split(b"\n"))
    }
    assert found == dict(enumerate(content.removesuffix(b"\n").split(b"\n"), 1)) or not content
    assert all(chunk.payload.endswith(b"\n") for chunk in chunks[:-1])


def test_a_digest_covers_content_places_and_faults() -> None:
    faults = {2: Fault("null"), 1: Fault("missing key", "x", "it has 'y'")}
    places = ("a", "b", "c", "d")
    chunk = CorpusChunk("texts", b"ab", "", 1, (1, 0, 0, 1), places, faults, 7)
    found: list[Any] = [(0, "a", None, None), (3, "b", None, None)]
    found[1:1] = [(n, "", None, faults[n]) for n in (1, 2)]
    assert list(parse(chunk, TextForm("text"))) == found
    assert chunk.digest() == replace(chunk, source_bytes=8).digest()
    others = [
        replace(chunk, payload=b"aa"),
        replace(chunk, sizes=(2, 0, 0, 0)),
        replace(chunk, places=("a", "b", "c", "e")),
        replace(chunk, faults={2: Fault("null"), 1: Fault("missing key", "x")}),
        replace(chunk, first=2),
        replace(chunk, kind="lines"),
    ]
    assert len({chunk.digest(), *(other.digest() for other in others)}) == 7


RECORDS = [{"text": f"text {n} \u00e9"} for n in range(300)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.ndjson"])
def test_every_container_gives_the_same_documents_and_lines(tmp_path: Path, name: str) -> None:
    path = write_container(tmp_path / name, LINES + b"{\n" + LINES)
    report = CorpusReport()
    found = list(open_corpus(str(path), policy="skip").documents(report))
    assert found == [record["text"] for record in RECORDS] * 2
    assert report.places == [f"{path}:301: broken JSON"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("lost", [1, 40])
def test_a_shortened_container_fails_under_every_policy(
    tmp_path: Path, name: str, lost: int
) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(RECORDS), path)
    else:
        write_container(path, LINES)
    path.write_bytes(path.read_bytes()[:-lost])
    with pytest.raises(DataError, match=rf"{name}: cannot be read to its end"):
        list(open_corpus(str(path), policy="skip").documents())


def test_parquet_rows_are_documents_with_row_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = ["one", None, "", "bad\0", "two \u00e9", "x" * 3_000_000]
    table = pa.table({"n": range(6), "body": texts})
    pq.write_table(table, path, row_group_size=4)
    report = CorpusReport()
    found = list(open_corpus(str(path), policy="skip", key="body").documents(report))
    assert found == ["one", "two \u00e9", "x" * 3_000_000]
    assert report.places == [f"{path}:row 2: null", f"{path}:row 3: empty", f"{path}:row 4: NUL"]
    for column in (table["body"].dictionary_encode(), table["body"].cast(pa.large_string())):
        pq.write_table(pa.table({"body": column}), path)
        assert list(open_corpus(str(path), policy="skip", key="body").documents()) == found


@pytest.mark.parametrize(("key", "fault"), [("text", "missing key 'text'"), ("n", "not a string")])
def test_parquet_without_the_column_faults_each_row(tmp_path: Path, key: str, fault: str) -> None:
    pq.write_table(pa.table({"n": range(5)}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps({key: "good"}))
    report = CorpusReport()
    corpus = open_corpus(str(tmp_path), policy="skip", key=key)
    assert list(corpus.documents(report)) == ["good"]
    assert dict(report.skipped) == {fault: 5}
    with pytest.raises(DataError, match=f"a.parquet:row 1: {fault}") as caught:
        list(open_corpus(str(tmp_path), key=key).documents())
    assert ("it has 'n'; " in str(caught.value)) == (key == "text")


def test_crlf_and_a_missing_last_newline_are_read_and_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES[:-1].replace(b"\n", b"\r\n", 50))
    report = CorpusReport()
    found = list(open_corpus(str(path)).documents(report))
    assert found == [record["text"] for record in RECORDS]
    assert dict(report.noticed) == {"CRLF line ends": 50, "no newline at the end of the file": 1}
    assert report.noticed_first == {
        "CRLF line ends": f"{path}:1",
        "no newline at the end of the file": f"{path}:300",
    }


def test_progress_counts_bytes_on_disk(tmp_path: Path) -> None:
    write_container(tmp_path / "a.jsonl.gz", LINES)
    (tmp_path / "b.txt").write_text("b")
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "c.parquet")
    corpus = open_corpus(str(tmp_path), suffixes=[".gz", ".txt", ".parquet"])
    done = [chunk.source_bytes for chunk in corpus.chunks()]
    assert done == sorted(done)
    assert done[-1] == corpus.source_bytes()


def plainly(line: bytes) -> tuple[str, str]:
    """What a JSON line is, by the standard library alone."""
    try:
        record = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError:
        return "", "invalid UTF-8"
    except (ValueError, RecursionError):
        return "", "NUL" if b"\0" in line else "broken JSON"
    if not isinstance(record, dict):
        return "", "not a JSON object"
    if "text" not in record:
        return "", "missing key 'text'"
    text = record["text"]
    if not isinstance(text, str):
        return "", "null" if text is None else "not a string"
    if "\0" in text:
        return "", "NUL"
    if not text.lstrip("\ufeff").strip():
        return "", "empty"
    return ("", "lone surrogate") if any("\ud800" <= c <= "\udfff" for c in text) else (text, "")


JSON_PARTS = [
    *(b"{", b"}", b"[", b'"text"', b":", b",", b'"', b"\\", b"\\u0000", b"\\ud83d", b"\\ude00"),
    *(b"\xef\xbb\xbf", b"\xc3\xa9", b"\xff", b"\0", b"NaN", b"-1e999", b"null", b" ", b"\r", b"a"),
]


@PROPERTY
@given(
    parts=st.lists(st.sampled_from(JSON_PARTS), max_size=6),
    value=st.one_of(st.text(max_size=5), st.none(), st.integers(), st.lists(st.text(max_size=2))),
    at=st.integers(0, 30),
    ascii_only=st.booleans(),
)
def test_the_quick_parser_decides_as_the_standard_library(
    parts: list[bytes], value: object, at: int, ascii_only: bool
) -> None:
    whole = json.dumps({"text": value}, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    for line in (whole, whole[:at] + b"".join(parts) + whole[at:], b"".join(parts)):
        if line.strip() and b"\n" not in line:
            documents = parse(CorpusChunk("lines", line), TextForm("text"))
            found = [(text, "" if fault is None else fault.name) for _, text, _, fault in documents]
            assert found == [plainly(line)]
