"""The failures of several ranks in few lines: errors that differ in the rank's own place are one.

A rank's place in a text is "rank N", with coordinates such as "(tp 1, dp 0)" if they follow, or the
device of that number ("cuda:N", "GPU N"). Works on texts only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class RankFailure(NamedTuple):
    """A rank and the reason why it ended, in one line."""

    rank: int
    text: str


def summarize(first: RankFailure | None, others: Sequence[RankFailure]) -> list[str]:
    """Lines about the failures of `others`, for printing after the `first` one.

    Ranks with the same failure share a line. A failure equal to the first one is left out; one that
    differs from it in the rank's place alone is printed as "the same".
    """
    num_ranks = Counter(failure.text for failure in others)  # by text: how many ranks have it
    if first is not None:
        num_ranks[first.text] += 1
    groups: dict[str, list[RankFailure]] = {}
    for failure in others:
        groups.setdefault(_without_place(failure, num_ranks), []).append(failure)

    lines = []
    for shared_text, members in groups.items():
        texts = list(dict.fromkeys(failure.text for failure in members))
        text = texts[0] if len(texts) == 1 else f"{texts[0]} (each of itself)"
        if first is not None and shared_text == _without_place(first, num_ranks):
            if texts == [first.text]:
                continue
            text = "the same, each of itself"
        lines.append(f"then {_rank_list(members)}: {text}")
    return lines


def _without_place(failure: RankFailure, num_ranks: Counter[str]) -> str:
    """The failure's text with this rank's place cut out, for comparing it with other ranks' texts.

    A text that another rank has literally stays as it is: its place is not this rank's own, as when
    two ranks report that "rank 0 is gone", of which one is rank 0.
    """
    if num_ranks[failure.text] > 1:
        return failure.text
    place = rf"\b(rank |cuda:|GPU ){failure.rank}\b(?: \((?:\w+ \d+(?:, )?)+\))?"
    return re.sub(place, r"\1?", failure.text)


def _rank_list(members: Sequence[RankFailure]) -> str:
    numbers = ", ".join(str(failure.rank) for failure in members)
    return f"rank{'s' if len(members) > 1 else ''} {numbers}"
