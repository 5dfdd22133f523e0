"""Failures of several ranks in few lines."""

from __future__ import annotations

import pytest

from megalite.process.failures import RankFailure, summarize

LOST = "RuntimeError: rank {} (tp {}, dp 0) has no tokens on cuda:{}"


def lost(*ranks: int) -> list[RankFailure]:
    return [RankFailure(rank, LOST.format(rank, rank, rank)) for rank in ranks]


@pytest.mark.parametrize(
    ("first", "others", "lines"),
    [
        (None, [], []),
        ((1, "a"), [(0, "a"), (2, "a")], []),
        ((1, "a"), [(0, "b"), (2, "b"), (3, "c")], ["then ranks 0, 2: b", "then rank 3: c"]),
        (lost(1)[0], lost(0, 2), ["then ranks 0, 2: the same, each of itself"]),
        (None, lost(0, 2), [f"then ranks 0, 2: {lost(0)[0][1]} (each of itself)"]),
        # Of another rank, of another matter, and three that report the same of one of them.
        ((1, "rank 1 is lost"), [(2, "rank 3 is lost")], ["then rank 2: rank 3 is lost"]),
        (
            (1, "rank 1 (no memory)"),
            [(0, "rank 0 (no tokens)")],
            ["then rank 0: rank 0 (no tokens)"],
        ),
        (
            (1, "rank 11 of 12 fails"),
            [(11, "rank 11 of 12 fails"), (2, "rank 21 of 12 fails")],
            ["then rank 2: rank 21 of 12 fails"],
        ),
        (
            None,
            [(0, "rank 0 is gone"), (1, "rank 0 is gone"), (2, "x")],
            ["then ranks 0, 1: rank 0 is gone", "then rank 2: x"],
        ),
    ],
)
def test_what_differs_in_the_own_place_alone_is_told_once(
    first: tuple[int, str] | None, others: list[tuple[int, str]], lines: list[str]
) -> None:
    failed = None if first is None else RankFailure(*first)
    assert summarize(failed, [RankFailure(*other) for other in others]) == lines
