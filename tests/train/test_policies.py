"""Loss spikes: what counts as one, and runs that meet one and stop or skip (exit codes, state)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config import RunConfig
from megalite.corpus.indexed_writer import IndexedWriter
from megalite.data.sampler import SampleOrder
from megalite.train.policies import Spike, SpikeGuard
from tests.pool import RankPool
from tests.train.kit.runs import (
    SEQ_LENGTH,
    VOCAB,
    checkpoint_tensors,
    different,
    lines,
    make_config,
    step_numbers,
    train,
)

WINDOW, STEPS, SEED = 8, 26, 1234
SPIKE_STEP = 24  # from 1
BATCH = 2
GUARD: dict[str, Any] = {
    "train__loss_spike_window": WINDOW,
    "train__steps": STEPS,
    "train__global_batch": BATCH,
    "optimizer__lr_schedule": "constant",
}


def guard(policy: str = "skip", **settings: Any) -> SpikeGuard:
    return SpikeGuard(make_guarded(Path("unused"), "guard", train__loss_spike=policy, **settings))


def make_guarded(folder: Path, name: str, layout: str = "serial", **changes: Any) -> RunConfig:
    return make_config(folder, name, layout, **{**GUARD, **changes})


def filled(losses: list[float], policy: str = "skip", **settings: Any) -> SpikeGuard:
    made = guard(policy, **settings)
    assert [made.judge(loss) for loss in losses] == [None] * len(losses)
    return made


# median 2.05, absolute deviations .05 .05 .15 .15 .25 .25 .35 .35: their median .2
SPREAD = [1.7, 1.8, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4]
EDGE = 2.05 + 10 * 1.4826 * 0.2


def test_a_spike_is_a_loss_so_many_deviations_above_the_median() -> None:
    assert filled(SPREAD).judge(EDGE - 1e-6) is None
    spike = filled(SPREAD).judge(EDGE + 1e-6)
    assert spike is not None
    assert (spike.median, spike.deviation) == pytest.approx((2.05, 1.4826 * 0.2))
    assert filled(SPREAD).judge(-50.0) is None  # only upwards
    assert filled(SPREAD, train__loss_spike_threshold=2.0).judge(3.0) is not None


def test_a_quiet_window_has_a_floor() -> None:
    flat = [2.0] * WINDOW
    assert filled(flat).judge(2.19) is None
    assert filled(flat).judge(2.21) is not None


def test_no_verdict_before_the_window_is_full_nor_on_what_is_not_finite() -> None:
    made = filled([2.0] * (WINDOW - 1))
    assert made.judge(1e9) is None
    made = filled(SPREAD)
    assert made.judge(math.nan) is None
    assert made.judge(math.inf) is None
    assert list(made.losses) == SPREAD


def test_spikes_do_not_enter_the_window_and_too_many_in_a_row_stop() -> None:
    made = filled(SPREAD, optimizer__max_skips=2)
    verdicts = [made.judge(9.0) for _ in range(3)]
    assert [isinstance(v, Spike) and v.stop for v in verdicts] == [False, False, True]
    assert list(made.losses) == SPREAD
    made = filled(SPREAD, optimizer__max_skips=2)
    for loss in (9.0, 9.0, 2.0, 9.0, 9.0):
        spike = made.judge(loss)
        assert spike is None or not spike.stop
    first = filled(SPREAD, "stop").judge(9.0)
    assert first is not None
    assert first.stop


def test_the_window_is_state() -> None:
    made = filled(SPREAD, optimizer__max_skips=2)
    made.judge(9.0)
    again = guard(optimizer__max_skips=2)
    again.load(made.state())
    assert again.state() == made.state() == {"losses": SPREAD, "in_a_row": 1}
    shorter = SpikeGuard(make_guarded(Path("x"), "x", train__loss_spike="stop"))
    shorter.losses = shorter.losses.__class__(maxlen=3)
    shorter.load(made.state())
    assert list(shorter.losses) == SPREAD[-3:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of one token over and over, but one of noise, which step SPIKE_STEP reads."""
    path = tmp_path_factory.mktemp("spikes")
    count = STEPS * BATCH
    odd = int(SampleOrder(count, SEED).at((SPIKE_STEP - 1) * BATCH, 1)[0])
    tokens = np.full(count * SEQ_LENGTH + 1, 5)
    noise = np.random.default_rng(0).integers(0, VOCAB, SEQ_LENGTH - 1)
    tokens[odd * SEQ_LENGTH + 1 : (odd + 1) * SEQ_LENGTH] = noise  # its first token: a label before
    with IndexedWriter(path / "data", VOCAB) as writer:
        writer.add_document(tokens)
        writer.publish()
    return path


@pytest.mark.long
def test_skip_goes_on_with_the_weights_untouched(pool: RankPool, folder: Path) -> None:
    config = make_guarded(folder, "skip", "zero1", parallel__pp=2, train__loss_spike="skip")
    stopped = make_guarded(
        folder, "skip-stopped", "zero1", parallel__pp=2, train__loss_spike="skip"
    )
    stops = (SPIKE_STEP - 4, SPIKE_STEP - 1, SPIKE_STEP, SPIKE_STEP + 1)
    jobs = [(config, None), *((stopped, stop) for stop in stops), (stopped, None)]
    for outcomes in pool.run(train, 4, jobs):
        assert [o.code for o in outcomes] == [0, 75, 75, 75, 75, 0]
    run, again = folder / "skip", folder / "skip-stopped"
    (skip,) = lines(run, "skip")
    assert (skip["step"], skip["reason"], skip["count"]) == (SPIKE_STEP, "loss spike", 1)
    before, after, end = (checkpoint_tensors(again, SPIKE_STEP + n) for n in (-1, 0, 1))
    assert different(before, after) == []
    assert len(different(after, end)) == len(end)
    steps = lines(run, "step")
    assert [line["consumed_samples"] for line in steps] == [BATCH * n for n in range(1, STEPS + 1)]
    assert steps[SPIKE_STEP - 1]["loss"] > 10 * steps[SPIKE_STEP - 2]["loss"]
    assert math.isfinite(steps[SPIKE_STEP - 1]["grad_norm"])
    assert f"step {SPIKE_STEP}: loss " in (run / "log.txt").read_text()
    # the window, and the spike, survive restarts: the same steps and the same skip
    assert step_numbers(again) == step_numbers(run)
    assert [(line["step"], line["count"]) for line in lines(again, "skip")] == [(SPIKE_STEP, 1)]
    assert not different(*(checkpoint_tensors(folder, STEPS) for folder in (again, run)))


@pytest.mark.long
def test_stop_ends_every_rank_before_the_update(pool: RankPool, folder: Path) -> None:
    config = make_guarded(
        folder, "stop", "zero1", train__loss_spike="stop", checkpoint__interval=SPIKE_STEP - 1
    )
    for (outcome,) in pool.run(train, 2, [(config, None)]):
        assert outcome.code is None
        assert outcome.error.startswith(f"LossSpikeError: step {SPIKE_STEP}: loss ")
        assert 'set train.loss_spike = "skip"' in outcome.error
    run = folder / "stop"
    (end,) = lines(run, "end")
    assert (end["step"], end["exit_code"]) == (SPIKE_STEP - 1, 2)
    assert len(lines(run, "step")) == SPIKE_STEP - 1
    # another policy is no other run: it goes on and skips what it stopped at
    going_on = make_guarded(folder, "stop", "zero1", train__loss_spike="skip")
    for (outcome,) in pool.run(train, 2, [(going_on, None)]):
        assert (outcome.code, outcome.first_step) == (0, SPIKE_STEP - 1)
    assert [line["step"] for line in lines(run, "skip")] == [SPIKE_STEP]


def test_off_watches_nothing(pool: RankPool, folder: Path) -> None:
    plain = {key: value for key, value in GUARD.items() if "spike" not in key}
    config = make_config(folder, "off", **plain)
    ((outcome,),) = pool.run(train, 1, [(config, None)])
    assert outcome.code == 0
    assert lines(folder / "off", "skip") == []
