"""Checks that the lengths of a run fit each other: steps, tokens, batch ramp, warm-up, decay.

One line a problem, for checks/settings.py. Single values are checked in config/schema.py. A length
in tokens that is shorter than one step has no effect; it is refused as a mistake of units. (Under
inverse_sqrt a warm-up of any length sets all rates, and is accepted.)
"""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config import OptimizerConfig, RunConfig, TrainConfig
from megalite.run.batch_plan import BatchPlan, batch_plan, horizon_steps, ramp_sizes
from megalite.run.lr_phases import LrPhases, lr_phases
from megalite.schedules.csv_form import FILE
from megalite.wording import number_of

_RAMP = ("batch_ramp_start", "batch_ramp_increment", "batch_ramp_samples", "batch_ramp_tokens")


def training_problems(config: RunConfig, dp: int) -> Iterator[str]:
    """One line for each length, batch or learning-rate setting that does not fit another."""
    ramp = list(_ramp(config.train))
    yield from ramp or _ramp_batches(config, dp)
    if not ramp:
        yield from _length(config)
        yield from _learning_rate(config)


def _ramp(train: TrainConfig) -> Iterator[str]:
    """Problems of the ramp's own settings."""
    start, increment, samples, tokens = (getattr(train, name) for name in _RAMP)
    if start is None and increment is None and samples is None and tokens is None:
        return
    for name, value in (("start", start), ("increment", increment)):
        if value is None:
            yield (
                f"train.batch_ramp_{name} is not set, but other settings of the ramp are; set it, "
                "or remove them"
            )

    # The ramp's length has one unit.
    if (samples is None) == (tokens is None):
        given = "neither is" if samples is None else f"got {samples} and {tokens}"
        yield (
            "a batch ramp needs one of train.batch_ramp_samples and train.batch_ramp_tokens, "
            f"{given}; set one of them"
        )

    # The ramp must reach global_batch exactly: its last stage has that batch.
    if start is not None and start >= train.global_batch:
        yield (
            f"train.batch_ramp_start={start} is not below train.global_batch="
            f"{train.global_batch}; use a smaller start, or remove the ramp"
        )
    elif start is not None and increment is not None and (train.global_batch - start) % increment:
        yield (
            f"train.batch_ramp_increment={increment} does not divide train.global_batch="
            f"{train.global_batch} - train.batch_ramp_start={start} = "
            f"{train.global_batch - start}; use a divisor of it"
        )


def _ramp_batches(config: RunConfig, dp: int) -> Iterator[str]:
    """Batches of the ramp that a replica cannot cut into microbatches."""
    schedule = config.pipeline.schedule
    if ramp_sizes(config) and schedule is not None and schedule.startswith(FILE):
        yield (
            f"pipeline.schedule={schedule} is for one number of microbatches, but the batch ramp "
            "has several; use a named schedule, or remove the ramp"
        )
    unit = config.train.micro_batch * dp
    bad = [size for size in ramp_sizes(config) if size % unit]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        yield (
            f"the batch ramp (train.batch_ramp_start={config.train.batch_ramp_start}, "
            f"train.batch_ramp_increment={config.train.batch_ramp_increment}) passes through a "
            f"batch of {bad[0]}{more}, which is not divisible by train.micro_batch="
            f"{config.train.micro_batch} x parallel.dp={dp} = {unit}; use multiples of {unit}"
        )


def _length(config: RunConfig) -> Iterator[str]:
    train = config.train
    steps = horizon_steps(config, batch_plan(config))
    if train.tokens is not None and train.steps not in (0, steps):
        yield (
            f"train.steps={train.steps} and train.tokens={train.tokens} (which is "
            f"{number_of(steps, 'step')}) "
            "both say how long the run is; remove one"
        )
    start, unit = train.batch_ramp_start or 0, config.data.seq_length
    for name, first in (("samples", start), ("tokens", start * unit)):
        length = getattr(train, f"batch_ramp_{name}")
        if length is not None and length < first:
            yield (
                f"train.batch_ramp_{name}={length} is less than the {first} {name} of the first "
                f"step, after which the ramp would be over; use at least {first}, or remove the "
                "ramp"
            )


def _learning_rate(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield (
            f"optimizer.min_lr={optimizer.min_lr:g} is above optimizer.lr={optimizer.lr:g}; "
            f"use at most {optimizer.lr:g}"
        )
    problems = [*_given_twice(optimizer), *_missing_length(optimizer)]
    yield from problems
    plan = batch_plan(config)
    steps = horizon_steps(config, plan)
    # train.steps=0 starts a run without training it, so that nothing is left to warm up.
    if not problems and steps:
        seq_length = config.data.seq_length
        phases = lr_phases(optimizer, steps, lambda step: plan.first_sample(step) * seq_length)
        misfits = list(_within_a_step(optimizer, plan, steps, seq_length))
        misfits = misfits or list(_phases(optimizer, phases))
        yield from misfits or _rate_of_zero(optimizer, phases, plan, steps, seq_length)


def _within_a_step(
    optimizer: OptimizerConfig, plan: BatchPlan, steps: int, seq_length: int
) -> Iterator[str]:
    """Lengths in tokens that are shorter than one step."""
    schedule = optimizer.lr_schedule
    decays = schedule not in ("constant", "inverse_sqrt")  # elsewhere config.effect refuses an end
    lengths = (
        ("warmup_tokens", "first", 0, schedule != "inverse_sqrt", "warms up"),
        ("decay_tokens", "first", 0, decays, "decays"),
        ("wsd_decay_tokens", "last", steps - 1, schedule == "wsd", "decays"),
    )
    for name, which, step, used, does in lengths:
        given, least = getattr(optimizer, name), plan.global_batch(step) * seq_length
        if used and given is not None and given < least:
            yield (
                f"optimizer.{name}={given} is less than the {number_of(least, 'token')} of the "
                f"{which} step, so "
                f"that none {does}; use at least {least}, or remove it"
            )


def _given_twice(optimizer: OptimizerConfig) -> Iterator[str]:
    for name in ("warmup", "decay", "wsd_decay"):
        steps = getattr(optimizer, f"{name}_steps")
        tokens = getattr(optimizer, f"{name}_tokens")
        if steps and tokens:
            yield (
                f"optimizer.{name}_steps={steps} and optimizer.{name}_tokens={tokens} say the "
                "same thing twice; remove one"
            )


def _missing_length(optimizer: OptimizerConfig) -> Iterator[str]:
    schedule = optimizer.lr_schedule
    if schedule == "inverse_sqrt" and not (optimizer.warmup_steps or optimizer.warmup_tokens):
        yield (
            "optimizer.lr_schedule=inverse_sqrt falls as sqrt(warm-up / position), but there is "
            "no warm-up; set optimizer.warmup_steps or optimizer.warmup_tokens"
        )
    if schedule != "wsd":
        return
    if not (optimizer.wsd_decay_steps or optimizer.wsd_decay_tokens):
        yield (
            "optimizer.lr_schedule=wsd needs the length of its last phase; set "
            "optimizer.wsd_decay_steps or optimizer.wsd_decay_tokens"
        )
    elif optimizer.wsd_decay_steps and optimizer.decay_tokens:
        yield (
            f"optimizer.decay_tokens={optimizer.decay_tokens} ends a phase of "
            f"optimizer.wsd_decay_steps={optimizer.wsd_decay_steps}; give both in tokens or both "
            "in steps"
        )


def _phases(optimizer: OptimizerConfig, phases: LrPhases) -> Iterator[str]:
    """Warm-up and decay that do not fit into the run, or into each other."""
    # Messages name the settings and the unit that the user gave, which may differ from the
    # phases' unit: then the converted length stands beside it.
    warmup, unit = phases.warmup, phases.unit
    given = optimizer.warmup_steps if optimizer.warmup_tokens is None else warmup
    name = "warmup_steps" if optimizer.warmup_tokens is None else "warmup_tokens"
    end = "decay_steps" if optimizer.decay_tokens is None else "decay_tokens"
    end_given = optimizer.decay_steps or optimizer.decay_tokens
    as_tokens = f" ({number_of(warmup, 'token')})" if given != warmup else ""

    in_place = "" if name.endswith(unit) else f" in place of optimizer.{name}"
    if warmup > phases.run:
        yield (
            f"optimizer.{name}={given}{as_tokens} is more than train.{unit}={phases.run}; "
            f"set optimizer.warmup_{unit}={phases.run} or less{in_place}"
        )
    elif optimizer.lr_schedule in ("linear", "cosine") and end_given and phases.end <= warmup:
        what = "step 0" if end == "decay_steps" else "the first token"
        yield (
            f"optimizer.{end}={end_given} (counted from {what}) leaves nothing to decay after "
            f"optimizer.{name}={given}{as_tokens}; set optimizer.decay_{unit}={warmup + 1} or more"
            f"{'' if end.endswith(unit) else f' in place of optimizer.{end}'}"
        )
    elif optimizer.lr_schedule == "wsd" and warmup > phases.decay_start:
        yield (
            f"optimizer.lr_schedule=wsd: the last phase begins after {phases.decay_start} {unit}, "
            f"within the warm-up of {warmup}; set optimizer.warmup_{unit}={phases.decay_start} or "
            f"less{in_place}, or shorten the last phase"
        )


def _rate_of_zero(
    optimizer: OptimizerConfig, phases: LrPhases, plan: BatchPlan, steps: int, seq_length: int
) -> Iterator[str]:
    """A decay to 0 that is over before the run is, after which no step changes a weight."""
    if optimizer.min_lr or optimizer.lr_schedule in ("constant", "inverse_sqrt"):
        return
    by_steps = phases.unit == "steps"
    first = phases.end if by_steps else plan.steps_for(-(-phases.end // seq_length))
    if first < steps:
        end = "decay_steps" if optimizer.decay_tokens is None else "decay_tokens"
        yield (
            f"optimizer.{end}={getattr(optimizer, end)} ends the decay at optimizer.min_lr=0: the "
            f"learning rate is 0 from step {first + 1} of {steps} on; set optimizer.min_lr above "
            f"0, or remove optimizer.{end}, so that the decay ends with the run (a run that is "
            "resumed needs --accept for either)"
        )
