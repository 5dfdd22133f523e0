"""Every schedule passes the checker, and what does not pass is named by rank, index, action."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ScheduleError
from megalite.schedules import (
    Action,
    Durations,
    Schedule,
    build,
    check_program,
    check_schedule,
    family,
    lower,
    parse,
)
from megalite.schedules.blocking import require_finish
from megalite.schedules.builders import family_peak
from megalite.schedules.memory import peak_live
from tests.schedules.kit import good

PLACE = r"rank \d+, index \d+, action [A-Z]+\d+"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 30),
    st.sampled_from(["gpipe", "1f1b", "interleaved"]),
)
def test_named_schedules_are_valid_for_any_p_v_m(p, v, m, name):
    v = 1 if name == "1f1b" else max(2, v) if name == "interleaved" else v
    schedule = build(name, p, v, m)
    check_schedule(schedule)
    if p * v * m <= 240:
        check_program(lower(schedule))
        check_program(lower(schedule.keep(["F"])), forward_only=True)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([1.0, 1.25, 1.5, 2.0]),
    st.integers(0, 3),
    st.data(),
)
def test_family_lowered_with_any_durations_is_valid(p, v, m, f, lag, data):
    stage_times = st.lists(st.floats(0.05, 3.0), min_size=p * v, max_size=p * v).map(tuple)
    f_times, b_times, w_times = (data.draw(stage_times) for _ in range(3))
    times = Durations(f_times, b_times, w_times, hop=data.draw(st.floats(0, 2)))
    schedule = family(p, v, m, f=f, lag=lag)
    peak = [family_peak(rank, p, v, m, f=f, lag=lag) for rank in range(p)]
    program = lower(schedule, times)
    check_program(program)
    assert all(live <= most for live, most in zip(peak_live(program), peak, strict=True))
    assert program.keep(["F", "B", "W"]) == schedule  # lowering moves no compute action
    assert program == lower(family(p, v, m, f=f, lag=lag), times)
    assert good(program, seed=m)


@pytest.mark.parametrize("p", [4, 6])
def test_too_long_a_warm_up_deadlocks(p):
    schedule = family(p, 2, 4 * p, f=3)
    with pytest.raises(ScheduleError, match=rf"deadlocks:\n{PLACE}\.\d+: waits for"):
        check_schedule(schedule)
    with pytest.raises(ScheduleError, match="deadlocks"):
        lower(schedule)
    check_schedule(family(p, 1, 4 * p, f=3))


def change(program, rank, edit):
    ranks = [list(actions) for actions in program.ranks]
    edit(ranks[rank])
    return Schedule(program.m, program.place, tuple(map(tuple, ranks)))


def swap(first, second):
    def edit(actions):
        i, j = actions.index(first), actions.index(second)
        actions[i], actions[j] = actions[j], actions[i]

    return edit


def test_swapped_receives_are_caught():
    """Two receives of one channel in the wrong order: tensors would be mixed up silently."""
    program = lower(build("interleaved", 2, 2, 4))
    swapped = change(program, 1, swap(Action("RF", 1, 2), Action("RF", 1, 3)))
    with pytest.raises(
        ScheduleError, match=r"rank 1, index \d+, action RF1\.3: channel 0->1 deliv"
    ):
        check_program(swapped)
    assert not good(swapped, seed=0)


def test_a_fixed_order_of_sends_and_receives_hangs_when_it_blocks():
    """Everyone sends before it receives: a hang when sends block."""
    program = parse(
        "p=2 v=2 m=2 place=0,1,0,1\n"
        "0: F0.0 F0.1 SF0.0 SF0.1 RF2.0 RF2.1 F2.0 F2.1 SF2.0 SF2.1\n"
        "1: RF1.0 F1.0 SF1.0 RF1.1 F1.1 SF1.1 RF3.0 RF3.1 F3.0 F3.1\n"
    )
    hangs = rf"hangs where sends and receives block:\n{PLACE}"
    with pytest.raises(ScheduleError, match=hangs):
        check_program(program, forward_only=True)


def test_a_receive_before_the_send_that_its_message_answers_hangs_when_it_blocks():
    text = "p=2 v=1 m=1 place=0,1\n0: {}\n1: {}\n"
    crossing = parse(
        text.format("F0.0 RB0.0 SF0.0 BW0.0 REDUCE0", "RF1.0 F1.0 BW1.0 SB1.0 REDUCE1")
    )
    require_finish(crossing, receives_block=False)
    with pytest.raises(ScheduleError) as caught:
        check_program(crossing)
    assert str(caught.value).splitlines() == [
        "the program hangs where sends and receives block:",
        "rank 0, index 1, action RB0.0: cannot go on",
        "rank 1, index 0, action RF1.0: cannot go on",
    ]


BROKEN = {
    "F0.1 F0.0 BW0.1 BW0.0 REDUCE0": r"index 3, action BW0\.0: comes after microbatch 1",
    "F0.0 BW0.0 F0.1 BW0.1": r"index 4, action REDUCE0: it is missing",
    "F0.0 BW0.0 REDUCE0 F0.1 BW0.1": r"index 3, action F0\.1: comes after REDUCE0",
    "F0.0 BW0.0 F0.1 BW0.1 REDUCE0 REDUCE0": r"index 5, action REDUCE0: REDUCE0 was already done",
    "F0.0 BW0.0 F0.1 B0.1 REDUCE0": r"index 5, action W0\.1: it is missing",
    "F0.0 BW0.0 F0.1 BW0.1 W0.1 REDUCE0": r"index 4, action W0\.1: W0\.1 was already done",
    "F0.0 BW0.0 W0.1 F0.1 B0.1 REDUCE0": r"index 2, action W0\.1: B0\.1 must come before",
    "F0.0 BW0.0 BW0.1 F0.1 REDUCE0": r"index 2, action BW0\.1: F0\.1 must come before",
    "F0.0 BW0.0 F0.1 BW0.1 F0.2 REDUCE0": r"index 4, action F0\.2: microbatch is not in 0\.\.1",
    "F0.0 BW0.0 F0.1 F1.0 BW0.1 REDUCE0": r"index 3, action F1\.0: the schedule has 1 stage",
    "F0.0 SF0.0 BW0.0 F0.1 BW0.1 REDUCE0": r"index 1, action SF0\.0: nothing in this step calls",
}


@pytest.mark.parametrize("actions", BROKEN)
def test_broken_programs_are_named(actions):
    with pytest.raises(ScheduleError, match=r"rank 0, " + BROKEN[actions]):
        check_program(parse(f"p=1 v=1 m=2 place=0\n0: {actions}\n"))


def test_wrong_rank_unknown_kind_and_memory_are_named():
    moved = Schedule(1, (0, 1), ((Action("F", 1, 0),), ()))
    with pytest.raises(
        ScheduleError, match=r"rank 0, index 0, action F1\.0: stage 1 lives on rank 1"
    ):
        check_schedule(moved)
    with pytest.raises(ScheduleError, match="kind 'X' is not one of"):
        check_schedule(Schedule(1, (0,), ((Action("X", 0, 0),),)))
    with pytest.raises(ScheduleError, match="kind 'REDUCE' is not one of"):
        check_schedule(lower(build("1f1b", 1, 1, 2)))
    schedule = build("1f1b", 3, 1, 4)
    assert peak_live(schedule) == (3, 2, 1)
    with pytest.raises(ScheduleError, match="must be received before"):
        check_program(
            parse(
                "p=2 v=1 m=1 place=0,1\n"
                "0: F0.0 SF0.0 RB0.0 BW0.0 REDUCE0\n1: F1.0 RF1.0 BW1.0 SB1.0 REDUCE1\n"
            )
        )
    with pytest.raises(ScheduleError, match="durations > 0"):
        lower(schedule, Durations.even(3, 1, w=0.0))


def rejection(program):
    try:
        check_program(program)
    except ScheduleError as error:
        return str(error)
    return None


def mutate(program, order):
    """One random slip; returns its name and the changed program."""
    rank = order.choice([r for r, actions in enumerate(program.ranks) if actions])
    size = len(program.ranks[rank])
    i, j = order.randrange(size), order.randrange(size)
    name = order.choice(["drop", "duplicate", "swap", "move", "rename"])

    def edit(actions):
        if name == "drop":
            del actions[i]
        elif name == "duplicate":
            actions.insert(j, actions[i])
        elif name == "swap":
            actions[i], actions[j] = actions[j], actions[i]
        elif name == "move":
            actions.insert(j, actions.pop(i))
        else:
            kind, _, mb = actions[i]
            other = order.randrange(program.m) if mb >= 0 else mb
            actions[i] = Action(kind, order.choice(program.stages_of(rank)), other)

    return name, change(program, rank, edit)


MUTANTS = [build("gpipe", 2, 2, 3), build("1f1b", 3, 1, 4), build("interleaved", 2, 2, 3)]
MUTANTS += [family(3, 1, 5, lag=1), family(2, 2, 4, f=2, lag=1), build("interleaved", 1, 2, 3)]


@pytest.mark.parametrize("schedule", MUTANTS, ids=range(len(MUTANTS)))
def test_no_mutant_passes_that_does_the_wrong_thing(schedule):
    program = lower(schedule)
    order = random.Random(str(schedule))
    rejected = accepted = 0
    for seed in range(250):
        name, mutant = mutate(program, order)
        if mutant == program:
            continue
        problem = rejection(mutant)
        if problem is not None:
            assert re.search(PLACE, problem), problem
            rejected += 1
            continue
        accepted += 1
        assert name in ("swap", "move"), (name, str(mutant))
        assert good(mutant, seed), str(mutant)
    assert rejected > accepted
