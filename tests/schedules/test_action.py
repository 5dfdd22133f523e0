"""The text form of schedules: parses back, names what it cannot read, and its digest."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ScheduleError
from megalite.schedules import Action, Schedule, build, family, lower, parse

GOLDEN = {
    ("gpipe", 2, 1, 3): """\
p=2 v=1 m=3 place=0,1
0: F0.0 F0.1 F0.2 BW0.0 BW0.1 BW0.2
1: F1.0 F1.1 F1.2 BW1.0 BW1.1 BW1.2
""",
    ("gpipe", 2, 2, 2): """\
p=2 v=2 m=2 place=0,1,0,1
0: F0.0 F0.1 F2.0 F2.1 BW2.0 BW2.1 BW0.0 BW0.1
1: F1.0 F1.1 F3.0 F3.1 BW3.0 BW3.1 BW1.0 BW1.1
""",
    ("1f1b", 4, 1, 5): """\
p=4 v=1 m=5 place=0,1,2,3
0: F0.0 F0.1 F0.2 F0.3 BW0.0 F0.4 BW0.1 BW0.2 BW0.3 BW0.4
1: F1.0 F1.1 F1.2 BW1.0 F1.3 BW1.1 F1.4 BW1.2 BW1.3 BW1.4
2: F2.0 F2.1 BW2.0 F2.2 BW2.1 F2.3 BW2.2 F2.4 BW2.3 BW2.4
3: F3.0 BW3.0 F3.1 BW3.1 F3.2 BW3.2 F3.3 BW3.3 F3.4 BW3.4
""",
    ("interleaved", 2, 2, 5): """\
p=2 v=2 m=5 place=0,1,0,1
0: F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 BW2.0 F0.3 BW2.1 F0.4 BW2.2 F2.3 BW0.0 F2.4 BW0.1 BW0.2 BW2.3\
 BW2.4 BW0.3 BW0.4
1: F1.0 F1.1 F1.2 F3.0 BW3.0 F3.1 BW3.1 F3.2 BW3.2 F1.3 BW1.0 F1.4 BW1.1 F3.3 BW1.2 F3.4 BW3.3\
 BW3.4 BW1.3 BW1.4
""",
    ("interleaved", 3, 2, 4): """\
p=3 v=2 m=4 place=0,1,2,0,1,2
0: F0.0 F0.1 F0.2 F0.3 F3.0 F3.1 F3.2 F3.3 BW3.0 BW3.1 BW3.2 BW3.3 BW0.0 BW0.1 BW0.2 BW0.3
1: F1.0 F1.1 F1.2 F1.3 F4.0 F4.1 F4.2 BW4.0 F4.3 BW4.1 BW4.2 BW4.3 BW1.0 BW1.1 BW1.2 BW1.3
2: F2.0 F2.1 F2.2 F2.3 F5.0 BW5.0 F5.1 BW5.1 F5.2 BW5.2 F5.3 BW5.3 BW2.0 BW2.1 BW2.2 BW2.3
""",
}

# The picture of ZB-H1 in the design notes (p=4, m=6), row 1.
ZB_H1_RANK_1 = (
    "F1.0 F1.1 F1.2 B1.0 F1.3 B1.1 W1.0 F1.4 B1.2 W1.1 F1.5 B1.3 W1.2 B1.4 W1.3 B1.5 W1.4 W1.5"
)

PROGRAM_2_RANKS = """\
p=2 v=1 m=3 place=0,1
0: F0.0 SF0.0 F0.1 SF0.1 RB0.0 BW0.0 F0.2 SF0.2 RB0.1 BW0.1 RB0.2 BW0.2 REDUCE0
1: RF1.0 F1.0 RF1.1 BW1.0 SB1.0 F1.1 BW1.1 RF1.2 SB1.1 F1.2 BW1.2 SB1.2 REDUCE1
"""


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_builders_give_the_golden_text(case):
    assert str(build(*case)) == GOLDEN[case]


def test_zero_bubble_rank_is_the_published_one():
    assert " ".join(map(str, family(4, 1, 6, lag=1).ranks[1])) == ZB_H1_RANK_1


def test_program_golden_text():
    assert str(lower(build("1f1b", 2, 1, 3))) == PROGRAM_2_RANKS


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.sampled_from([0.0, 1.0]))
def test_text_parses_back(p, v, m, lag):
    schedule = family(p, v, m, lag=lag)
    for value in (schedule, lower(schedule), lower(schedule.keep(["F"]))):
        assert parse(str(value)) == value
        assert parse(str(value)).digest == value.digest


def test_digest_tells_schedules_apart():
    schedules = [build("gpipe", 2, 1, 3), build("1f1b", 2, 1, 3), build("1f1b", 2, 1, 4)]
    schedules += [lower(schedules[0]), schedules[0].keep(["F"])]
    assert len({schedule.digest for schedule in schedules}) == len(schedules)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("p=1 v=1 place=0\n0: F0.0", "line 1"),
        ("p=2 v=1 m=1 place=0,1\n0: F0.0", "needs 2 lines"),
        ("p=1 v=1 m=1 place=0\n1: F0.0", "expected '0:'"),
        ("p=1 v=1 m=1 place=0\n0: F0.0 X0.0", "index 1: 'X0.0'"),
        ("p=1 v=1 m=1 place=0\n0: F0", "index 0: 'F0'"),
        ("p=1 v=1 m=1 place=0\n0: REDUCE0.1", "'REDUCE0.1'"),
    ],
)
def test_unreadable_text_is_named(text, message):
    with pytest.raises(ScheduleError, match=message):
        parse(text)


def test_uneven_placement_is_refused():
    with pytest.raises(ScheduleError, match="equally many stages"):
        Schedule(1, (0, 0, 1), ((), ()))


def test_a_schedule_is_a_value():
    first, second = build("interleaved", 3, 2, 4), build("interleaved", 3, 2, 4)
    assert first == second
    assert hash(first) == hash(second)
    assert first.stages_of(1) == (1, 4)
    assert str(Action("REDUCE", 3)) == "REDUCE3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 2, 1, 4), "gpipe, 1f1b, .*, zb-v"),
        (("1f1b", 2, 2, 4), "v=2; with v=2 use one of gpipe, interleaved"),
        (("interleaved", 2, 1, 4), "needs v >= 2"),
        (("gpipe", 2, 1, 0), "m=0"),
        (("1f1b", 0, 1, 3), "p=0"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        build(*arguments)
