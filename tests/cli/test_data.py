"""The data verbs as a user meets them: exit codes, lines, the bar on a terminal, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.corpus import sources
from megalite.data.indexed import IndexedDataset
from megalite.data.tokenizer import open_tokenizer

TEXTS = [f"text number {n}\n" * (n % 5 + 1) for n in range(60)]
BAD_LINES = (b"x" * 999 + b"\n") * 1200  # more than one chunk
MAIN = [sys.executable, "-c", "from megalite.cli.main import main; main()"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def train(source: Path, out: Path, *more: object) -> tuple[int, str, str]:
    return invoke("tokenizer", source, "--out", out, "--vocab-size", 284, *more)


def test_a_tokenizer_is_trained_reported_and_used(source: Path, tmp_path: Path) -> None:
    with source.open("a") as stream:
        stream.write(json.dumps({"text": "long line " * 1000}) + "\n{\n")
    out = tmp_path / "sub" / "t.model"
    code, stdout, _ = train(source, out, "--on-bad", "skip", "--model-type", "unigram")
    assert code == 0
    total = sum(len(line) for text in TEXTS for line in text.split("\n")) + 10_000
    for part in (
        "documents  61 ",
        "broken JSON: 1",
        f"{source}:62: broken JSON",
        f"1 long line split ({10_000 / total:.2%} of bytes)",
        f"wrote      {out} (284 entries)",
    ):
        assert part in stdout
    assert [path.name for path in out.parent.iterdir()] == ["t.model"]
    prefix = tmp_path / "out"
    options = ["--on-bad", "skip", "--tokenizer", out, "--workers", 1]
    code, stdout, _ = invoke("prepare", source, "--out", prefix, *options)
    assert code == 0
    assert f"tokenizer  {out} (284 entries)" in stdout
    tokenizer = open_tokenizer(out)
    found = IndexedDataset(prefix).sequence(60).tolist()
    assert found == [*tokenizer.encode("long line " * 1000), tokenizer.eos_id]


def test_a_tokenizer_that_cannot_be_made_leaves_nothing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.model"
    before = sorted(tmp_path.iterdir())
    cases: list[tuple[list[object], str]] = [
        (["--vocab-size", 5000], "largest feasible is"),
        (["--vocab-size", 100], "must be at least 261"),
        (["--sample-bytes", 0], "sample_bytes=0"),
        (["--key", "body"], "missing key 'body'"),
        (["--out", f"{source}/t.model"], "cannot be written"),
        (["--out", source], f"{source} exists"),
    ]
    for more, message in cases:
        code, _, stderr = train(source, out, *more)
        assert (code, stderr.startswith("error: ")) == (2, True)
        assert message in stderr.splitlines()[0]
    assert sorted(tmp_path.iterdir()) == before


def test_exit_codes_and_lines_of_prepare(source: Path, tmp_path: Path) -> None:
    train(source, tmp_path / "t.model")
    with source.open("a") as stream:
        stream.write('{"body": "x"}\n')
    arguments = ["--tokenizer", tmp_path / "t.model", "--workers", 1, "--out", tmp_path / "out"]
    code, _, stderr = invoke("prepare", source, *arguments)
    assert code == 2
    assert stderr.startswith(f"error: {source}:61: missing key 'text'; ")
    assert stderr.count("\n") == 1
    code, stdout, _ = invoke("prepare", source, *arguments, "--on-bad", "skip")
    assert code == 0
    assert "skipped    1 document (missing key 'text': 1)" in stdout
    code, _, stderr = invoke("prepare", source, *arguments, "--on-bad", "skip")
    assert code == 2
    assert f"{tmp_path}/out.idx exists" in stderr
    code, _, stderr = invoke("prepare", source, *arguments, "--overwrite", "--workers", 0)
    assert code == 2
    assert "num_workers=0" in stderr


def test_the_files_of_a_folder_are_reported_before_anything_is_read(
    source: Path, tmp_path: Path
) -> None:
    train(source, tmp_path / "t.model")
    (tmp_path / "README.md").write_text("about it")
    source.write_text("{\n")
    for verb in ("tokenizer", "prepare"):
        options = ["--out", tmp_path / "out", "--vocab-size", 284]
        code, stdout, stderr = invoke(verb, tmp_path, *options)
        assert (code, stderr.count("a.jsonl:1: broken JSON")) == (2, 1)
        assert stdout == ("files      .jsonl 1; left out 2: .md 1, .model 1; --suffix takes them\n")


def test_a_refusal_says_what_it_kept_and_either_remedy_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(source, tmp_path / "t.model")
    monkeypatch.setattr(sources, "CHUNK_BYTES", 300)
    with source.open("a") as stream:
        stream.write('{"body": "x"}\n')
    out = tmp_path / "out"
    arguments = ["prepare", source, "--tokenizer", tmp_path / "t.model", "--out", out]
    arguments += ["--workers", 1]
    kept = f"note: what was done before is kept in {out}.unfinished; once that is mended, the same"
    cases: list[tuple[list[object], str]] = [
        ([], f"{kept} command goes on\n"),
        (["--workers", 0], ""),
        (["--key", "t"], f"note: {out}.unfinished still holds what an interrupted run has done\n"),
        (["--restart"], f"{kept} command without --restart goes on\n"),
    ]
    for more, says in cases:
        code, _, stderr = invoke(*arguments, *more)
        assert code == 2
        assert stderr.startswith("error: ")
        assert stderr.splitlines(keepends=True)[-1] == says or not says
    code, stdout, _ = invoke(*arguments, "--on-bad", "skip")
    assert code == 0
    assert "continued  " in stdout
    assert not Path(f"{out}.unfinished").exists()


@pytest.mark.long
def test_progress_is_shown_on_a_terminal_only(source: Path, tmp_path: Path) -> None:
    train(source, tmp_path / "t.model")
    source.write_bytes(BAD_LINES + source.read_bytes())
    options = ["--tokenizer", str(tmp_path / "t.model"), "--workers", "1", "--overwrite"]
    options += ["--on-bad", "skip"]
    command = [*MAIN, "data", "prepare", str(source), "--out", str(tmp_path / "out"), *options]
    ours, theirs = pty.openpty()
    done = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, check=True)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # all is read, and no one writes
            break
        if not part:
            break
        shown += part
    os.close(ours)
    for part in (b"encoding", b"MB", b"B/s", b"M tokens", b"ETA"):
        assert part in shown
    quiet = subprocess.run(command, capture_output=True, check=True)
    assert quiet.stderr == b""
    assert quiet.stdout.splitlines()[0] == done.stdout.splitlines()[0]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_command_says_so_and_the_same_command_goes_on(
    source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """A part of the source is a pipe without a writer, so that the command waits in the middle."""
    train(source, tmp_path / "t.model")
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    out = tmp_path / "out"
    options = ["--tokenizer", str(tmp_path / "t.model"), "--workers", "1", "--on-bad", "skip"]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(BAD_LINES + source.read_bytes())
    (folder / "b.jsonl").symlink_to(pipe)
    command = [*MAIN, "data", "prepare", str(folder), "--out", str(out), *options]
    # As at a terminal: a suite that was started in the background hands on an ignored Ctrl-C.
    running = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    record = Path(f"{out}.unfinished/record")
    while not (record.exists() and record.stat().st_size):
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(number)
    _, stderr = running.communicate(timeout=300)
    assert running.returncode == 75
    assert stderr == (
        f"{number.name}: cleans up and leaves; again: ends at once\n"
        "error: interrupted; no dataset was made\n"
        f"note: what was done is kept in {out}.unfinished; the same command goes on\n"
    )
    pipe.unlink()
    pipe.write_bytes(source.read_bytes())
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "broken JSON: 1,200" in done.stdout
    assert "documents  120" in done.stdout
    assert not Path(f"{out}.unfinished").exists()


# A library has the main thread, as in the training of a tokenizer: the lock is never free.
OCCUPIED = """
import ctypes
from megalite.cli.interrupt import interruptible
with interruptible("dataset", 75):
    lock, library = ctypes.create_string_buffer(256), ctypes.CDLL(None)
    library.pthread_mutex_lock(lock)
    try:
        print("ready", flush=True)
        library.pthread_mutex_lock(lock)
    except KeyboardInterrupt:  # the first signal came before the call
        library.pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGHUP)]
)
def test_a_second_signal_ends_at_once_whatever_has_the_main_thread(
    numbers: tuple[signal.Signals, signal.Signals],
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OCCUPIED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        first, second = numbers
        process.send_signal(first)
        told = f"{first.name}: cleans up and leaves; again: ends at once\n"
        assert process.stderr.readline() == told
        process.send_signal(second)
        assert process.wait(60) == 128 + second


# The interpreter's end takes a second where threads and workers are to be joined.
LEAVING = """
import os, signal, sys, typer
from megalite.cli.interrupt import interruptible
try:
    with interruptible("dataset", 75):
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
except typer.Exit as leaving:
    for name in sys.argv[1:]:
        os.kill(os.getpid(), signal.Signals[name])
    sys.exit(leaving.exit_code)
"""


def test_a_signal_after_the_cleanup_does_not_replace_the_exit_code() -> None:
    command = [sys.executable, "-c", LEAVING, "SIGUSR1", "SIGINT", "SIGTERM", "SIGHUP"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[1:]) == (
        75,
        ["error: interrupted; no dataset was made"],
    )


def test_an_interrupted_training_of_a_tokenizer_says_that_nothing_was_made(source: Path) -> None:
    code = """
import sys, time
from megalite.corpus import prepare_tokenizer
def train(*arguments, **named):
    print("ready", flush=True)
    time.sleep(600)
prepare_tokenizer.make_tokenizer = train
from megalite.cli.main import main
main()
"""
    arguments = ["data", "tokenizer", str(source), "--out", f"{source}.model"]
    command = [sys.executable, "-c", code, *arguments, "--vocab-size", "290"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == (
        "SIGINT: cleans up and leaves; again: ends at once\n"
        "error: interrupted; no tokenizer was made\n"
    )
