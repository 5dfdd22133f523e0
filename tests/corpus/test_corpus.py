"""Sources of documents: order, policies, and every kind of bad input by name and line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megalite.corpus import corpus as corpus_module
from megalite.corpus import documents, sources
from megalite.corpus.corpus import open_corpus
from megalite.corpus.documents import CorpusReport
from megalite.errors import DataError
from tests.corpus.kit import write_container


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
}
MORE_BAD = [
    ("broken JSON", b'{"text": "a"} {"text": "b"}\n'),
    ("JSON beyond limits", b"[" * 100_000 + b"\n"),
    ("JSON beyond limits", b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n"),
    ("empty", line(" \t\n\u00a0")),
    ("not a string", line(["a"])),
    ("not a string", line(False)),
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


BOM = b"\xef\xbb\xbf"


def test_byte_order_marks_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(BOM + GOOD + GOOD + BOM + GOOD + line("\ufeffa"))
    texts, report = read(path)
    assert texts == ["good one"] * 3 + ["a"]
    assert dict(report.noticed) == {"byte order mark dropped": 3}
    assert report.noticed_first == {"byte order mark dropped": f"{path}:1"}
    path.write_bytes(GOOD * 2 + BOM + GOOD)
    assert read(path)[1].noticed_first == {"byte order mark dropped": f"{path}:3"}
    path.unlink()
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(BOM + b"x\r\n")
    texts, report = read(tmp_path)
    assert texts == ["x\r\n"] * 2
    assert report.noticed["byte order mark dropped"] == 2


def test_empty_text_files_are_left_out_and_counted_under_every_policy(tmp_path: Path) -> None:
    for name, content in {"a": b"", "b": b" \r\n", "c": BOM, "d": b"good"}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    for policy in ("fail", "skip"):
        texts, report = read(tmp_path, policy=policy)
        assert texts == ["good"]
        assert dict(report.noticed) == {"empty file": 3}
        assert report.noticed_first == {"empty file": f"{tmp_path}/a.txt"}
        assert not report.skipped
    (tmp_path / "d.txt").unlink()
    with pytest.raises(DataError, match=r"holds no document \(left out: empty file: 3\)"):
        read(tmp_path)


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
    assert read(tmp_path)[0] == ["1", "2", "3", "4"]
    assert read(tmp_path, suffixes=[".md"])[0] == ["4"]
    with pytest.raises(DataError, match=r"no file ending in \.xyz; left out 5: \.txt 3, "):
        read(tmp_path, suffixes=[".xyz"])


def test_a_folder_with_records_gives_these_alone_unless_asked_for_more(tmp_path: Path) -> None:
    """README.md and LICENSE.txt of a cloned dataset are about it, not of it."""
    (tmp_path / "README.md").write_text("about it")
    (tmp_path / "LICENSE.TXT").write_text("may be used")
    (tmp_path / "info.json").write_text("{}")
    (tmp_path / "Makefile").write_text("all:")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitattributes").touch()
    (tmp_path / "A.JSONL").write_bytes(line("5"))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(line("6")))
    assert read(tmp_path)[0] == ["5", "6"]
    assert open_corpus(str(tmp_path)).selection == (
        ".jsonl 1, .jsonl.gz 1; left out 4: .json 1, .md 1, .txt 1, no suffix 1; "
        "--suffix takes them; 2 hidden names left out"
    )
    assert read(tmp_path, suffixes=[".JSONL", ".txt"])[0] == ["5", "may be used"]
    (tmp_path / "A.JSONL").unlink()
    (tmp_path / "b.jsonl.gz").unlink()
    assert read(tmp_path)[0] == ["may be used", "about it"]
    for number in range(20):
        (tmp_path / f"a.k{number:02}").touch()
    assert ".k06 1, others 14; --suffix" in open_corpus(str(tmp_path)).selection


def test_a_file_without_a_suffix_that_is_named_itself_is_one_text(tmp_path: Path) -> None:
    for name in ("copyright", "README", ".profile"):
        (tmp_path / name).write_bytes(b"Copyright \xc2\xa9\n{")
        assert read(tmp_path / name)[0] == ["Copyright \xa9\n{"]
    with pytest.raises(DataError, match="left out 2: no suffix 2; --suffix takes them"):
        read(tmp_path)
    assert len(read(tmp_path, suffixes=["readme"])[0]) == 1
    (tmp_path / "copyright").write_bytes(b"\xa9")
    with pytest.raises(DataError, match="copyright: invalid UTF-8"):
        read(tmp_path / "copyright")
    assert read(tmp_path / "copyright", encoding="latin-1")[0] == ["\xa9"]
    (tmp_path / "copyright").write_bytes(gzip.compress(b"text"))
    with pytest.raises(DataError, match="gzip"):
        read(tmp_path / "copyright")


@pytest.mark.parametrize(
    "content", [GOOD, b"\n" + GOOD, BOM + GOOD, b'[{"text": "a"}]', b'{\n "text": "a"\n}\n']
)
def test_json_in_a_file_without_a_suffix_needs_a_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "dump"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_corpus(str(path), policy="skip")
    assert str(caught.value) == (
        f"{path}: begins as JSON does, and its name has no suffix; name it .jsonl if each line is "
        "an object, or .txt to take it as one text"
    )


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".json.zst"])
def test_lines_of_json_named_json_are_lines(tmp_path: Path, suffix: str) -> None:
    content = b"\n" + line("one") + line("two")
    path = tmp_path / f"a{suffix}"
    write_container(path, content)
    assert read(path)[0] == ["one", "two"]
    assert read(tmp_path, suffixes=[suffix])[0] == ["one", "two"]
    with pytest.raises(DataError, match=rf"left out 1: {suffix} 1; --suffix takes them"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (json.dumps([{"text": "a"}, {"text": "b"}]).encode(), "a JSON array, not an object a line"),
        (json.dumps([{"text": "a"}], indent=1).encode(), "a JSON array, not an object a line"),
        (BOM + json.dumps({"text": "a"}, indent=2).encode(), "a JSON object over several lines"),
        (json.dumps({"text": "a"}, indent=2).encode().replace(b"\n", b"\r\n"), "several lines"),
        (GOOD.decode().encode("utf-16"), "those of UTF-16; give --encoding utf-16"),
        (
            gzip.compress(GOOD, mtime=0),
            "named as lines of JSON, but its first bytes are those of gzip",
        ),
        (b"PAR1\0\0", "named as lines of JSON, but its first bytes are those of parquet"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".jsonl.zst"])
def test_a_file_that_holds_no_lines_of_json_is_refused(
    tmp_path: Path, content: bytes, says: str, suffix: str
) -> None:
    path = tmp_path / f"a{suffix}"
    write_container(path, content)
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    with pytest.raises(DataError) as caught:
        open_corpus(str(tmp_path), policy="skip", suffixes=[".jsonl", suffix])
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.parquet", GOOD, "named as parquet, but its first bytes are others"),
        ("a.jsonl.gz", GOOD, "named as gzip, but its first bytes are others"),
        ("a.jsonl.zst", gzip.compress(GOOD, mtime=0), "named as zstandard, but .* those of gzip"),
    ],
)
def test_a_container_is_held_against_its_first_bytes(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    for number in range(25):
        (tmp_path / f"{number}{name}").write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        open_corpus(str(tmp_path), policy="skip")
    lines = str(caught.value).splitlines()
    assert (len(lines), lines[-1]) == (21, "and 5 more such files")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"text", mtime=0), "invalid UTF-8; its first bytes are those of gzip"),
        (b"PK\x03\x04\0\0", "NUL; its first bytes are those of zip"),
        ("text".encode("utf-16"), "invalid UTF-8; its first bytes are those of UTF-16"),
        (b"\x7fELF\0", "NUL; "),
    ],
)
def test_a_binary_file_named_as_text_is_a_bad_document(
    tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_bytes(b"good")
    with pytest.raises(DataError, match=says):
        read(tmp_path)
    assert read(tmp_path, policy="skip")[0] == ["good"]


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "utf-16", "utf-16-le", "UTF-8"])
def test_text_of_another_encoding_is_read_by_its_name(tmp_path: Path, encoding: str) -> None:
    texts = ["caf\u00e9\r\n", "na\u00efve \u00a3 5"]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\r\n" for text in texts)
    (tmp_path / "a.txt").write_bytes(texts[0].encode(encoding))
    (tmp_path / "b.jsonl").write_bytes(lines.encode(encoding) * 2000)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode(encoding)))
    options: dict[str, Any] = {"encoding": encoding, "suffixes": [".txt", ".jsonl", ".gz"]}
    found, report = read(tmp_path, **options)
    assert found == [texts[0], *texts * 2000, *texts]
    assert report.text_bytes == sum(len(text.encode()) for text in found)
    if encoding != "UTF-8":
        with pytest.raises(DataError):
            read(tmp_path, suffixes=options["suffixes"])


def test_lines_of_another_encoding_are_cut_by_content_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "".join(f'{{"text": "\u00e9 {n}"}}\n' for n in range(200)).encode("utf-16")
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(sources, "CHUNK_BYTES", 64)
    plain, packed = (
        [chunk.payload for chunk in open_corpus(str(path), encoding="utf-16").chunks()]
        for path in sorted(tmp_path.iterdir())
    )
    assert plain == packed
    assert b"".join(plain) == content.decode("utf-16").encode()


def test_what_is_not_of_the_encoding_is_bad(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\x81")
    (tmp_path / "b.txt").write_bytes(b"good")
    texts, report = read(tmp_path, encoding="cp1252", policy="skip")
    assert (texts, dict(report.skipped)) == (["good"], {"wrong encoding": 1})
    assert report.places == [f"{tmp_path}/a.txt: wrong encoding; it is not cp1252"]
    (tmp_path / "a.jsonl").write_bytes(line("x")[:-1] + b"\x81\n")
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read to its end: 'charmap' codec"):
        read(tmp_path / "a.jsonl", encoding="cp1252", policy="skip")


def test_all_bad_files_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(60):
        content = [b"\xe9t\xe9", b"good", b"a\0b"][number % 3]
        (tmp_path / f"{number:02}.txt").write_bytes(content)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 64 * 8)
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[0].startswith(f"{tmp_path}/00.txt: invalid UTF-8; text must be UTF-8, or given")
    assert lines[1] == f"{tmp_path}/02.txt: NUL"
    assert lines[2] == f"{tmp_path}/03.txt: invalid UTF-8"
    assert lines[-1] == "bad documents: 40, in files: 40 (NUL: 20, invalid UTF-8: 20)"
    monkeypatch.setattr(corpus_module, "LOOK_AHEAD_BYTES", 10)
    with pytest.raises(DataError, match=r"\nbad documents: at least 5, in files: 5 \("):
        read(tmp_path)


def test_bad_lines_are_counted_and_each_file_is_named_once(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(GOOD + b"{\n" * 3 + b"x\n")
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    first, *more = str(caught.value).splitlines()
    assert first.startswith(f"{tmp_path}/a.jsonl:2: broken JSON; ")
    assert more == [
        f"{tmp_path}/b.jsonl:2: broken JSON",
        f"{tmp_path}/c.jsonl:2: broken JSON",
        "bad documents: 12, in files: 3 (broken JSON: 12)",
    ]
    with pytest.raises(DataError, match=r"a\.jsonl:2: broken JSON; [^\n]*$"):
        read(tmp_path, max_bytes=1000)


def test_text_is_kept_as_it_is(tmp_path: Path) -> None:
    text = "\tdef f():\r\n\r\n    return  1 \n"
    (tmp_path / "a.py").write_bytes(text.encode())
    assert read(tmp_path / "a.py")[0] == [text]


@pytest.mark.parametrize(
    ("fault", "content"),
    [
        ("invalid UTF-8", "x".encode("utf-16")),
        ("NUL", "x".encode("utf-16-be")),
        ("empty", "\u00a0\n".encode()),
    ],
)
def test_bad_text_files(tmp_path: Path, fault: str, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_bytes(b"good")
    texts, report = read(tmp_path, policy="skip")
    assert texts == ["good"]
    assert report.places[0].partition("; ")[0] == f"{tmp_path / 'a.txt'}: {fault}"
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
        ({"encoding": "latin-1"}, "encoding='latin-1' has no effect on builtin"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_corpus("builtin", **options)


def test_unknown_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x")
    for encoding in ("utf-99", "base64", "undefined", "\udcff"):
        with pytest.raises(DataError, match=re.escape(f"encoding={encoding!r}: ")):
            open_corpus(str(tmp_path), encoding=encoding)
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
