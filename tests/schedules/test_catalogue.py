"""Every named schedule: valid for any size, as quick and as lean as it promises."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ScheduleError
from megalite.schedules import (
    NAMES,
    SCHEDULES,
    Action,
    Durations,
    Schedule,
    build,
    check_posted,
    check_program,
    check_schedule,
    family,
    fuse,
    lower,
    peak_live,
    post_ahead,
    recompute,
    simulate,
)
from megalite.schedules.catalogue import family_name
from megalite.schedules.memory import (
    MicrobatchMemory,
    memory_over_time,
    peak_deferred,
    peak_memory,
)
from tests.schedules.kit import good

EXAMPLES = settings(max_examples=40, deadline=None)
TIME = st.floats(0.5, 2.0)


def chunks_of(name: str, v: int) -> int:
    """`v`, or the nearest number of chunks that a schedule is defined for."""
    chunks = SCHEDULES[name].chunks
    enough = max(v, chunks.minimum)
    return enough if chunks.maximum is None else min(enough, chunks.maximum)


@pytest.mark.long
@settings(max_examples=120, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 3), st.integers(1, 24))
def test_every_name_is_valid_for_any_size(name: str, p: int, v: int, m: int) -> None:
    v = chunks_of(name, v)
    m = max(m, 2 * p) if name == "dualpipe-v" else m
    schedule = build(name, p, v, m)
    check_schedule(schedule)
    kinds = {action.kind for actions in schedule.ranks for action in actions}
    assert kinds <= {"F", "B", "W", "BW"}
    if name in ("gpipe", "1f1b", "eager-1f1b"):
        assert kinds == {"F", "BW"}
    if p * v * m <= 160:
        program = lower(schedule)
        check_program(program)
        assert good(program, seed=m)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.data())
def test_lowered_with_any_durations_no_name_hangs(name, p, v, m, data) -> None:
    v = chunks_of(name, v)
    m = max(m, 2 * p) if name == "dualpipe-v" else m
    stage_times = st.lists(st.floats(0.05, 3.0), min_size=p * v, max_size=p * v).map(tuple)
    f_times, b_times, w_times = (data.draw(stage_times) for _ in range(3))
    times = Durations(f_times, b_times, w_times, hop=data.draw(st.floats(0, 2)))
    check_program(lower(build(name, p, v, m), times))


# Bubble in per cent of the step at F=B=W=1 for p/m = 2/4, 4/8, 4/32, 8/16, 8/64, at c = 0 and 0.1.
SIZES = [(2, 4), (4, 8), (4, 32), (8, 16), (8, 64)]
PUBLISHED = {
    ("1f1b-early", 1, 0.0): [14.3, 20.0, 5.9, 22.6, 6.8],
    ("1f1b-early", 1, 0.1): [15.5, 21.6, 6.4, 24.3, 7.4],
    ("eager-1f1b", 1, 0.1): [21.1, 28.6, 9.1, 31.8, 10.4],
    ("interleaved-early", 2, 0.0): [7.7, 11.1, 3.0, 12.7, 3.5],
    ("interleaved-early", 4, 0.1): [9.8, 12.1, 3.3, 13.2, 3.7],
    ("zb-h1", 1, 0.1): [10.4, 14.9, 4.2, 17.0, 4.9],
    ("zb-h2", 1, 0.0): [7.7, 11.1, 3.0, 12.7, 3.5],
    ("zb-h2", 1, 0.1): [8.4, 12.1, 3.3, 13.8, 3.9],
    ("interleaved-zb", 4, 0.0): [2.0, 3.0, 0.8, 3.5, 0.9],
    ("interleaved-zb", 2, 0.1): [8.4, 11.4, 3.1, 12.9, 3.6],
    ("zb-v", 2, 0.0): [4.0, 5.9, 1.5, 6.8, 1.8],
    ("zb-v", 2, 0.1): [6.2, 10.4, 2.8, 12.4, 3.4],
    ("dualpipe-v", 2, 0.0): [4.0, 5.9, 1.5, 6.8, 1.8],
    ("dualpipe-v", 2, 0.1): [5.5, 8.4, 2.2, 11.4, 3.1],
    ("v-min", 2, 0.0): [11.1, 18.6, 5.4, 22.0, 6.6],
    ("v-min", 2, 0.1): [17.2, 28.4, 16.6, 33.4, 20.3],
}


@pytest.mark.parametrize("row", PUBLISHED, ids=str)
def test_bubbles_are_the_published_ones(row: tuple[str, int, float]) -> None:
    name, v, hop = row
    for (p, m), expected in zip(SIZES, PUBLISHED[row], strict=True):
        line = simulate(build(name, p, v, m), Durations.even(p, v, hop=hop))
        assert 100 * line.bubble_fraction == pytest.approx(expected, abs=0.0501), (row, p, m)


# Largest and smallest peak of a rank at m = 8p, in whole-rank activations, for p = 2, 4, 8, 16.
PEAKS: dict[tuple[str, int], list[tuple[float, float]]] = {
    ("gpipe", 1): [(16, 16), (32, 32), (64, 64), (128, 128)],
    ("1f1b", 1): [(2, 1), (4, 1), (8, 1), (16, 1)],
    ("eager-1f1b", 1): [(3, 1), (7, 1), (15, 1), (31, 1)],
    ("interleaved", 2): [(2.5, 1.5), (5.5, 2.5), (11.5, 4.5), (23.5, 8.5)],
    ("interleaved-early", 4): [(2, 1.75), (4, 3.25), (8, 6.25), (16, 12.25)],
    ("zb-h1", 1): [(2, 2), (4, 4), (8, 8), (16, 16)],
    ("zb-h2", 1): [(3, 3), (7, 7), (15, 15), (31, 31)],
    ("interleaved-zb", 4): [(2, 2), (4, 4), (8, 8), (16, 16)],
    ("zb-v", 2): [(2, 2), (4, 4), (8, 8), (16, 16)],
    ("dualpipe-v", 2): [(2.5, 2.5), (4.5, 4.5), (8.5, 8.5), (16.5, 16.5)],
    ("v-half", 2): [(2, 2), (3, 3), (5, 5), (9, 9)],
    ("v-min", 2): [(2, 1), (2, 2), (4, 3), (6, 6)],
}


@pytest.mark.parametrize("row", PEAKS, ids=str)
def test_memory_is_what_is_published(row: tuple[str, int]) -> None:
    name, v = row
    for p, expected in zip((2, 4, 8, 16), PEAKS[row], strict=True):
        peaks = [peak / v for peak in peak_live(build(name, p, v, 8 * p))]
        assert (max(peaks), min(peaks)) == expected, (row, p)


@EXAMPLES
@given(st.integers(2, 8), st.integers(0, 9), TIME, TIME, TIME)
def test_zero_bubble_forms(p: int, extra: int, f: float, b: float, w: float) -> None:
    m = 2 * p + extra
    times = Durations.even(p, 1, f=f, b=b, w=w)
    line = simulate(build("zb-h1", p, 1, m), times)
    assert line.bubble == pytest.approx((p - 1) * max(f, b, f + b - w))
    assert line.span_bubble == pytest.approx((p - 1) * max(b, f + b - w), abs=(p - 1) * f)
    line = simulate(build("zb-h2", p, 1, m), times)
    assert line.bubble == pytest.approx((p - 1) * max(f, b - f, f + b - 2 * w))


@EXAMPLES
@given(st.integers(2, 8), st.integers(2, 4), st.integers(0, 9), TIME, TIME, TIME)
def test_interleaved_zero_bubble_form(p, v, extra, f, b, w) -> None:
    line = simulate(
        build("interleaved-zb", p, v, 2 * p + extra), Durations.even(p, v, f=f, b=b, w=w)
    )
    assert line.bubble == pytest.approx((p - 1) * max(f, b, f + b - w) / v)


def test_equal_times_leave_the_v_schedules_no_bubble_within_their_span() -> None:
    for p in (2, 4, 8):
        for name, span in (("zb-v", 0.0), ("zb-h2", 0.0)):
            v = chunks_of(name, 2)
            line = simulate(build(name, p, v, 4 * p), Durations.even(p, v))
            assert line.span_bubble == pytest.approx(span), (name, p)


def test_v_half_is_quicker_and_leaner_than_1f1b() -> None:
    for p in (4, 8, 16):
        half = build("v-half", p, 2, 4 * p)
        plain = build("1f1b", p, 1, 4 * p)
        assert max(peak_live(half)) / 2 <= 0.76 * max(peak_live(plain))
        bubbles = [simulate(s, Durations.even(p, s.v)).bubble for s in (half, plain)]
        assert bubbles[0] < bubbles[1]


def test_megatrons_group_size() -> None:
    wide = family(4, 2, 16, f=2.0, group=6)
    check_program(lower(wide))
    forwards = [a for a in wide.ranks[0] if a.kind == "F"]
    assert [a.mb for a in forwards[:12]] == [*range(6), *range(6)]
    assert [a.stage for a in forwards[:12]] == [0] * 6 + [4] * 6
    assert max(peak_live(wide)) == 2 * 3 + 6 + 1
    slow = Durations.even(4, 2, hop=0.2)
    assert simulate(wide, slow).makespan < simulate(family(4, 2, 16, f=2.0), slow).makespan


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("zb-w", 4, 2, 8), "did you mean zb-v?"),
        (("1f1b", 4, 2, 8), "needs v = 1 (chunks per rank), got v=2; with v=2 use one of gpipe, "),
        (("zb-v", 4, 3, 8), "needs v = 2 (chunks per rank), got v=3"),
        (("interleaved", 4, 1, 8), "needs v >= 2 (chunks per rank), got v=1"),
        (("dualpipe-v", 4, 2, 7), "needs m >= 2p microbatches, got m=7 for p=4; use m >= 8"),
        (("family:f=x", 4, 1, 8), "is no member of the family; write family:f=NUMBER"),
        (("family:warm=1", 4, 1, 8), "is no member of the family"),
        (("family:f=1,group=1.5", 4, 2, 8), "is no member of the family"),
        (("family:f=-1", 4, 1, 8), "warm-up and lag must be >= 0"),
        (("family:group=0", 4, 1, 8), "at least one microbatch"),
    ],
)
def test_what_a_name_does_not_go_with_is_refused(arguments, words) -> None:
    with pytest.raises(ScheduleError) as refused:
        build(*arguments)
    assert words in str(refused.value)


@EXAMPLES
@given(
    st.sampled_from([1.0, 1.25, 2.0]),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from([None, 5]),
    st.booleans(),
)
def test_family_names_read_back(f, lag, group, fused) -> None:
    name = family_name(f, lag, group, fused=fused)
    expected = family(3, 2, 7, f=f, lag=lag, group=group)
    assert build(name, 3, 2, 7) == (fuse(expected) if fused else expected)


# --- recomputation as an action ------------------------------------------------------------------


@EXAMPLES
@given(st.integers(1, 5), st.integers(1, 10), TIME, TIME)
def test_recomputing_before_the_gradient_arrives_hides_it_in_the_bubble(p, m, f, b) -> None:
    times = Durations.even(p, 1, f=f, b=b, w=f)
    schedule = recompute(family(p, 1, m))
    check_program(lower(schedule, times))
    assert good(lower(schedule.keep(["F", "B", "W"]), times), seed=m)
    line = simulate(schedule, times)
    assert line.busy[0] == pytest.approx(m * (3 * f + b))
    assert line.bubble <= (p - 1) * (f + b) + 1e-9


def test_a_stage_recomputes_all_of_its_microbatches_or_none() -> None:
    whole = recompute(family(2, 1, 3))
    without = tuple(a for a in whole.ranks[1] if a != Action("R", 1, 1))
    with pytest.raises(ScheduleError, match=r"rank 1, index \d+, action R1\.1: it is missing"):
        check_schedule(Schedule(3, whole.place, (whole.ranks[0], without)))
    late = (*without, Action("R", 1, 1))
    with pytest.raises(ScheduleError, match=r"rank 1, index \d+, action B1\.1: R1\.1 must come"):
        check_schedule(Schedule(3, whole.place, (whole.ranks[0], late)))
    early = (Action("R", 0, 0), *(a for a in whole.ranks[0] if a != Action("R", 0, 0)))
    with pytest.raises(ScheduleError, match=r"index 0, action R0\.0: F0\.0 must come before it"):
        check_schedule(Schedule(3, whole.place, (early, whole.ranks[1])))


# --- memory over time, deferred weight gradients, hops -------------------------------------------


@EXAMPLES
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 12), st.booleans())
def test_memory_over_time_peaks_where_the_order_says_and_ends_at_nothing(name, p, m, again) -> None:
    v = chunks_of(name, 2)
    m = max(m, 2 * p) if name == "dualpipe-v" else m
    schedule = build(name, p, v, m)
    schedule = recompute(schedule) if again else schedule
    lines = memory_over_time(schedule, simulate(schedule, Durations.even(p, v, f=1.3, b=0.7)))
    for line, peak in zip(lines, peak_live(schedule), strict=True):
        assert peak_memory(line) == pytest.approx(peak / v)
        assert line[-1][1] == pytest.approx(0.0)


def test_recomputed_microbatches_weigh_a_checkpoint_until_they_are_recomputed() -> None:
    schedule = recompute(family(4, 1, 8))
    held = (MicrobatchMemory(activations=1.0, checkpoint=0.1, deferred=0.5),) * 4
    lines = memory_over_time(schedule, simulate(schedule, Durations.even(4, 1)), held)
    assert peak_memory(lines[0]) == pytest.approx(3 * 0.1 + 1.0)
    assert peak_memory(lines[3]) == pytest.approx(1.0)


def test_a_recomputed_forward_holds_nothing_before_it_is_run_again() -> None:
    assert peak_live(recompute(build("gpipe", 4, 2, 6))) == (1, 1, 1, 1)
    assert peak_live(recompute(build("1f1b", 4, 1, 6))) == (1, 1, 1, 1)
    assert peak_live(recompute(build("zb-h1", 4, 1, 8))) == (1, 2, 3, 4)


def test_deferred_weight_gradients_are_counted() -> None:
    assert peak_deferred(build("1f1b", 4, 1, 8)) == (0, 0, 0, 0)
    assert peak_deferred(build("1f1b-early", 4, 1, 8)) == (1, 1, 1, 1)
    assert peak_deferred(build("zb-h1", 4, 1, 8)) == (1, 2, 3, 4)


def test_a_long_schedule_is_one_pass_over_its_actions() -> None:
    """Every action is looked at once however the ranks wait for each other: cost is linear."""
    schedule = build("interleaved", 16, 4, 256)
    line = simulate(schedule, Durations.even(16, 4))
    assert sum(map(len, line.starts)) == sum(map(len, schedule.ranks)) == 2 * 16 * 4 * 256


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_size_up_to_eight_ranks_four_chunks_and_32_microbatches_is_proven(name: str) -> None:
    for p in range(1, 9):
        for v in sorted({chunks_of(name, v) for v in range(1, 5)}):
            for m in range(2 * p if name == "dualpipe-v" else 1, 33):
                program = lower(build(name, p, v, m))
                check_program(program)
                check_posted(post_ahead(program))
