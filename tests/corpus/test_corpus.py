"""Sources of documents: order, policies, and every kind of bad input by name and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megalite.corpus import documents, sources
from megalite.corpus.corpus import open_corpus
from megalite.corpus.documents import CorpusReport
from megalite.errors import DataError


def line(value: object) -> bytes:
    return json.dumps({"text": value}).encode() + b"\n"


GOOD = line("good one")
BAD_LINES = {
    "broken JSON": b'{"text": "a"\n',
    "invalid UTF-8": b'{"text": "a\xff"}\n',
    "NUL": line("a\0b"),
    "lone surrogate": line("a\ud800b"),
    "missing key 'text'": b'{"txet": "a"}\n',
    "null": line(None),
    "not a string": line(3),
    "empty": line(""),
    "not a JSON object": b'["a"]\n',
    "byte order mark": line("\ufeffa"),
}
MORE_BAD = [
    ("broken JSON", b'{"text": "a"} {"text": "b"}\n'),
    ("JSON beyond limits", b"[" * 100_000 + b"\n"),
    ("JSON beyond limits", b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n"),
    ("empty", line(" \t\n\u00a0")),
    ("not a string", line(["a"])),
    ("not a string", line(False)),
    ("byte order mark", b"\xef\xbb\xbf" + GOOD),
    ("NUL", b"\0\0\0\n"),
]
ALL_BAD = [*BAD_LINES.items(), *MORE_BAD]


def read(path: Path, **options: Any) -> tuple[list[str], CorpusReport]:
    report = CorpusReport()
    corpus = open_corpus(str(path), **options)
    return list(corpus.documents(report)), report


@pytest.mark.parametrize(("fault", "content"), ALL_BAD)
def test_bad_line_fails_with_its_place(tmp_path: Path, fault: str, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + content + GOOD)
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"{path}:2: {fault}; " in str(caught.value)
    assert "--on-bad skip" in str(caught.value)


@pytest.mark.parametrize(("fault", "content"), ALL_BAD)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_bad_line_is_skipped_and_counted(
    tmp_path: Path, fault: str, content: bytes, suffix: str
) -> None:
    path = tmp_path / f"a{suffix}"
    whole = GOOD + content + line("good two")
    path.write_bytes(gzip.compress(whole) if suffix.endswith("gz") else whole)
    texts, report = read(path, policy="skip")
    assert texts == ["good one", "good two"]
    assert dict(report.skipped) == {fault: 1}
    assert [place.partition("; ")[0] for place in report.places] == [f"{path}:2: {fault}"]
    assert report.num_documents == 2


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({}, "it has no keys"),
        ({"id": 1, "txet": "a"}, "it has 'id', 'txet' (did you mean 'txet'?)"),
        ({"TEXT": "a"}, "it has 'TEXT' (did you mean 'TEXT'?)"),
        ({"\ud83d\n": "a"}, r"it has '\ud83d\n'"),  # not for the reader that knows no surrogates
        (
            {f"key-{n}": n for n in range(2000)} | {"texts": "a"},
            f"it has {', '.join(repr(f'key-{n}') for n in range(10))} and 1,991 more",
        ),
        ({"t" * 3000: 1, "Text": "a"}, f"it has '{'t' * 40}...', 'Text' (did you mean 'Text'?)"),
    ],
)
def test_a_missing_key_is_told_with_those_that_are_there(
    tmp_path: Path, record: dict[str, object], says: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + json.dumps(record).encode() + b"\n" + GOOD)
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"{path}:2: missing key 'text'; {says}; each document must have" in str(caught.value)
    _, report = read(path, policy="skip")
    assert report.places == [f"{path}:2: missing key 'text'; {says}"]
    assert dict(report.skipped) == {"missing key 'text'": 1}


def test_byte_order_mark_at_the_start_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + GOOD)
    texts, report = read(path, policy="skip")
    assert (len(texts), report.places) == (1, [f"{path}:1: byte order mark"])


def test_counts_are_whole_where_places_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"x\n" * 100 + BAD_LINES["null"] * 5)
    _, report = read(path, policy="skip")
    assert dict(report.skipped) == {"broken JSON": 100, "null": 5}
    assert len(report.places) == 20


def test_line_ends_blank_lines_and_a_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line("a\r\nb").replace(b"}\n", b"}\r\n") + b"\r\n\n" + GOOD[:-1])
    assert read(path)[0] == ["a\r\nb", "good one"]


def test_unicode_line_separators_do_not_cut_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "a\u2028b\u0085c"}\n'.encode())
    assert read(path)[0] == ["a\u2028b\u0085c"]


@pytest.mark.long
def test_a_long_line_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line("x" * 50_000_000) + GOOD)
    texts, _ = read(path)
    assert [len(text) for text in texts] == [50_000_000, 8]


@pytest.mark.parametrize("last", [b"\n" + GOOD, b""])
def test_a_line_over_the_limit_is_read_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bytes
) -> None:
    for module in (documents, sources):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + line("y" * 3_000_000)[:-1] + last)
    texts, report = read(path, policy="skip")
    assert texts == ["good one"] * (2 if last else 1)
    assert report.places == [f"{path}:2: too long"]


def test_lines_between_two_that_are_too_long_are_kept_under_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (documents, sources):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 100)
    path = tmp_path / "a.jsonl"
    long = line("y" * 3_000_000)
    path.write_bytes(long + GOOD * 1000 + long + GOOD + b"{bad\n")
    texts, report = read(path, policy="skip")
    assert texts == ["good one"] * 1001
    assert report.places == [
        f"{path}:1: too long",
        f"{path}:1002: too long",
        f"{path}:1004: broken JSON",
    ]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_of_no_bytes_is_no_empty_corpus(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.touch()
    with pytest.raises(DataError, match=r"cannot be read to its end: it is empty"):
        read(path, policy="skip")


@pytest.mark.parametrize("value", ["9" * 10_000, "[" * 100_000 + "]" * 100_000])
def test_json_that_the_parser_cannot_hold_is_called_that(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + f'{{"text": "t", "n": {value}}}\n'.encode())
    texts, report = read(path, policy="skip")
    assert texts == ["good one"]
    assert report.places == [f"{path}:2: JSON beyond limits"]


def test_another_key(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"body": "b", "text": "t"}\n')
    assert read(path, key="body")[0] == ["b"]


def test_truncated_gzip_fails_under_every_policy(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD * 100)[:-12])
    with pytest.raises(DataError, match="cannot be read to its end"):
        read(path, policy="skip")
    path.write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read to its end"):
        read(path, policy="skip")


def test_folder_is_sorted_recursive_and_filtered(tmp_path: Path) -> None:
    for name, text in {
        "b.txt": "3",
        "a/z.txt": "1",
        "a.txt": "2",
        "c.md": "4",
        "c.bin": "no",
        ".hidden.txt": "no",
        ".git/x.txt": "no",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "d.jsonl").write_bytes(line("5") + line("6"))
    assert read(tmp_path)[0] == ["1", "2", "3", "4", "5", "6"]
    assert read(tmp_path, suffixes=[".md"])[0] == ["4"]
    with pytest.raises(DataError, match=r"no file ending in \.xyz"):
        read(tmp_path, suffixes=[".xyz"])


def test_text_is_kept_as_it_is(tmp_path: Path) -> None:
    text = "\tdef f():\r\n\r\n    return  1 \n"
    (tmp_path / "a.py").write_bytes(text.encode())
    assert read(tmp_path / "a.py")[0] == [text]


@pytest.mark.parametrize(
    ("fault", "content"),
    [
        ("invalid UTF-8", "x".encode("utf-16")),
        ("NUL", "x".encode("utf-16-be")),
        ("byte order mark", b"\xef\xbb\xbfx"),
        ("empty", b" \n"),
        ("empty", b""),
    ],
)
def test_bad_text_files(tmp_path: Path, fault: str, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_bytes(b"good")
    texts, report = read(tmp_path, policy="skip")
    assert (texts, report.places) == (["good"], [f"{tmp_path / 'a.txt'}: {fault}"])
    with pytest.raises(DataError, match=fault):
        read(tmp_path)


def test_unreadable_file_fails_under_every_policy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"a\.txt: cannot be read"):
        read(tmp_path, policy="skip")


def test_max_bytes_cuts_the_last_document_at_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line("éé") + line("ab c") + line("é"))
    for limit, texts, reached in [
        (2, ["é"], True),
        (3, ["é"], True),
        (4, ["éé"], True),
        (6, ["éé", "ab"], True),
        (9, ["éé", "ab c"], True),
        (10, ["éé", "ab c", "é"], False),
    ]:
        found, report = read(path, max_bytes=limit)
        assert (found, report.reached_max_bytes) == (texts, reached)
        assert report.text_bytes == len("".join(texts).encode())
    with pytest.raises(DataError, match="max_bytes=1 leaves no text"):
        read(path, max_bytes=1)


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(BAD_LINES["missing key 'text'"] * 2)
    with pytest.raises(DataError, match=r"\(left out: missing key 'text': 2\)") as caught:
        read(path, policy="skip")
    assert f"the first at {path}:1: missing key 'text'; it has 'txet'" in str(caught.value)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"left out: none"):
        read(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 0}, "max_bytes=0"),
        ({"policy": "ignore"}, "policy='ignore'"),
        ({"suffixes": [".py"]}, "choose files of a folder"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_corpus("builtin", **options)


def test_unknown_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        open_corpus(str(tmp_path / "x"))
    (tmp_path / "a.docx").write_bytes(b"x")
    with pytest.raises(DataError, match="file of unknown kind"):
        open_corpus(str(tmp_path / "a.docx"))


def test_builtin_is_the_standard_library_in_a_fixed_order() -> None:
    corpus = open_corpus("builtin", max_bytes=300_000)
    report = CorpusReport()
    texts = list(corpus.documents(report))
    assert 300_000 - 4 < report.text_bytes <= 300_000
    assert texts == list(open_corpus("builtin", max_bytes=300_000).documents())
    names = [path.name for path in corpus.files]
    assert "argparse.py" in names
    assert not any("site-packages" in path.parts for path in corpus.files)
    assert corpus.policy == "skip"
