"""The batch of a step and its place in the data, against a loop that counts samples."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.checks.settings import resolve
from megalite.config import RunConfig
from megalite.run.batch_plan import BatchPlan, BatchStage, batch_plan, horizon_steps, ramp_sizes

MODEL = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_heads": 2,
    "ffn_hidden_size": 8,
    "vocab_size": 10,
}


def config(global_batch: int = 16, seq_length: int = 4, **train: Any) -> RunConfig:
    train = {"global_batch": global_batch, **({} if "tokens" in train else {"steps": 50}), **train}
    return RunConfig.model_validate(
        {"model": MODEL, "data": {"seq_length": seq_length}, "train": train}
    )


def ramped(start: int, increment: int, unit: str = "samples", over: int = 60, **more: Any) -> Any:
    ramp = {"start": start, "increment": increment, unit: over}
    return config(**{f"batch_ramp_{name}": value for name, value in ramp.items()}, **more)


def counted(config: RunConfig, steps: int, consumed: int = 0) -> list[tuple[int, int]]:
    """(batch, first sample) step by step: stage k while consumed < (k + 1) / n of the ramp."""
    sizes, train = ramp_sizes(config), config.train
    unit = config.data.seq_length if train.batch_ramp_tokens else 1
    length = train.batch_ramp_tokens or train.batch_ramp_samples or 0
    rows = []
    for _ in range(steps):
        passed = [k for k in range(len(sizes)) if consumed * unit * len(sizes) < length * (k + 1)]
        batch = sizes[passed[0]] if passed else train.global_batch
        rows.append((batch, consumed))
        consumed += batch
    return rows


def planned(plan: BatchPlan, steps: range) -> list[tuple[int, int]]:
    return [(plan.global_batch(step), plan.first_sample(step)) for step in steps]


def test_without_a_ramp_every_step_is_the_same() -> None:
    assert batch_plan(config()).stages == (BatchStage(0, 0, 16),)


def test_a_ramp_by_hand() -> None:
    plan = batch_plan(ramped(4, 4, over=30))
    # stages of 10 samples: 3 steps of 4 (12), 1 of 8 (20), 1 of 12 (32), then 16
    assert plan.stages == ((0, 0, 4), (3, 12, 8), (4, 20, 12), (5, 32, 16))
    assert [plan.steps_for(n) for n in (0, 1, 4, 5, 12, 13, 20, 21, 32, 33, 48, 49)] == [
        0, 1, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7,
    ]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(1, 9),
    increment=st.integers(1, 5),
    count=st.integers(1, 6),
    over=st.integers(1, 200),
    unit=st.sampled_from(["samples", "tokens"]),
    stop=st.integers(0, 60),
    seq_length=st.integers(1, 7),
)
def test_any_ramp_equals_counting_and_goes_on_where_it_was_stopped(
    start: int, increment: int, count: int, over: int, unit: str, stop: int, seq_length: int
) -> None:
    made = ramped(
        start,
        increment,
        unit,
        over,
        global_batch=start + count * increment,
        seq_length=seq_length,
    )
    plan = batch_plan(made)
    rows = counted(made, 80)
    assert planned(plan, range(80)) == rows
    assert batch_plan(made, plan.before(stop), stop) == plan
    for step, (batch, first) in enumerate(rows):
        assert plan.steps_for(first) == step
        assert plan.steps_for(first + batch) == step + 1


def test_another_batch_goes_on_from_the_samples_that_were_consumed() -> None:
    old = batch_plan(ramped(4, 4, over=30))
    for stop in (0, 2, 3, 9):
        new = config(global_batch=10)
        plan = batch_plan(new, old.before(stop), stop)
        assert planned(plan, range(stop)) == planned(old, range(stop))
        assert planned(plan, range(stop, stop + 9)) == counted(new, 9, old.first_sample(stop))


def test_a_length_in_tokens_becomes_steps() -> None:
    assert resolve(config(tokens=16 * 4 * 9 + 1)).train.steps == 10
    grown = resolve(ramped(4, 4, over=30, tokens=4 * 33))
    assert grown.train.steps == 6
    assert resolve(grown) == grown
    assert horizon_steps(grown, batch_plan(grown)) == 6
