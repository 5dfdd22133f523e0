"""Receives posted ahead: nothing else moves, every message is there in time, and nothing hangs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ScheduleError
from megalite.schedules import (
    NAMES,
    Action,
    Durations,
    Schedule,
    build,
    check_posted,
    forward_schedule,
    lower,
    parse,
    post_ahead,
)
from megalite.schedules.blocking import require_finish
from tests.schedules.kit import good
from tests.schedules.test_catalogue import chunks_of

RECEIVES = ("RF", "RB")


def receive_for(program: Schedule, action: Action) -> Action | None:
    """The receive an action waits for, found by name alone."""
    kind = {"F": "RF", "B": "RB", "BW": "RB"}.get(action.kind)
    receive = None if kind is None else Action(kind, action.stage, action.mb)
    return receive if any(receive in actions for actions in program.ranks) else None


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.data())
def test_only_receives_move_and_only_forwards(name, p, v, m, data) -> None:
    v = chunks_of(name, v)
    m = max(m, 2 * p) if name == "dualpipe-v" else m
    stage_times = st.lists(st.floats(0.05, 3.0), min_size=p * v, max_size=p * v).map(tuple)
    times = Durations(*(data.draw(stage_times) for _ in range(3)))
    program = lower(build(name, p, v, m), times)
    posted = post_ahead(program)
    check_posted(posted)
    assert good(posted, seed=m)
    for before, after in zip(program.ranks, posted.ranks, strict=True):
        for kinds in (RECEIVES, {action.kind for action in before} - set(RECEIVES)):
            assert [a for a in after if a.kind in kinds] == [a for a in before if a.kind in kinds]
        order = [action for action in before if action.kind not in RECEIVES]
        place = {action: index for index, action in enumerate(order)}
        for receive in (action for action in before if action.kind in RECEIVES):
            old, new = (
                next(
                    (place[a] for a in actions[actions.index(receive) :] if a in place), len(order)
                )
                for actions in (before, after)
            )
            assert new <= old, "never later"
        waiting = [action for action in after if receive_for(program, action)]
        for earlier, action in pairwise(waiting):
            assert after.index(receive_for(program, action)) < after.index(earlier)


def test_forwards_alone_are_posted_ahead_too() -> None:
    posted = post_ahead(lower(forward_schedule((0, 1), 3)))
    check_posted(posted)
    assert " ".join(map(str, posted.ranks[1])) == "RF1.0 RF1.1 F1.0 RF1.2 F1.1 F1.2"


def test_a_send_follows_its_action_at_once() -> None:
    posted = post_ahead(lower(build("1f1b", 4, 1, 8)))
    for actions in posted.ranks:
        for index, action in enumerate(actions):
            if action.kind in ("SF", "SB"):
                assert actions[index - 1].kind in ("F", "B", "BW")


def test_a_receive_after_its_use_or_out_of_order_is_named() -> None:
    posted = post_ahead(lower(build("1f1b", 2, 1, 4)))
    for first, second, words in (
        (Action("RF", 1, 0), Action("F", 1, 0), "F0.0 must be received before it"),
        (Action("RF", 1, 1), Action("RF", 1, 2), "channel 0->1 delivers SF0.1 here"),
    ):
        ranks = [list(actions) for actions in posted.ranks]
        here, there = ranks[1].index(first), ranks[1].index(second)
        ranks[1][here], ranks[1][there] = second, first
        broken = Schedule(posted.m, posted.place, tuple(map(tuple, ranks)))
        with pytest.raises(ScheduleError, match=words):
            check_posted(broken)


def test_posted_ahead_programs_hang_where_receives_block() -> None:
    """As on a GPU whose kernels wait in one queue: there receives stay where `lower` puts them."""
    for name, v in (("1f1b", 1), ("interleaved", 2), ("zb-v", 2)):
        program = lower(build(name, 2, v, 4))
        require_finish(program, receives_block=True)
        with pytest.raises(ScheduleError, match="hangs where sends and receives block"):
            require_finish(post_ahead(program), receives_block=True)


def test_a_receive_posted_too_late_hangs_where_sends_block() -> None:
    """Two neighbours that both send before either receives."""
    crossing = "\n".join(
        [
            "p=2 v=1 m=2 place=0,1",
            "0: F0.0 SF0.0 F0.1 SF0.1 RB0.0 BW0.0 RB0.1 BW0.1 REDUCE0",
            "1: RF1.0 F1.0 BW1.0 SB1.0 RF1.1 F1.1 BW1.1 SB1.1 REDUCE1",
        ]
    )
    program = parse(crossing)
    with pytest.raises(ScheduleError, match=r"hangs where sends block until received"):
        check_posted(program)
    check_posted(post_ahead(program))
