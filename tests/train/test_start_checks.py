"""What a run starts from is checked before torch is imported: datasets, run folder, checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.checks import open_run
from megalite.config import RunConfig
from megalite.config.text import to_toml
from megalite.data import fingerprint
from megalite.data.sidecar import TokenizerInfo
from megalite.errors import CheckpointError, DataError
from megalite.train import start_checks
from megalite.train.run_data import open_data
from megalite.train.start_checks import require_resumable, start_problems
from tests import ROOT
from tests.data.test_vocab_and_fingerprint import with_sidecar
from tests.train.kit.runs import SEQ_LENGTH, make_config

FIXTURE = ROOT / "tests" / "fixtures" / "run"
MADE_BY = TokenizerInfo(file="a.model", sha256=hashlib.sha256(b"one").hexdigest(), trained=True)
IDS = [*range(90), *range(7 + 3 * SEQ_LENGTH)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data of 90 ids with its sidecar, and two tokenizers, the first of which made it."""
    with_sidecar(tmp_path / "data", IDS, tokenizer=MADE_BY)
    (tmp_path / "a.model").write_bytes(b"one")
    (tmp_path / "b.model").write_bytes(b"two")
    return tmp_path


def config(folder: Path, **changes: Any) -> RunConfig:
    return make_config(folder, "run", **changes)


def opened(config: RunConfig) -> str:
    """What the ranks say when they open the data."""
    with pytest.raises(DataError) as refused:
        open_data(config)
    return str(refused.value)


def test_data_that_fits_is_accepted(folder: Path) -> None:
    tokenizer = str(folder / "a.model")
    assert start_problems(config(folder, model__vocab_size=90, data__tokenizer=tokenizer)) == []


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("suffix", "at"), [(".bin", 40), (".bin", 0), (".idx", -24)])
def test_one_bit_of_the_tokens_or_of_a_document_boundary_is_refused(
    folder: Path, suffix: str, at: int
) -> None:
    with_sidecar(folder / "data", IDS[:40], IDS[40:100], IDS[100:])
    assert start_problems(config(folder)) == []
    flip_bit(folder / f"data{suffix}", at)
    (line,) = start_problems(config(folder))
    assert line == opened(config(folder))
    assert line.startswith(f"{folder}/data.json: fingerprint: found ")


def test_one_bit_that_the_fingerprint_leaves_out_is_refused_by_the_checksum(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 64)
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 4)
    monkeypatch.setattr(fingerprint, "NUM_BLOCKS", 2)
    path = folder / "data.bin"
    with_sidecar(folder / "data", IDS, checksum=_checksum_after(folder))
    assert start_problems(config(folder)) == []
    flip_bit(path, 100)
    (line,) = start_problems(config(folder))
    assert line.startswith(f"{folder}/data.json: checksum: found ")
    monkeypatch.setattr(start_checks, "CHECKED_BYTES", path.stat().st_size)  # too large to read
    assert start_problems(config(folder)) == []
    open_data(config(folder))


def _checksum_after(folder: Path) -> str:
    with_sidecar(folder / "same", IDS)
    return fingerprint.checksum_files(folder / "same.bin", folder / "same.idx")


def test_ids_beyond_the_vocabulary_and_another_tokenizer_are_told_as_the_ranks_would(
    folder: Path,
) -> None:
    small = config(folder, model__vocab_size=89)
    (line,) = start_problems(small)
    assert line == opened(small)
    assert "data.bin: holds token id 89 (largest of all 145 tokens)" in line
    other = config(folder, data__tokenizer=str(folder / "b.model"))
    (line,) = start_problems(other)
    assert line == opened(other)
    assert "did not make" in line


def test_all_sources_and_evaluation_sets_are_told_at_once(folder: Path) -> None:
    (folder / "more").mkdir()
    for name in ("web", "books", "none"):
        with_sidecar(folder / "more" / name, [99] * 9 * SEQ_LENGTH, tokenizer=MADE_BY)
    (folder / "more" / "none.json").unlink()  # so that no tokenizer is known to have made it
    settings = {
        "data__path": None,
        "data__sources": [{"path": str(folder / p)} for p in ("data", "more/web", "more/none")],
        "data__tokenizer": str(folder / "b.model"),
        "eval__interval": 2,
        "eval__sets": [{"name": "books", "path": str(folder / "more" / "books")}],
    }
    lines = start_problems(config(folder, **settings))
    assert [line.split(" ")[0].split(str(folder) + "/")[1] for line in lines] == [
        "b.model", "more/web.bin:", "b.model", "more/none.bin:", "more/books.bin:", "b.model"
    ]  # fmt: skip


def test_a_sidecar_of_other_files_refuses_nothing(folder: Path) -> None:
    path = folder / "data.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps(stated | {"max_id": 500}))
    assert start_problems(config(folder)) == []
    open_data(config(folder))
    path.write_text("{}")
    (line,) = start_problems(config(folder, data__tokenizer=str(folder / "a.model")))
    assert line == opened(config(folder))


def test_ids_beyond_the_vocabulary_are_found_without_a_sidecar(folder: Path) -> None:
    (folder / "data.json").unlink()
    small = config(folder, model__vocab_size=89)
    assert start_problems(small) == [opened(small)]


@pytest.mark.parametrize(
    "changes", [{"data__seq_length": 145}, {"data__split": (0.9, 0.1), "data__seq_length": 64}]
)
def test_sequences_that_are_too_long_for_the_data_are_told(
    folder: Path, changes: dict[str, Any]
) -> None:
    long = config(folder, **changes)
    (line,) = start_problems(long)
    assert line == opened(long)
    assert f"no sample of data.seq_length={changes['data__seq_length']}" in line
    (folder / "set").mkdir()
    with_sidecar(folder / "set" / "few", [1, 2, 3])
    short_set = config(
        folder, eval__interval=1, eval__sets=[{"name": "few", "path": str(folder / "set" / "few")}]
    )
    (line,) = start_problems(short_set)
    assert "eval set few gets 3 of 3 tokens" in line
    assert line == opened(short_set)


@pytest.mark.parametrize("damage", [b"", b"MMIDIDX\x00\x01", b"x" * 200])
def test_a_damaged_index_is_told(folder: Path, damage: bytes) -> None:
    index = folder / "data.idx"
    index.write_bytes(damage + index.read_bytes()[len(damage) :] if len(damage) == 9 else damage)
    (line,) = start_problems(config(folder))
    assert line == opened(config(folder))
    assert line.startswith(f"{index}: ")


def test_a_run_folder_that_cannot_be_used_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start_problems(config(folder)) == []
    (folder / "file").write_text("")
    run = folder / "file" / "run"
    cases = {run: f"{folder}/file is no folder", folder / "file": f"{folder}/file is no folder"}
    for path, reason in cases.items():
        there = config(folder).model_copy(update={"name": path.name, "out": str(path.parent)})
        (line,) = start_problems(there)
        assert line == (
            f"run folder {path} cannot be written: {reason}; change out={path.parent} or "
            f"name={path.name}"
        )
    (folder / "run").mkdir()
    for name, make, what in (
        ("checkpoints", Path.touch, "is no folder"), ("metrics.jsonl", Path.mkdir, "is a folder")
    ):  # fmt: skip
        make(folder / "run" / name)
        (line,) = start_problems(config(folder))
        assert f"{folder}/run/{name} {what}; change" in line
        (folder / "run" / name).rename(folder / f"{name}.away")
    monkeypatch.setattr("os.access", lambda path, mode: path != folder / "run")
    (line,) = start_problems(config(folder))
    assert f"{folder}/run may not be written to" in line


def without_torch(folder: Path, *commands: str) -> list[tuple[str, list[str]]]:
    """Exit code with whether torch was imported, and stderr, of command lines in one process."""
    code = f"""
import sys
from megalite.cli.main import app
for command in {commands!r}:
    try:
        app(command.split(" "))
    except SystemExit as stop:
        print(stop.code, "torch" in sys.modules)
        print("---", file=sys.stderr, flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=120
    )
    told = [part.strip().splitlines() for part in done.stderr.split("---\n")[:-1]]
    return list(zip(done.stdout.splitlines(), told, strict=True))


def test_the_command_line_answers_without_torch(folder: Path) -> None:
    shutil.copytree(FIXTURE, folder / "made")
    (folder / "run.toml").write_text(to_toml(config(folder)))
    (folder / "taken").write_text("")
    given = {
        "train run.toml --local model.vocab_size=89": f"{folder}/data.bin: holds token id 89 ",
        "train run.toml --local data.seq_length=500": f"{folder}/data: train gets ",
        "train run.toml --local name=taken": f"run folder {folder}/taken cannot be written: ",
        "train made.toml --local name=before": "step-00000006 was saved with other settings",
        "train made.toml --local name=before train.steps=3": "runs/before/checkpoints/step-00000006"
        " is beyond train.steps=3; raise train.steps",
    }
    (folder / "made.toml").write_text(
        'base = "made/run.toml"\nout = "made/runs"\n[data]\npath = "made/data/tiny"\n'
        'tokenizer = "made/data/tiny.model"\n[optimizer]\nbeta2 = 0.9\n'
    )
    found = without_torch(folder, *given)
    for (code, told), start in zip(found, given.values(), strict=True):
        assert code == "2 False", told
        assert any(start in line for line in told), told
    assert "error: optimizer.beta2 is 0.9, saved with 0.95" in found[3][1]
    assert any("--accept optimizer.beta2" in line for line in found[3][1])


def test_missing_files_are_left_to_others(folder: Path) -> None:
    assert start_problems(config(folder, data__tokenizer="gone.model")) == []
    (folder / "data.bin").unlink()
    assert start_problems(config(folder, model__vocab_size=5)) == []


def test_a_damaged_checkpoint_is_left_to_the_ranks_and_an_accepted_change_passes(
    folder: Path,
) -> None:
    shutil.copytree(FIXTURE, folder / "made")
    settings = ["out=made/runs", "optimizer.beta2=0.9"]
    loaded = open_run(folder / "made" / "run.toml", settings).config
    changed = loaded.model_copy(update={"out": str(folder / "made" / "runs")})
    with pytest.raises(CheckpointError, match=r"optimizer\.beta2 is 0\.9, saved with 0\.95"):
        require_resumable(changed, frozenset())
    require_resumable(changed, frozenset({"optimizer.beta2"}))

    newest = folder / "made" / "runs" / "before" / "checkpoints" / "step-00000006"
    shard = newest / "rank-00003.safetensors"
    shard.rename(folder / "away")
    require_resumable(changed, frozenset())
    (folder / "away").rename(shard)
    flip_bit(newest / "manifest.json", 200)
    require_resumable(changed, frozenset())
    require_resumable(changed.model_copy(update={"name": "another"}), frozenset())
