"""`data inspect`: counts and texts of a dataset, and a check that fails for each kind of damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.data import fingerprint
from megalite.data.inspection import inspect_dataset
from megalite.errors import DataError
from tests.corpus.kit import prepare

TEXTS = [f"text number {n}\n" * (n % 4 + 1) for n in range(30)] + ["a </s> b"]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(str(source), str(tmp_path / "out"), vocab_size=290, num_workers=1)
    return str(tmp_path / "out")


def test_a_sound_dataset_is_described(prefix: str) -> None:
    found = inspect_dataset(prefix, num_shown=2, shown_tokens=10_000)
    assert found.good
    assert [check.name for check in found.checks] == [
        "index", "fingerprint", "checksum", "tokenizer", "ids", "ends"
    ]  # fmt: skip
    assert (found.num_documents, found.dtype) == (31, "uint16")
    assert [shown.text for shown in found.shown] == TEXTS[:2]
    assert sum(count for _, _, count in found.histogram) == 31
    assert found.quantiles[0.0] <= found.quantiles[0.5] <= found.quantiles[1.0]
    result = CliRunner().invoke(app, ["data", "inspect", prefix])
    assert result.exit_code == 0
    for part in ("documents  31 in 31 sequences", "check ends: good", repr(TEXTS[0]), "50%"):
        assert part in result.output


def flip(path: str, dtype: str, at: int, value: int) -> None:
    found = np.fromfile(path, dtype)
    found[at] = value
    found.tofile(path)


@pytest.mark.parametrize(
    ("at", "value", "bad"),
    [(-1, 7, {"ends"}), (0, 2, {"ends"}), (0, 60_000, {"ids"}), (0, 7, set())],
)  # fmt: skip
def test_damaged_tokens_fail_a_check_and_the_command(
    prefix: str, at: int, value: int, bad: set[str]
) -> None:
    flip(f"{prefix}.bin", "<u2", at, value)
    found = inspect_dataset(prefix)
    assert {check.name for check in found.checks if not check.good} == bad | {
        "fingerprint",
        "checksum",
    }
    for more in ([], ["--json"]):
        result = CliRunner().invoke(app, ["data", "inspect", prefix, *more])
        assert result.exit_code == 2
        assert f"error: {prefix}: fingerprint: found" in result.stderr
    assert not json.loads(result.stdout)["sound"]


def test_json_has_the_values_of_the_text(prefix: str, make: Callable[..., Path]) -> None:
    result = CliRunner().invoke(app, ["data", "inspect", prefix, "--documents", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["prefix"] == prefix
    assert (found["num_documents"], found["num_sequences"], found["dtype"]) == (31, 31, "uint16")
    assert found["mean_tokens"] == pytest.approx(found["num_tokens"] / 31)
    assert found["quantiles"].keys() == {"0.0", "0.01", "0.1", "0.5", "0.9", "0.99", "1.0"}
    assert sum(count for _, _, count in found["histogram"]) == 31
    assert [document["text"] for document in found["shown"]] == [TEXTS[0][:64]]
    assert found["sidecar"]["vocab_size"] == 290
    assert found["sound"]
    assert all(check["good"] for check in found["checks"])
    result = CliRunner().invoke(app, ["data", "inspect", str(make([], name="none")), "--json"])
    assert json.loads(result.stdout)["sidecar"] is None


def test_a_byte_between_the_blocks_of_the_fingerprint_fails_the_checksum(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 64)
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 4)
    monkeypatch.setattr(fingerprint, "NUM_BLOCKS", 2)
    sidecar = json.loads(Path(f"{prefix}.json").read_text())
    paths = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    stated = sidecar | {"fingerprint": fingerprint.fingerprint_files(*paths)}
    Path(f"{prefix}.json").write_text(json.dumps(stated))
    assert inspect_dataset(prefix).good
    flip(f"{prefix}.bin", "<u2", 20, 7)
    found = inspect_dataset(prefix)
    assert [check.name for check in found.checks if not check.good] == ["checksum"]


def test_another_tokenizer_is_noticed(prefix: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"vocab_size": 280, "num_workers": 1}
    prepare(str(tmp_path / "a.jsonl"), str(tmp_path / "b"), **options)
    found = inspect_dataset(prefix, str(tmp_path / "b.model"))
    assert [check.name for check in found.checks if not check.good] == ["tokenizer"]


def test_data_from_elsewhere_shows_ids(make: Callable[..., Path]) -> None:
    found = inspect_dataset(str(make([[5, 6], [], [7]])))
    assert found.good
    assert [shown.text for shown in found.shown] == ["5 6", "", "7"]
    assert found.histogram == [(0, 0, 1), (1, 1, 1), (2, 3, 1)]
    assert inspect_dataset(str(make([], name="empty"))).quantiles == {}


def test_bad_settings_and_files_are_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="documents=-1"):
        inspect_dataset(prefix, num_shown=-1)
    with pytest.raises(DataError, match="no such file"):
        inspect_dataset(str(tmp_path / "gone"))
