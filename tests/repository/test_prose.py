"""The pages are easy to read: sentences of at most 35 words, table cells of at most 200 characters.

A code span counts as one word and a link as its text. Fenced code and headings are not prose. A
list item starts a sentence; a colon or a semicolon does not end one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

MAX_WORDS, MAX_CELL = 35, 200

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_ITEM = re.compile(r"^([-*+]|\d+\.)\s+")
# The end of a sentence, unless what stands before it is an abbreviation or an ellipsis in it.
_END = re.compile(r"(?<=[.?!])[)\"”*_]*\s+")
_NOT_AN_END = re.compile(r"(\b(e\.g|i\.e|vs|No|Fig|cf|resp|approx)\.|\.\.\.)$")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of each paragraph and list item."""
    text = re.sub(r"<!--.*?-->", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    part: list[str] = []
    start, fenced = 1, False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        stripped = line.strip()
        is_fence = stripped.startswith("```")
        fenced ^= is_fence
        ends = fenced or is_fence or not stripped or stripped[0] in "|#"
        if part and (ends or _ITEM.match(stripped)):
            yield start, " ".join(part)
            part = []
        if not ends:
            start = start if part else number
            part.append(re.sub(r"^[>!]+\s*", "", _ITEM.sub("", stripped)))


def plain(text: str) -> str:
    """Markdown as it is read."""
    text = re.sub(r"`[^`]+`", "`code`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"<[^>]+>|\*\*", "", text)


def sentences(text: str) -> list[str]:
    parts: list[str] = []
    for part in _END.split(plain(text)):
        if parts and (_NOT_AN_END.search(parts[-1]) and not part[:1].isupper()):
            parts[-1] += f" {part}"
        else:
            parts.append(part)
    return parts


def long_sentences(text: str) -> list[str]:
    found = []
    for number, paragraph in paragraphs(text):
        for sentence in sentences(paragraph):
            words = len([word for word in sentence.split() if re.search(r"\w", word)])
            if words > MAX_WORDS:
                found.append(f"line {number}: {words} words: {sentence}")
    return found


def long_cells(text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", cell.strip())
                if len(shown) > MAX_CELL:
                    found.append(f"line {number}: {len(shown)} characters: {shown}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_no_long_sentence_and_no_long_cell(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = long_sentences(text) + long_cells(text)
    assert not found, "\n".join(found)


def test_where_a_sentence_ends() -> None:
    assert sentences(
        "One (two.) three ends. gloo `a.b` starts! [So](x.md) does: this; and this."
    ) == [
        "One (two.",
        "three ends.",
        "gloo `code` starts!",
        "So does: this; and this.",
    ]
    assert (
        len(sentences("Names, e.g. `a`, i.e. b, of 1.5 kinds (GPipe, 1F1B ... and more) stay."))
        == 1
    )
    assert len(sentences("The end of ... One more.")) == 2


def test_what_is_read_as_prose() -> None:
    text = "# head\n\na\nb\n* c\n  d\n1. e\n\n```bash\ncode\n```\n<!-- x\ny -->\n| f |\n> g\n"
    assert list(paragraphs(text)) == [(3, "a b"), (5, "c d"), (7, "e"), (15, "g")]


def test_what_is_too_long_is_found() -> None:
    words = " ".join(["word"] * 36)
    assert long_sentences(f"Short.\n\n* {words}.") == [f"line 3: 36 words: {words}."]
    assert long_sentences(f"* word.\n* {words[5:]}.\n\n```\n{words}\n```") == []
    assert len(long_cells(f"| a | {'x' * 201} |\n| [{'y' * 200}](link.md) |")) == 1
