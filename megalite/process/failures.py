"""Failures of several ranks as few lines: what is one error but for each rank's own place is one.

A rank's place in a text is "rank N", with coordinates such as "(tp 1, dp 0)" if they follow, or the
device of that number. Knows texts only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

Failed = tuple[int, str]  # rank, what became of it


def retell(told: Failed | None, others: Sequence[Failed]) -> list[str]:
    """Lines on what became of `others`, after the failure `told`; what equals that is left out."""
    seen = Counter(text for _, text in others) + Counter([told[1]] if told else [])
    groups: dict[str, list[Failed]] = {}
    for failed in others:
        groups.setdefault(_shared(failed, seen), []).append(failed)
    lines = []
    for shared, members in groups.items():
        texts = list(dict.fromkeys(text for _, text in members))
        text = texts[0] if len(texts) == 1 else f"{texts[0]} (each of itself)"
        if told and shared == _shared(told, seen):
            if texts == [told[1]]:
                continue
            text = "the same, each of itself"
        lines.append(f"then {_ranks(members)}: {text}")
    return lines


def _shared(failed: Failed, seen: Counter[str]) -> str:
    """The text as other ranks may have it: as it is if one has, else without this rank's place."""
    rank, text = failed
    if seen[text] > 1:
        return text
    place = rf"\b(rank |cuda:|GPU ){rank}\b(?: \((?:\w+ \d+(?:, )?)+\))?"
    return re.sub(place, r"\1?", text)


def _ranks(members: Sequence[Failed]) -> str:
    numbers = ", ".join(str(rank) for rank, _ in members)
    return f"rank{'s' if len(members) > 1 else ''} {numbers}"
