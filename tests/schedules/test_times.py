"""Simulated step times and memory against closed forms and the published tables."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megalite.schedules import Durations, build, family, fuse, peak_live, simulate
from megalite.schedules.builders import family_peak

RANKS = st.sampled_from([1, 2, 3, 4, 8])
TIME = st.floats(0.5, 2.0)
EXAMPLES = settings(max_examples=25, deadline=None)


def bubble(schedule, f, b, w, hop=0.0):
    times = Durations.even(schedule.p, schedule.v, f=f, b=b, w=w, hop=hop)
    return simulate(schedule, times).bubble


@EXAMPLES
@given(RANKS, st.integers(1, 20), TIME, TIME, TIME)
def test_fused_1f1b(p, m, f, b, w):
    expected = (p - 1) * (f + b + w)
    assert bubble(build("1f1b", p, 1, m), f, b, w) == pytest.approx(expected)


@EXAMPLES
@given(RANKS, st.integers(1, 20), TIME, TIME, TIME, st.floats(0, 0.02))
def test_early_input_gradient(p, m, f, b, w, hop):
    expected = (p - 1) * (f + b + 2 * hop)
    assert bubble(family(p, 1, m), f, b, w, hop) == pytest.approx(expected)


@EXAMPLES
@given(RANKS, st.integers(2, 4), st.integers(0, 24), TIME, TIME, TIME)
def test_interleaved_with_any_m_from_p(p, v, extra, f, b, w):
    expected = (p - 1) * (f + b + w) / v
    assert bubble(build("interleaved", p, v, p + extra), f, b, w) == pytest.approx(expected)


@EXAMPLES
@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 7), TIME, TIME, TIME)
def test_interleaved_with_fewer_microbatches_than_ranks(p, v, m, f, b, w):
    assume(m < p)
    expected = ((p - m) * (v - 1) + p - 1) * (f + b + w) / v
    assert bubble(build("interleaved", p, v, m), f, b, w) == pytest.approx(expected)


@EXAMPLES
@given(RANKS, st.integers(1, 20), TIME, TIME, TIME, st.floats(0, 0.1))
def test_gpipe(p, m, f, b, w, hop):
    expected = (p - 1) * (f + b + w + 2 * hop)
    assert bubble(build("gpipe", p, 1, m), f, b, w, hop) == pytest.approx(expected)


@EXAMPLES
@given(RANKS, st.integers(2, 4), st.integers(0, 8), TIME, TIME, TIME, st.floats(0, 0.02))
def test_looped_breadth_first(p, v, extra, f, b, w, hop):
    expected = (p - 1) * ((f + b + w) / v + 2 * hop)
    assert bubble(build("gpipe", p, v, 2 * p + extra), f, b, w, hop) == pytest.approx(expected)


@EXAMPLES
@given(RANKS, st.integers(0, 12), TIME, TIME, TIME, st.floats(0, 0.01))
def test_zero_bubble_h1(p, extra, f, b, w, hop):
    expected = (p - 1) * max(b + 2 * hop, f + 3 * hop, f + b - w + 4 * hop)
    assert bubble(family(p, 1, 2 * p + extra, lag=1), f, b, w, hop) == pytest.approx(expected)


# Bubble in per cent of the step at F=B=W=1, for p/m = 2/4, 4/8, 4/32, 8/16, 8/64.
CASES = [(2, 4), (4, 8), (4, 32), (8, 16), (8, 64)]
TABLE = {
    ("gpipe", 1, 0.0): [20.0, 27.3, 8.6, 30.4, 9.9],
    ("gpipe", 4, 0.1): [7.3, 10.6, 2.9, 12.2, 3.3],
    ("1f1b", 1, 0.0): [20.0, 27.3, 8.6, 30.4, 9.9],
    ("1f1b", 1, 0.1): [22.1, 30.6, 12.9, 34.2, 14.8],
    ("interleaved", 2, 0.0): [11.1, 15.8, 4.5, 17.9, 5.2],
    ("interleaved", 2, 0.1): [14.9, 19.7, 5.8, 22.0, 6.6],
    ("interleaved", 4, 0.0): [5.9, 8.6, 2.3, 9.9, 2.7],
    ("interleaved", 4, 0.1): [15.2, 17.9, 5.2, 19.3, 5.6],
    ("zero-bubble", 1, 0.0): [7.7, 11.1, 3.0, 12.7, 3.5],
    ("zero-bubble", 1, 0.1): [10.4, 14.9, 4.2, 17.0, 4.9],
    ("zero-bubble", 2, 0.0): [4.0, 5.9, 1.5, 6.8, 1.8],
    ("zero-bubble", 4, 0.1): [9.4, 11.6, 3.2, 12.6, 3.5],
}


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_table_of_bubbles(row):
    name, v, hop = row
    for (p, m), expected in zip(CASES, TABLE[row], strict=True):
        zero_bubble = name == "zero-bubble"
        schedule = family(p, v, m, lag=1) if zero_bubble else build(name, p, v, m)
        line = simulate(schedule, Durations.even(p, v, hop=hop))
        assert round(100 * line.bubble_fraction, 1) == expected, (row, p, m)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 10),
    st.integers(1, 4),
    st.integers(1, 30),
    st.sampled_from([1.0, 1.25, 1.5, 2.0]),
    st.integers(0, 3),
)
def test_peak_memory_formula(p, v, m, f, lag):
    schedule = family(p, v, m, f=f, lag=lag)
    expected = tuple(family_peak(rank, p, v, m, f=f, lag=lag) for rank in range(p))
    assert peak_live(schedule) == expected
    if lag == 0:
        assert peak_live(fuse(schedule)) == expected


def test_peak_memory_of_known_cases():
    assert peak_live(build("gpipe", 4, 2, 6)) == (12, 12, 12, 12)
    assert peak_live(build("1f1b", 4, 1, 6)) == (4, 3, 2, 1)
    assert peak_live(build("1f1b", 4, 1, 2)) == (2, 2, 2, 1)
    assert peak_live(build("interleaved", 4, 2, 32)) == (11, 9, 7, 5)  # halves: 5.5 .. 2.5
    assert peak_live(family(4, 2, 32, lag=1)) == (8, 8, 8, 8)  # halves: exactly p


@EXAMPLES
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 10), st.data())
def test_makespan_bounds_and_monotony(p, v, m, data):
    stage_times = st.lists(st.floats(0.1, 3.0), min_size=p * v, max_size=p * v).map(tuple)
    f_times, b_times, w_times = (data.draw(stage_times) for _ in range(3))
    times = Durations(f_times, b_times, w_times, hop=data.draw(st.floats(0, 1)))
    name = "1f1b" if v == 1 else "interleaved"
    schedule = build(name, p, v, m)
    line = simulate(schedule, times)
    totals = [
        times.forward[s] + times.backward_input[s] + times.backward_weight[s] for s in range(p * v)
    ]
    for rank in range(p):
        work = m * sum(totals[stage] for stage in schedule.stages_of(rank))
        assert line.busy[rank] == pytest.approx(work)
    hops = sum(a != b for a, b in zip(schedule.place, schedule.place[1:], strict=False))
    alone = sum(totals) + 2 * hops * times.hop  # one microbatch there and back
    assert line.makespan >= max(*line.busy, alone) - 1e-9
    slower = Durations(
        tuple(1.5 * t for t in times.forward), times.backward_input, times.backward_weight
    )
    assert (
        simulate(schedule, slower).makespan
        >= simulate(
            schedule, Durations(times.forward, times.backward_input, times.backward_weight)
        ).makespan
        - 1e-9
    )
