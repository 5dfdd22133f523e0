"""What datasets say of themselves is held against the settings before torch is imported."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.config import RunConfig
from megalite.config.text import to_toml
from megalite.data import fingerprint
from megalite.data.sidecar import TokenizerInfo
from megalite.errors import DataError
from megalite.train import sidecar_checks
from megalite.train.run_data import open_data
from megalite.train.sidecar_checks import sidecar_problems
from tests.data.test_vocab_and_fingerprint import with_sidecar
from tests.train.kit.runs import SEQ_LENGTH, make_config

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
    assert sidecar_problems(config(folder, model__vocab_size=90, data__tokenizer=tokenizer)) == []


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("suffix", "at"), [(".bin", 40), (".bin", 0), (".idx", -24)])
def test_one_bit_of_the_tokens_or_of_a_document_boundary_is_refused(
    folder: Path, suffix: str, at: int
) -> None:
    with_sidecar(folder / "data", IDS[:40], IDS[40:100], IDS[100:])
    assert sidecar_problems(config(folder)) == []
    flip_bit(folder / f"data{suffix}", at)
    (line,) = sidecar_problems(config(folder))
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
    assert sidecar_problems(config(folder)) == []
    flip_bit(path, 100)
    (line,) = sidecar_problems(config(folder))
    assert line.startswith(f"{folder}/data.json: checksum: found ")
    monkeypatch.setattr(sidecar_checks, "CHECKED_BYTES", path.stat().st_size)  # too large to read
    assert sidecar_problems(config(folder)) == []
    open_data(config(folder))


def _checksum_after(folder: Path) -> str:
    with_sidecar(folder / "same", IDS)
    return fingerprint.checksum_files(folder / "same.bin", folder / "same.idx")


def test_ids_beyond_the_vocabulary_and_another_tokenizer_are_told_as_the_ranks_would(
    folder: Path,
) -> None:
    small = config(folder, model__vocab_size=89)
    (line,) = sidecar_problems(small)
    assert line == opened(small)
    assert "data.bin: holds token id 89 (largest of all 145 tokens)" in line
    other = config(folder, data__tokenizer=str(folder / "b.model"))
    (line,) = sidecar_problems(other)
    assert line == opened(other)
    assert "did not make" in line


def test_all_sources_and_evaluation_sets_are_told_at_once(folder: Path) -> None:
    (folder / "more").mkdir()
    for name in ("web", "books", "none"):
        with_sidecar(folder / "more" / name, [3, 99, 3], tokenizer=MADE_BY)
    (folder / "more" / "none.json").unlink()  # judged when the ranks open it
    settings = {
        "data__path": None,
        "data__sources": [{"path": str(folder / p)} for p in ("data", "more/web", "more/none")],
        "data__tokenizer": str(folder / "b.model"),
        "eval__interval": 2,
        "eval__sets": [{"name": "books", "path": str(folder / "more" / "books")}],
    }
    lines = sidecar_problems(config(folder, **settings))
    assert [line.split(" ")[0].split(str(folder) + "/")[1] for line in lines] == [
        "b.model", "more/web.bin:", "b.model", "more/books.bin:", "b.model"
    ]  # fmt: skip


def test_a_sidecar_of_other_files_refuses_nothing(folder: Path) -> None:
    path = folder / "data.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps(stated | {"max_id": 500}))
    assert sidecar_problems(config(folder)) == []
    open_data(config(folder))
    path.write_text("{}")
    (line,) = sidecar_problems(config(folder, data__tokenizer=str(folder / "a.model")))
    assert line == opened(config(folder))


def test_the_command_line_answers_without_torch(folder: Path) -> None:
    run = folder / "run.toml"
    run.write_text(to_toml(config(folder, model__vocab_size=89)))
    code = f"""
import sys
from megalite.cli.main import main
sys.argv = ["megalite", "train", {str(run)!r}, "--local"]
try:
    main()
except SystemExit as stop:
    print(stop.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "2 False\n", done.stderr
    assert done.stderr.startswith(f"error: {folder}/data.bin: holds token id 89 ")


def test_missing_files_are_left_to_others(folder: Path) -> None:
    assert sidecar_problems(config(folder, data__tokenizer="gone.model")) == []
    (folder / "data.bin").unlink()
    assert sidecar_problems(config(folder, model__vocab_size=5)) == []
