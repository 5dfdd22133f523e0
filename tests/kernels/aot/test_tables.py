"""The committed table of tiles and block sizes: complete, sound, shown by machine code, shipped."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megalite.kernels.errors import BackendError
from megalite.kernels.triton import tables
from megalite.kernels.triton.table_check import NEEDS
from tests import ROOT

STATIC = ROOT / "benchmarks" / "results" / "static_sm90.jsonl"
ENTRIES = [(name, entry) for name in NEEDS for entry in tables.entries(name)]
SIZES = {
    "queries",
    "keys",
    "elements",
    "block",
    "rows",
    "columns",
    "inner",
    "tokens",
    "pairs",
    "warps",
}
OTHERS = {"stages", "programs_per_sm", "one_pass", "two_loops_since"}


def static_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in STATIC.read_text(encoding="utf-8").splitlines()]


def jit_name(kernel: str) -> str:
    short = kernel.removeprefix("attention_").removeprefix("cross_entropy_")
    return f"{short}_kernel"


@pytest.mark.parametrize(("kernel", "entry"), ENTRIES)
def test_an_entry_is_sound_and_says_where_it_is_from(kernel: str, entry: dict[str, Any]) -> None:
    assert set(entry) - {"static"} == {"when", "use", "chosen"}
    use = entry["use"]
    assert set(use) <= SIZES | OTHERS
    assert all(use[name] & (use[name] - 1) == 0 < use[name] for name in SIZES & set(use))
    assert 1 <= use["warps"] <= 32
    if "static" not in entry:
        assert entry["chosen"].startswith("rule: ")
        return
    shown = [row for row in static_rows() if row["kernel"] == jit_name(kernel)]
    for case in entry["static"]:
        assert {row["warps"] for row in shown if row["case"] == case} == {use["warps"]}, case
        versions = {row["triton"] for row in shown if row["case"] == case}
        assert versions == {row["triton"] for row in static_rows()}


def test_every_row_of_machine_code_belongs_to_one_entry() -> None:
    claimed = [
        (case, jit_name(kernel)) for kernel, entry in ENTRIES for case in entry.get("static", ())
    ]
    assert len(claimed) == len(set(claimed))
    known = {jit_name(kernel) for kernel, _ in ENTRIES}
    shown = {(row["case"], row["kernel"]) for row in static_rows() if row["kernel"] in known}
    assert shown == set(claimed)


def test_the_last_entry_of_a_kernel_is_the_rule_for_all_other_shapes() -> None:
    for kernel in NEEDS:
        *conditional, last = tables.entries(kernel)
        assert last["when"] == {}
        assert all(entry["when"] for entry in conditional)
    odd = {"float32": False, "head_dim": 4096, "descriptors": True, "dropout": False}
    rule = tables.prepared(tables.entries("attention_dq")[-1]["use"])
    assert tables.choose("attention_dq", **odd) == rule
    assert tables.choose("norm_backward", columns=1 << 20)["one_pass"] is False
    with pytest.raises(KeyError):
        tables.choose("norm_backward")
    with pytest.raises(KeyError):
        tables.choose("norm_sideways")


@pytest.mark.parametrize("columns", [1, 37, 512, 2048, 2049, 4096, 8191, 8192, 8193, 16384])
def test_norms_hold_sixteen_elements_a_thread(columns: int) -> None:
    padded = 1 << (columns - 1).bit_length()
    forward = tables.choose("norm_forward", columns=columns)
    backward = tables.choose("norm_backward", columns=columns)
    assert forward["warps"] == backward["warps"] == min(32, max(4, padded // 512))
    assert forward["elements"] == 512 * forward["warps"]
    assert backward["programs_per_sm"] == max(1, 16 // backward["warps"])
    assert backward["one_pass"] == (columns <= 8192)


def test_what_is_chosen_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        tables.choose("swiglu")["block"] = 2  # type: ignore[index]


def test_the_hash_is_of_the_content_not_of_its_spelling() -> None:
    table = json.loads(tables.TABLE.read_text(encoding="utf-8"))
    backwards = dict(reversed(table.items()))
    text = json.dumps(backwards, sort_keys=True, separators=(",", ":"))
    assert tables.table_hash() == hashlib.sha256(text.encode()).hexdigest()


def removed(table: Any) -> str:
    del table["kernels"]["adamw"]
    return "no entries for adamw"


def unknown(table: Any) -> str:
    table["kernels"]["adam"] = []
    return "adam is no kernel"


def emptied(table: Any) -> str:
    table["kernels"]["rope"] = []
    return "rope: expected a list of"


def renamed(table: Any) -> str:
    use = table["kernels"]["swiglu"][0]["use"]
    use["blocks"] = use.pop("block")
    return "swiglu, entry 0: no block; swiglu, entry 0: blocks is not used"


def odd(table: Any) -> str:
    table["kernels"]["cast"][0]["use"].update(block=1000, warps="4")
    return "block=1000, expected a power of two; cast, entry 0: warps='4', expected a power of two"


def conditional(table: Any) -> str:
    table["kernels"]["dropout"][0]["when"] = {"rows": 3}
    return "last entry has conditions, expected none; dropout, entry 0: condition rows=3; known: no"


def bare(table: Any) -> str:
    table.pop("kernels")
    return "expected {"


@pytest.mark.parametrize("change", [removed, unknown, emptied, renamed, odd, conditional, bare])
def test_a_broken_table_is_told_by_file_and_place(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = json.loads(tables.TABLE.read_text(encoding="utf-8"))
    told = change(table)
    path = tmp_path / "sm90.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    monkeypatch.setattr(tables, "TABLE", path)
    with pytest.raises(BackendError, match=f"{path}: .*{re.escape(told)}.*; restore the file"):
        tables._table.__wrapped__()


def test_a_table_that_ends_early_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sm90.json"
    path.write_bytes(tables.TABLE.read_bytes()[:500])
    for bad in (path, tmp_path / "absent.json"):
        monkeypatch.setattr(tables, "TABLE", bad)
        with pytest.raises(BackendError, match=f"{bad} cannot be read: .*; restore the file"):
            tables._table.__wrapped__()


def test_every_kernel_of_the_table_is_checked() -> None:
    assert set(NEEDS) == set(json.loads(tables.TABLE.read_text(encoding="utf-8"))["kernels"])
