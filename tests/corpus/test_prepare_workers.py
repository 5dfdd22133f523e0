"""Parallel and interrupted runs: the files are always those of one quiet run in one process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus import encode_pool, sources
from megalite.corpus.documents import CorpusChunk, TextForm
from megalite.corpus.encode_pool import EncodePool, Worker
from megalite.corpus.encoding import Encoder
from megalite.corpus.prepare import PrepareReport
from megalite.corpus.unfinished import Chunks, Unfinished
from megalite.data.indexed import IndexedDataset
from megalite.data.tokenizer import open_tokenizer
from megalite.errors import DataError
from tests.corpus.kit import make_tokenizer, prepare

BAD = [b"{", b'{"text": null}', b'{"text": " "}', b'{"text": "a\\u0000"}', b'{"t": 1}', b"\xff"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, and a folder with good and bad documents in two files."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "in").mkdir()
    good = [f"document {n}\n" + "some text of no interest, é\n" * (n % 9) for n in range(240)]
    lines = [json.dumps({"text": text}).encode() for text in good]
    for n, bad in enumerate(BAD * 4):
        lines.insert(9 * n + 5, bad)
    (folder / "in" / "a.jsonl").write_bytes(b"\n".join(lines[:150]))
    (folder / "in" / "b.jsonl").write_bytes(b"\r\n".join(lines[150:]))
    (folder / "in" / "c.txt").write_text("the last document")
    make_tokenizer(
        str(folder / "in"),
        str(folder / "t.model"),
        vocab_size=290,
        model_type="bpe",
        policy="skip",
        suffixes=[".jsonl", ".txt"],
    )
    return folder


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1500)


def run(work: Path, out: Path, **options: Any) -> PrepareReport:
    given = {"tokenizer": str(work / "t.model"), "policy": "skip", "num_workers": 1, **options}
    return prepare(str(work / "in"), str(out), suffixes=[".jsonl", ".txt"], **given)


def files(prefix: Path) -> list[bytes]:
    """What a run leaves; the sidecar without the name of the tokenizer."""
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".json")]


@pytest.fixture(scope="module")
def quiet(work: Path) -> tuple[list[bytes], PrepareReport]:
    report = run(work, work / "quiet")
    assert report.sidecar.num_documents == 241
    return files(work / "quiet"), report


def test_any_number_of_workers_makes_the_same_files_and_report(
    work: Path, quiet: tuple[list[bytes], PrepareReport], tmp_path: Path
) -> None:
    for workers in (2, 5):
        report = run(work, tmp_path / "out", num_workers=workers)
        assert files(tmp_path / "out") == quiet[0]
        assert report.counts.corpus == quiet[1].counts.corpus
        assert report.counts.round_trips == report.counts.round_trips_exact > 0
    assert report.counts.corpus.skipped.total() == 4 * len(BAD)
    assert report.counts.corpus.skipped["missing key 'text'"] == 4
    assert report.counts.corpus.places[0] == f"{work}/in/a.jsonl:6: broken JSON"
    assert report.counts.corpus.noticed["CRLF line ends"] > 100


@settings(deadline=None, derandomize=True, max_examples=12)  # each one waits for the disk
@given(
    texts=st.lists(
        st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40
        ).filter(lambda text: text.strip() and not text.startswith("\ufeff")),
        min_size=1,
        max_size=9,
    ),
    chunk_bytes=st.integers(8, 200),
    crlf=st.booleans(),
)
def test_every_document_is_the_library_on_it_whole_and_one_end_id(
    work: Path,
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    chunk_bytes: int,
    crlf: bool,
) -> None:
    folder = tmp_path_factory.mktemp("d")
    lines = [json.dumps({"text": text}) for text in [*texts, "a </s> b <s> <pad>"]]
    (folder / "a.jsonl").write_bytes(("\r\n" if crlf else "\n").join(lines).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
        prepare(
            str(folder / "a.jsonl"),
            str(folder / "out"),
            tokenizer=str(work / "t.model"),
            num_workers=1,
        )
    library = sentencepiece.SentencePieceProcessor(model_file=str(work / "t.model"))
    data = IndexedDataset(folder / "out")
    found = [data.sequence(n).tolist() for n in range(data.num_documents)]
    end = library.eos_id()
    assert found == [[*library.encode(json.loads(line)["text"]), end] for line in lines]
    assert all(row.count(end) == 1 for row in found)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_limit_of_bytes_cuts_alike_at_any_number_of_workers(
    work: Path, tmp_path: Path, workers: int
) -> None:
    limit = 9000
    report = run(work, tmp_path / "out", num_workers=workers, max_bytes=limit)
    assert report.counts.corpus.reached_max_bytes
    assert limit - 4 < report.sidecar.source.text_bytes <= limit
    cut = IndexedDataset(tmp_path / "out")
    part = cut.read(0, cut.num_tokens)
    whole = IndexedDataset(work / "quiet").read(0, cut.num_tokens)
    same = int((part[:-1] == whole[:-1]).sum())
    assert same > len(part) - 40  # all but the cut document


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_bad_document_in_order_is_the_one_told(
    work: Path, tmp_path: Path, workers: int
) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:6: broken JSON"):
        run(work, tmp_path / "out", num_workers=workers, policy="fail")
    assert not list(tmp_path.iterdir())
    report = run(work, tmp_path / "out", num_workers=workers, policy="fail", max_bytes=50)
    assert report.counts.corpus.reached_max_bytes  # before that line


INTERRUPT = """
import os, sys
from megalite.corpus import prepare as module, sources
from megalite.corpus.corpus import open_corpus
from megalite.corpus.unfinished import Chunks
sources.CHUNK_BYTES = 1500
where, calls, number, workers = sys.argv[1], *map(int, sys.argv[2:5])
owner = os if where == "replace" else Chunks
before = getattr(owner, where)
def counted(*arguments):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), number)
    return before(*arguments)
setattr(owner, where, counted)
corpus = open_corpus(sys.argv[5], policy="skip", suffixes=[".jsonl", ".txt"])
module.prepare(corpus, sys.argv[6], tokenizer=sys.argv[7], num_workers=workers)
"""


@pytest.mark.parametrize(
    ("where", "calls", "number", "workers"),
    [
        ("append", 6, signal.SIGKILL, 2),
        ("append", 3, signal.SIGTERM, 1),
        ("seal", 1, signal.SIGKILL, 1),
        ("replace", 3, signal.SIGKILL, 1),  # .bin has its name already, .json has not
    ],
)
def test_an_interrupted_run_leaves_nothing_loadable_and_continues(
    work: Path,
    quiet: tuple[list[bytes], PrepareReport],
    tmp_path: Path,
    where: str,
    calls: int,
    number: int,
    workers: int,
) -> None:
    out = tmp_path / "out"
    arguments = [where, str(calls), str(int(number)), str(workers), str(work / "in"), str(out)]
    command = [sys.executable, "-c", INTERRUPT, *arguments, str(work / "t.model")]
    assert subprocess.run(command, check=False).returncode == -number
    with pytest.raises(DataError, match="no such file"):
        IndexedDataset(out)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"out.unfinished", "out.bin"} if where == "replace" else {"out.unfinished"})
    report = run(work, out, num_workers=2)
    assert report.num_kept_documents > 0
    assert files(out) == quiet[0]
    assert report.counts.corpus == quiet[1].counts.corpus
    assert not Path(f"{out}.unfinished").exists()


def interrupt(work: Path, out: Path, chunks: int, **options: Any) -> None:
    """Run until so many chunks are done, in this process."""
    before = Chunks.append

    def append(self: Chunks, encoded: Any) -> None:
        if self.num_chunks == chunks:
            raise KeyboardInterrupt
        before(self, encoded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chunks, "append", append)
        with pytest.raises(KeyboardInterrupt):
            run(work, out, **options)


@settings(deadline=None, derandomize=True, max_examples=15)
@given(
    name=st.sampled_from(["ids", "lengths", "record", "options.json"]),
    at=st.floats(0, 1),
    cut=st.booleans(),
)
def test_damage_to_what_was_kept_never_reaches_the_result(
    work: Path,
    quiet: tuple[list[bytes], PrepareReport],
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    at: float,
    cut: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", 1500)
        out = tmp_path_factory.mktemp("d") / "out"
        interrupt(work, out, 6)
        path = Path(f"{out}.unfinished") / name
        content = bytearray(path.read_bytes())
        place = min(int(at * len(content)), len(content) - 1)
        content[place] ^= 0x15
        path.write_bytes(content[:place] if cut else content)
        report = run(work, out)
    assert files(out) == quiet[0]
    assert report.counts.corpus == quiet[1].counts.corpus


def test_damage_to_the_words_of_a_kept_report_is_seen(
    work: Path, quiet: tuple[list[bytes], PrepareReport], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    interrupt(work, out, 6)
    record = Path(f"{out}.unfinished") / "record"
    record.write_bytes(record.read_bytes().replace(b"broken JSON", b"broken JSOM", 1))
    report = run(work, out)
    assert report.counts.corpus == quiet[1].counts.corpus


def test_kept_parts_are_used_only_as_far_as_the_source_is_the_same(
    work: Path, quiet: tuple[list[bytes], PrepareReport], tmp_path: Path
) -> None:
    """Same size and same time of change: the content tells."""
    path = work / "in" / "a.jsonl"
    content, status = path.read_bytes(), path.stat()
    interrupt(work, tmp_path / "out", 9)
    path.write_bytes(content.replace(b"document 60", b"document XY"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    try:
        report = run(work, tmp_path / "out")
        run(work, tmp_path / "fresh")
    finally:
        path.write_bytes(content)
    assert 0 < report.num_kept_documents < 60
    assert files(tmp_path / "out") == files(tmp_path / "fresh") != quiet[0]


def test_what_was_done_goes_on_under_another_policy(
    work: Path, quiet: tuple[list[bytes], PrepareReport], tmp_path: Path
) -> None:
    """From fail to skip with all of it, from skip to fail up to the first bad document."""
    source = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"document {n} " * 9}) for n in range(60)]
    source.write_text("\n".join([*lines[:40], "{", *lines[40:]]))

    def go(name: str, **options: Any) -> PrepareReport:
        given = {"tokenizer": str(work / "t.model"), "num_workers": 1, **options}
        return prepare(str(source), str(tmp_path / name), **given)

    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.jsonl:41: broken JSON") as caught:
            go("out")
        assert caught.value.__notes__ == [
            f"what was done before is kept in {tmp_path}/out.unfinished; once that is mended, the "
            "same command goes on"
        ]
    assert 20 < go("out", policy="skip").num_kept_documents <= 40
    go("fresh", policy="skip")
    assert files(tmp_path / "out") == files(tmp_path / "fresh")
    interrupt(work, tmp_path / "back", 9)
    with pytest.raises(DataError, match=r"a\.jsonl:6: broken JSON"):
        run(work, tmp_path / "back", policy="fail")
    assert run(work, tmp_path / "back").num_kept_documents > 0
    assert files(tmp_path / "back") == quiet[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"key": "body"}, "holds no document"), ({"max_bytes": 1}, "leaves no text")],
)
def test_chunks_without_a_document_are_not_kept(
    work: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "\u00e9 a line of some length"}\n' * 200)
    given = {"tokenizer": str(work / "t.model"), "policy": "skip", "num_workers": 1, **options}
    with pytest.raises(DataError, match=message) as caught:
        prepare(str(source), str(tmp_path / "out"), **given)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    assert not hasattr(caught.value, "__notes__")


def test_the_first_documents_are_checked_wherever_they_are(work: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("{\n" * 2000 + '{"text": "a line"}\n' * 9)
    given: dict[str, Any] = {"tokenizer": str(work / "t.model"), "policy": "skip"}
    for workers in (1, 2):
        report = prepare(str(source), str(tmp_path / "out"), num_workers=workers, **given)
        assert report.counts.round_trips == report.counts.round_trips_exact == 9


def test_other_options_start_over(work: Path, tmp_path: Path) -> None:
    interrupt(work, tmp_path / "out", 9)
    report = run(work, tmp_path / "out", max_bytes=3000)
    assert (report.num_kept_documents, report.started_over) == (0, True)
    run(work, tmp_path / "fresh", max_bytes=3000)
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


def test_restart_drops_what_was_done(
    work: Path, quiet: tuple[list[bytes], PrepareReport], tmp_path: Path
) -> None:
    interrupt(work, tmp_path / "out", 9)
    report = run(work, tmp_path / "out", restart=True)
    assert (report.num_kept_documents, report.started_over) == (0, False)
    assert files(tmp_path / "out") == quiet[0]


def test_a_mistake_in_between_loses_nothing(work: Path, tmp_path: Path) -> None:
    interrupt(work, tmp_path / "out", 9)
    with pytest.raises(DataError, match="largest feasible"):
        run(work, tmp_path / "out", tokenizer=None, vocab_size=50_000)
    with pytest.raises(DataError, match="missing key 'body'") as caught:
        run(work, tmp_path / "out", key="body", policy="fail")
    assert caught.value.__notes__ == [
        f"{tmp_path}/out.unfinished still holds what an interrupted run has done"
    ]
    hidden, path = work / "in" / "a.hidden", work / "in" / "a.jsonl"
    path.rename(hidden)
    path.symlink_to("nowhere")
    try:
        with pytest.raises(DataError, match=r"a\.jsonl: cannot be read"):
            run(work, tmp_path / "out")
    finally:
        hidden.rename(path)
    assert run(work, tmp_path / "out").num_kept_documents > 0


def test_a_mended_document_is_all_that_is_done_again(work: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    good = b'{"text": "a line"}\n'
    source.write_bytes(good * 500 + b"{\n" + good * 10)
    options: dict[str, Any] = {"tokenizer": str(work / "t.model"), "num_workers": 1}
    with pytest.raises(DataError, match=r"a\.jsonl:501: broken JSON"):
        prepare(str(source), str(tmp_path / "out"), **options)
    source.write_bytes(good * 511)
    report = prepare(str(source), str(tmp_path / "out"), **options)
    assert 400 < report.num_kept_documents <= 500
    assert report.sidecar.num_documents == 511


def test_a_trained_tokenizer_is_kept_and_a_changed_source_found_out(
    work: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"tokenizer": None, "vocab_size": 290}
    run(work, tmp_path / "fresh", **options)
    interrupt(work, tmp_path / "out", 4, **options)
    kept = Path(f"{tmp_path}/out.unfinished/tokenizer.model").stat().st_mtime_ns
    path = work / "in" / "c.txt"
    status = path.stat()
    path.write_text("The last document")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    try:
        with pytest.raises(DataError, match="changed after the tokenizer was trained on it"):
            run(work, tmp_path / "out", **options)
    finally:
        path.write_text("the last document")
    assert not Path(f"{tmp_path}/out.unfinished").exists()
    interrupt(work, tmp_path / "out", 4, **options)
    again = Path(f"{tmp_path}/out.unfinished/tokenizer.model").stat().st_mtime_ns
    run(work, tmp_path / "out", **options)
    assert again > kept
    fresh, out = (Path(f"{tmp_path}/{name}.model").read_bytes() for name in ("fresh", "out"))
    assert fresh == out
    assert files(tmp_path / "out")[:2] == files(tmp_path / "fresh")[:2]


@pytest.mark.parametrize("place", ["file/out", "/proc/nowhere/out", "folder"])
def test_an_impossible_place_is_refused_before_the_tokenizer_is_trained(
    work: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.bin").mkdir()
    monkeypatch.setattr("megalite.corpus.prepare_tokenizer.train_tokenizer", None)
    with pytest.raises(DataError, match=r"cannot be written|in the way of a file"):
        run(work, tmp_path / place, tokenizer=None, vocab_size=290)


def test_two_runs_for_one_dataset_at_once_are_refused(work: Path, tmp_path: Path) -> None:
    with (
        Unfinished(tmp_path / "out"),
        pytest.raises(DataError, match="another run is making this dataset"),
    ):
        run(work, tmp_path / "out")


def test_a_file_system_without_locks_costs_a_warning(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    run(work, tmp_path / "out")
    assert Path(f"{tmp_path}/out.idx").exists()
    assert capfd.readouterr().err.startswith(
        f"warning: {tmp_path}/out.unfinished/lock cannot be locked (No locks available): this file "
    )


def test_nothing_is_taken_behind_a_chunk_that_differs(work: Path, tmp_path: Path) -> None:
    interrupt(work, tmp_path / "out", 9)
    with Unfinished(tmp_path / "out") as unfinished:
        options = unfinished.read_json("options.json")
        assert options is not None
        digests = [
            json.loads(line.partition(b" ")[2])["entry"]["digest"]
            for line in unfinished.path("record").read_bytes().splitlines()
        ]
        chunks = unfinished.chunks(options)
        first = chunks.take(digests[0], with_skipped=True)
        assert first is not None
        assert first.digest == digests[0]
        assert chunks.take(digests[2], with_skipped=True) is None
        assert chunks.take(digests[1], with_skipped=True) is None
        assert chunks.num_chunks == 1
        ids, _, _ = chunks.seal(0)
        assert ids.stat().st_size == 2 * first.counts.num_tokens
    assert run(work, tmp_path / "out").num_kept_documents == first.counts.corpus.num_documents


def test_a_killed_worker_is_an_error_that_names_the_place(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Worker.encode

    def encode(self: Worker, chunk: Any, check: bool) -> Any:
        if chunk.path.endswith("b.jsonl"):
            self._process.kill()
        return before(self, chunk, check)

    monkeypatch.setattr(Worker, "encode", encode)
    with pytest.raises(DataError, match=r"b\.jsonl:1: an encoding process ended with .* -9"):
        run(work, tmp_path / "out", num_workers=2)
    monkeypatch.undo()
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1500)
    assert run(work, tmp_path / "out").num_kept_documents > 0


def test_a_worker_leaves_signals_to_its_parent_from_its_first_moment(work: Path) -> None:
    worker = Worker(Encoder(open_tokenizer(work / "t.model"), TextForm("text"), "skip"))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(worker._process.pid, number)
    chunk = CorpusChunk("lines", b'{"text": "a"}\n', "f", 1)
    assert worker.encode(chunk, False).entry.counts.corpus.num_documents == 1
    worker._process.send_signal(signal.SIGTERM)
    assert worker.encode(chunk, False).entry.counts.corpus.num_documents == 1
    worker.stop()


def test_only_a_few_chunks_are_read_ahead(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by what is under way, in chunks and in bytes."""
    encoder = Encoder(open_tokenizer(work / "t.model"), TextForm("text"), "skip")
    given_out = 0

    def chunks() -> Iterator[CorpusChunk]:
        nonlocal given_out
        for n in range(40):
            given_out += 1
            yield CorpusChunk("lines", b'{"text": "a"}\n' * 50, "f", 50 * n + 1)

    for held_bytes, most in ((1 << 20, 5), (1000, 2)):
        monkeypatch.setattr(encode_pool, "HELD_BYTES", held_bytes)
        given_out = 0
        with EncodePool(encoder, 2) as pool:
            for done, (chunk, encoded) in enumerate(pool.encode(chunks(), False)):
                assert chunk.first == 50 * done + 1
                assert encoded.entry.counts.corpus.num_documents == 50
                assert given_out - done <= most


def test_a_run_without_workers_leaves_no_process(work: Path) -> None:
    """Workers end with the run that started them, however that ended: their input ends."""
    encoder = Encoder(open_tokenizer(work / "t.model"), TextForm("text"), "skip")
    worker = Worker(encoder)
    worker._to.close()
    assert worker._process.wait(60) == 0
    worker.stop()
