"""`prepare` and its command: text in, dataset out, one end id per document, no half result."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer
from typer.testing import CliRunner

from megalite.cli.data.prepare import app
from megalite.corpus import documents, sources
from megalite.corpus.merge import merge
from megalite.data.dataset import TokenDataset
from megalite.data.inspection import inspect_dataset
from megalite.data.sidecar import require_tokenizer
from megalite.data.tokenizer import open_tokenizer
from megalite.errors import DataError
from tests.corpus.kit import prepare
from tests.corpus.kit.hugging_face import bytes_tokenizer, words_tokenizer, write_folder

TEXTS = ["def f(x):\n\treturn x\n" * 30, "a </s> b <s>\n" * 30, "é\r\n  indented\n" * 30]
VOCAB_SIZE = 290


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "corpus.jsonl")


def test_documents_come_back_each_with_one_end_id(tmp_path: Path, source: str) -> None:
    report = prepare(source, str(tmp_path / "out"), vocab_size=VOCAB_SIZE)
    assert names(tmp_path) == ["out.bin", "out.idx", "out.json", "out.model"]
    data = TokenDataset(tmp_path / "out")
    tokenizer = open_tokenizer(tmp_path / "out.model")
    for number, text in enumerate(TEXTS):
        ids = data.indexed.sequence(number).tolist()
        assert ids == [*tokenizer.encode(text), tokenizer.eos_id]
        assert ids.count(tokenizer.eos_id) == 1
        assert tokenizer.decode(ids) == text
    assert (report.sidecar.num_documents, report.sidecar.num_tokens) == (3, data.num_tokens)
    assert (report.counts.round_trips, report.counts.round_trips_exact) == (3, 3)


def test_sidecar_describes_the_dataset(tmp_path: Path, source: str) -> None:
    prepare(source, str(tmp_path / "out"), vocab_size=VOCAB_SIZE)
    data = TokenDataset(tmp_path / "out")
    sidecar = data.sidecar
    assert sidecar is not None
    assert sidecar.vocab_size == VOCAB_SIZE
    assert sidecar.max_id == data.indexed.read(0, data.num_tokens).max()
    assert sidecar.fingerprint == data.fingerprint
    assert sidecar.tokenizer.file == "out.model"
    assert sidecar.tokenizer.sha256 == open_tokenizer(tmp_path / "out.model").files.sha256
    assert sidecar.source.text_bytes == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hugging_face_folder_makes_its_own_ids(tmp_path: Path, source: str, workers: int) -> None:
    folder = write_folder(tmp_path / "hf", bytes_tokenizer(adds_bos=True))
    out = str(tmp_path / "out")
    report = prepare(source, out, tokenizer=str(folder), num_workers=workers)
    stock = AutoTokenizer.from_pretrained(folder)
    data = TokenDataset(out)
    for number, text in enumerate(TEXTS):
        wanted = [*stock.encode(text), stock.eos_token_id]
        assert data.indexed.sequence(number).tolist() == wanted
    assert (report.counts.round_trips_exact, report.counts.unknown_bytes) == (3, 0)
    assert inspect_dataset(out).good
    require_tokenizer(report.sidecar, out, str(folder / "tokenizer.json"))
    with pytest.raises(DataError, match="did not make"):
        require_tokenizer(report.sidecar, out, str(write_folder(tmp_path / "other")))


def test_text_that_a_tokenizer_drops_counts_as_unknown(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", words_tokenizer(unk=None))
    (tmp_path / "a.txt").write_text("The fox \u4e2d\u6587 reads")
    out = str(tmp_path / "out")
    with pytest.raises(DataError, match="0 unknown ids for 6 of 20 bytes"):
        prepare(str(tmp_path / "a.txt"), out, tokenizer=str(folder))
    report = prepare(str(tmp_path / "a.txt"), out, tokenizer=str(folder), max_unknown=0.5)
    assert report.sidecar.source.unknown_bytes == 6


def test_given_tokenizer_gives_the_same_tokens(tmp_path: Path, source: str) -> None:
    prepare(source, str(tmp_path / "one"), vocab_size=VOCAB_SIZE)
    prepare(source, str(tmp_path / "two"), tokenizer=str(tmp_path / "one.model"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
    assert not (tmp_path / "two.model").exists()


def test_workers_and_chunks_do_not_change_the_result(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(source, str(tmp_path / "one"), vocab_size=VOCAB_SIZE, num_workers=1)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 512)
    prepare(source, str(tmp_path / "two"), vocab_size=VOCAB_SIZE, num_workers=3)
    for suffix in (".bin", ".idx", ".model"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of them"),
        ({"vocab_size": 300, "tokenizer": "x.model"}, "give one of them"),
        ({"tokenizer": "x.model", "model_type": "bpe"}, "model_type=bpe has no effect"),
        ({"tokenizer": "x.model"}, "x.model: cannot be read"),
        ({"vocab_size": 100_000}, "largest feasible"),
        ({"vocab_size": 2**40}, "vocab_size=1099511627776"),
        ({"vocab_size": 300, "key": "body"}, "missing key"),
    ],
)
def test_what_cannot_run_leaves_nothing(
    tmp_path: Path, source: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(source, str(tmp_path / "out"), **options)
    assert names(tmp_path) == []


def test_bad_document_while_encoding_leaves_nothing(tmp_path: Path, source: str) -> None:
    prepare(source, str(tmp_path / "one"), vocab_size=VOCAB_SIZE)
    with Path(source).open("a") as stream:
        stream.write("{\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl:4: broken JSON"):
        prepare(source, str(tmp_path / "two"), tokenizer=str(tmp_path / "one.model"))
    assert not [name for name in names(tmp_path) if name.startswith("two")]


def test_full_disk_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="cannot be written: No space left"):
        prepare(source, str(tmp_path / "out"), vocab_size=VOCAB_SIZE)
    assert names(tmp_path) == []


def test_command_prints_what_it_made_and_left_out(tmp_path: Path, source: str) -> None:
    with Path(source).open("a") as stream:
        stream.write('{"text": null}\n{"text": " "}\n')
    options = ["--vocab-size", "280", "--on-bad", "skip", "--model-type", "unigram"]
    result = CliRunner().invoke(app, ["prepare", source, "--out", str(tmp_path / "out"), *options])
    assert result.exit_code == 0, result.output
    for part in (
        "documents  3",
        "skipped    2 documents (empty: 1, null: 1)",
        f"{source}:4: null",
        f"{source}:5: empty",
        "unigram, trained on",
        "0.0000% of bytes skipped",
        "3 of the first 3 documents",
        "out.bin .idx .json .model",
    ):
        assert part in result.output
    assert TokenDataset(tmp_path / "out").num_documents == 3


def test_command_lets_errors_pass_to_the_caller(tmp_path: Path, source: str) -> None:
    result = CliRunner().invoke(app, ["prepare", source, "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, DataError)
    result = CliRunner().invoke(app, ["prepare", source, "--out", "x", "--on-bad", "ignore"])
    assert result.exit_code == 2


@pytest.mark.long
def test_builtin_needs_no_files_of_ones_own(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    options = ["--vocab-size", "512", "--max-bytes", "200000"]
    result = CliRunner().invoke(app, ["prepare", "builtin", "--out", out, *options])
    assert result.exit_code == 0, result.output
    assert "stopped at --max-bytes" in result.output
    data = TokenDataset(out)
    assert data.check_vocab(512).how == "scan"
    assert list(data.split((0.98, 0.02), 64)) == ["train", "validation"]


def test_text_side_loads_no_torch() -> None:
    code = (
        "import sys, megalite.cli.data.prepare, megalite.corpus.prepare, megalite.data.sampler\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def without_bytes(tmp_path: Path) -> str:
    """A tokenizer of English without byte fallback: other letters are unknown."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"hello world, this is text {n}" for n in range(500)]),
        model_writer=model,
        vocab_size=60,
        model_type="bpe",
        minloglevel=2,
    )
    (tmp_path / "english.model").write_bytes(model.getvalue())
    return str(tmp_path / "english.model")


CHINESE = "\u4f60\u597d\u4e16\u754c"


def test_what_a_tokenizer_changes_is_shown(tmp_path: Path, source: str) -> None:
    """The library's default normalisation makes one space of a line's end and an indentation."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS for line in text.split("\n")]),
        model_prefix=str(tmp_path / "default"),
        vocab_size=VOCAB_SIZE,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    options = ["--tokenizer", str(tmp_path / "default.model"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["prepare", source, *options])
    assert result.exit_code == 0, result.output
    assert (
        "round trip 0 of the first 3 documents decode to their exact text\n"
        "           'ef f(x):\\n\\treturn x\\ndef f' comes back as 'ef f(x): return x def f('\n"
    ) in result.output


@pytest.mark.parametrize("workers", [1, 2])
def test_unknown_text_is_counted_by_its_bytes_and_refused(
    tmp_path: Path, without_bytes: str, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A whole document is one unknown id, so a share of ids would hide it."""
    monkeypatch.setattr(sources, "CHUNK_BYTES", 512)
    texts = ["hello world"] * 60 + [f"this {CHINESE * 4} is {CHINESE}", CHINESE * 30]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    unknown_bytes, text_bytes = 3 * 4 * 35, sum(len(text.encode()) for text in texts)
    share = unknown_bytes / text_bytes
    options: dict[str, Any] = {"tokenizer": without_bytes, "num_workers": workers}
    with pytest.raises(DataError) as caught:
        prepare(str(path), str(tmp_path / "out"), **options)
    assert f"3 unknown ids for 420 of {text_bytes:,} bytes" in str(caught.value)
    assert f"({share:.2%}), and --max-unknown is 1.00%" in str(caught.value)
    report = prepare(str(path), str(tmp_path / "out"), **options, max_unknown=share + 1e-9)
    assert report.num_kept_documents == 62  # nothing is encoded twice
    assert (report.counts.unknown_ids, report.counts.unknown_bytes) == (3, unknown_bytes)
    merge(str(tmp_path / "two"), [str(tmp_path / "out")] * 2)
    for name, times in (("out", 1), ("two", 2)):
        shown = CliRunner().invoke(app, ["inspect", str(tmp_path / name)]).output
        assert f"unknown    {3 * times} ids for {420 * times} bytes of text ({share:.2%})" in shown


def test_a_share_of_unknown_text_is_a_share(tmp_path: Path, source: str) -> None:
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(DataError, match="--max-unknown must be a share from 0 to 1"):
            prepare(source, str(tmp_path / "out"), vocab_size=VOCAB_SIZE, max_unknown=share)


def test_with_byte_fallback_nothing_is_unknown(tmp_path: Path, source: str) -> None:
    report = prepare(source, str(tmp_path / "out"), vocab_size=VOCAB_SIZE)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": CHINESE}))
    given: dict[str, Any] = {"tokenizer": report.tokenizer, "max_unknown": 0}
    again = prepare(str(tmp_path / "b.jsonl"), str(tmp_path / "b"), **given)
    for counts in (report.counts, again.counts):
        assert (counts.unknown_ids, counts.unknown_bytes) == (0, 0)


MEMORY = """
import sys
from pathlib import Path
from megalite.corpus.corpus import open_corpus
from megalite.corpus.prepare import prepare

def peak_bytes():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in l)
    return int(line.split()[1]) << 10

def run(source):
    prepare(open_corpus(source), sys.argv[3], tokenizer=sys.argv[2], num_workers=1)

run(sys.argv[4])
before = peak_bytes()
run(sys.argv[1])
print(peak_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read through /proc")
def test_a_long_document_takes_no_more_memory_than_is_stated(tmp_path: Path, source: str) -> None:
    """Bytes that are no entry of the vocabulary take most: each is a token."""
    prepare(source, str(tmp_path / "t"), vocab_size=VOCAB_SIZE)
    path, size = tmp_path / "long.jsonl", 4 << 20
    path.write_bytes(b'{"text": "' + b"\x7f" * size + b'"}\n')
    arguments = [str(path), str(tmp_path / "t.model"), str(tmp_path / "out"), source]
    command = [sys.executable, "-c", MEMORY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 10 < int(done.stdout) / size < documents.ENCODING_FACTOR
