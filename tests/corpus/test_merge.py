"""Merging is one run over the concatenated input; what could not come from one run is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megalite.cli.data.prepare import app
from megalite.corpus import merge as merge_module
from megalite.corpus.merge import merge
from megalite.data.indexed import IndexedDataset
from megalite.data.inspection import inspect_dataset
from megalite.data.sidecar import Sidecar, read_sidecar
from megalite.errors import DataError
from tests.corpus.kit import prepare
from tests.data.kit import PROPERTY, index_bytes, write_dataset

TEXTS = [f"text number {n}\n" * (n % 4 + 1) for n in range(30)]
VOCAB_SIZE = 285


def write_lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def pair(prefix: object) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_merge_equals_one_run_over_the_concatenation(tmp_path: Path) -> None:
    whole = write_lines(tmp_path / "whole.jsonl", TEXTS)
    prepare(whole, str(tmp_path / "whole"), vocab_size=VOCAB_SIZE, num_workers=1)
    model = str(tmp_path / "whole.model")
    names = []
    for first, stop in ((0, 7), (7, 8), (8, 30)):
        part = write_lines(tmp_path / f"{first}.jsonl", TEXTS[first:stop])
        names.append(str(tmp_path / f"part{first}"))
        prepare(part, names[-1], tokenizer=model, num_workers=1)
    result = CliRunner().invoke(app, ["merge", *names, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "30 documents of 3 datasets" in result.output
    assert pair(tmp_path / "out") == pair(tmp_path / "whole")
    one, other = (read_sidecar(IndexedDataset(tmp_path / name)) for name in ("whole", "out"))
    assert one is not None
    assert other is not None
    kept = {"tokenizer", "source"}
    assert one.model_dump(exclude=kept) == other.model_dump(exclude=kept)
    assert one.source.text_bytes == other.source.text_bytes
    assert inspect_dataset(str(tmp_path / "out")).good
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_trained_tokenizer_goes_along(tmp_path: Path) -> None:
    whole = write_lines(tmp_path / "whole.jsonl", TEXTS)
    prepare(whole, str(tmp_path / "a"), vocab_size=VOCAB_SIZE, num_workers=1)
    merge(str(tmp_path / "out"), [str(tmp_path / "a")] * 2)
    assert (tmp_path / "out.model").read_bytes() == (tmp_path / "a.model").read_bytes()
    found = inspect_dataset(str(tmp_path / "out"))
    assert found.tokenizer == str(tmp_path / "out.model")
    assert found.shown[0].text == TEXTS[0]


@settings(PROPERTY, max_examples=15)  # each one waits for the disk
@given(
    parts=st.lists(
        st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=5), min_size=1, max_size=5
    ),
    block=st.integers(1, 4),
)
def test_any_parts_merge_to_their_concatenation(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[int]]], block: int
) -> None:
    folder = tmp_path_factory.mktemp("m")
    names = [str(write_dataset(folder / f"p{n}", part, 100)) for n, part in enumerate(parts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_module, "BLOCK", block)
        merge(str(folder / "out"), names)
    whole = write_dataset(folder / "whole", [ids for part in parts for ids in part], 100)
    assert pair(folder / "out") == pair(whole)


def test_documents_of_several_sequences_and_modes_are_kept(tmp_path: Path) -> None:
    """The document index is what mergers forget."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.bin").write_bytes(np.arange(5, dtype="<u2").tobytes())
        index = index_bytes([2, 1, 2], [0, 2, 3], modes=[0, 1, 0])
        (tmp_path / f"{name}.idx").write_bytes(index)
    merge(str(tmp_path / "out"), [str(tmp_path / "a"), str(tmp_path / "b")])
    wanted = index_bytes([2, 1, 2] * 2, [0, 2, 3, 5, 6], modes=[0, 1, 0] * 2)
    assert (tmp_path / "out.idx").read_bytes() == wanted


def changed(prefix: Path, **fields: Any) -> None:
    path = Path(f"{prefix}.json")
    sidecar = json.loads(path.read_text())
    tokenizer = {**sidecar["tokenizer"], **fields.pop("tokenizer", {})}
    path.write_text(json.dumps({**sidecar, **fields, "tokenizer": tokenizer}))


def test_datasets_that_do_not_fit_are_refused_and_nothing_is_made(
    tmp_path: Path, make: Callable[..., Path]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    for name in "abcd":
        prepare(source, str(tmp_path / name), vocab_size=VOCAB_SIZE, num_workers=1)
    changed(tmp_path / "b", tokenizer={"sha256": "0" * 64})
    changed(tmp_path / "c", vocab_size=300)
    changed(tmp_path / "d", fingerprint="0" * 64)
    wide, narrow = make([[1]], 70_000, "wide"), make([[1]], 1000, "narrow")
    before = sorted(tmp_path.iterdir())
    cases: list[tuple[Sequence[str | Path], str]] = [
        (["a", "b"], "tokenizer .sha256. differs"),
        (["a", "c"], f"vocab_size differs: {tmp_path}/a has {VOCAB_SIZE}, {tmp_path}/c has 300"),
        (["a", "d"], "fingerprint: found"),
        ([wide, narrow], "dtype differs: .* has int32, .* has uint16"),
        (["a", narrow], "sidecar .PREFIX.json. present differs"),
        (["a", "gone"], "gone.idx: no such file"),
        ([], "no dataset to merge"),
    ]
    for names, message in cases:
        with pytest.raises(DataError, match=message):
            merge(str(tmp_path / "out"), [str(tmp_path / name) for name in names])
    for out, message in [("a", "is one of the datasets"), ("c", r"c\.idx exists")]:
        with pytest.raises(DataError, match=message):
            merge(str(tmp_path / out), [str(tmp_path / "a")])
    with pytest.raises(DataError, match="cannot be written"):
        merge(f"{source}/out", [str(tmp_path / "a")])
    assert sorted(tmp_path.iterdir()) == before
    merge(str(tmp_path / "c"), [str(tmp_path / "a")], overwrite=True)
    assert pair(tmp_path / "a") == pair(tmp_path / "c")
    assert isinstance(read_sidecar(IndexedDataset(tmp_path / "c")), Sidecar)
