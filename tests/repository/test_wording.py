"""Counted things in the texts of the package: "1 rank", never "1 ranks"."""

from __future__ import annotations

import ast
import re
from itertools import pairwise

import pytest

from megalite.wording import number_of
from tests import ROOT

_NOUNS = (
    "actions|bytes|chunks|documents|entries|GPUs|heads|hosts|kernels|layers|lines|microbatches|"
    "places|processes|ranks|samples|sequences|stages|steps|tensors|tokens|workers"
)
_COUNTED = re.compile(rf"[\"']? ((pipeline|skipped|other|more|long|unknown) )?({_NOUNS})\b")

# Numbers that are never 1, and values that are no whole numbers, by what stands in the braces.
_NEVER_ONE = {
    "HEADER.size", "MAX_DOCUMENT_BYTES", "MAX_VOCAB_SIZE", "SCAN_BLOCK",
    "device.gpus_per_node", "parallel.vpp", "settings.interval", "settings.keep_every",
    "kernels", "self.pp.size", "tokens", "needed", "columns",
    "len(names) - _MOST_HOSTS", "_multiples_near(world_size, replica)", "counts.round_trips",
    "self.data.num_tokens", "_text(value)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "noun", "text"),
    [
        (1, "rank", "1 rank"),
        (0, "rank", "0 ranks"),
        (2, "microbatch", "2 microbatches"),
        (3, "process", "3 processes"),
        (2, "entry", "2 entries"),
        (2, "key", "2 keys"),
        (1, "unknown id", "1 unknown id"),
    ],
)
def test_a_number_stands_with_its_noun(value: int, noun: str, text: str) -> None:
    assert number_of(value, noun) == text


def test_large_numbers_have_commas_where_asked() -> None:
    assert number_of(1234, "token", ",") == "1,234 tokens"


def test_texts_count_by_the_one_function() -> None:
    found = []
    for path in sorted((ROOT / "megalite").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.JoinedStr):
                continue
            for value, text in pairwise(node.values):
                if not (isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant)):
                    continue
                spec = "" if value.format_spec is None else ast.unparse(value.format_spec)
                source = ast.unparse(value.value)
                is_count = spec in ("", "f','") and source not in _NEVER_ONE
                if is_count and _COUNTED.match(str(text.value)) and "short_count" not in source:
                    found.append(f"{path.name}:{node.lineno}: {{{source}}}{str(text.value)[:30]}")
    assert found == []
