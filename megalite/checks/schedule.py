"""Checks that the file that `pipeline.schedule` names exists, is sound and fits the run.

Separate from checks.settings, which reads no files. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config import RunConfig
from megalite.errors import ScheduleError
from megalite.run.batch_plan import num_micro_batches, ramp_sizes
from megalite.schedules.action import Schedule
from megalite.schedules.csv_form import FILE, load_csv
from megalite.wording import number_of


def schedule_problems(config: RunConfig, dp: int | None) -> list[str]:
    """One line for each reason why the schedule's file cannot be used; [] if none is named.

    `dp` None: not known yet, so the number of microbatches is not compared.
    """
    name = config.pipeline.schedule
    if name is None or not name.startswith(FILE):
        return []
    path = name[len(FILE) :]
    if not path:
        return [f"pipeline.schedule: {FILE} names no file; write {FILE}PATH"]
    try:
        schedule = load_csv(path)
    except ScheduleError as error:
        first, *stuck = str(error).splitlines()
        return [f"pipeline.schedule: {' '.join([first, '; '.join(stuck)]).rstrip()}"]
    return list(_differences(config, schedule, dp))


def _differences(config: RunConfig, schedule: Schedule, dp: int | None) -> Iterator[str]:
    """Sizes of a file's schedule that differ from the run's."""
    name, pp, vpp = config.pipeline.schedule, config.parallel.pp, config.parallel.vpp
    if schedule.p != pp:
        yield (
            f"pipeline.schedule={name} is for {number_of(schedule.p, 'pipeline rank')}, a line "
            "each, but "
            f"parallel.pp={pp}; write {number_of(pp, 'line')}, or set parallel.pp={schedule.p}"
        )
    if schedule.v != vpp:
        yield (
            f"pipeline.schedule={name} has stages 0 to {schedule.num_stages - 1}, {schedule.v} on "
            f"each rank, but parallel.vpp={vpp}; write the file for {vpp}, or set "
            f"parallel.vpp={schedule.v}"
        )

    # A batch that is not divisible, or that grows, is refused by checks.settings.
    train = config.train
    if dp is None or ramp_sizes(config) or train.global_batch % (train.micro_batch * dp):
        return
    wanted = num_micro_batches(config, dp)
    if schedule.m != wanted:
        yield (
            f"pipeline.schedule={name} is for {number_of(schedule.m, 'microbatch')}, but "
            "train.global_batch="
            f"{train.global_batch} / (train.micro_batch={train.micro_batch} x parallel.dp={dp}) "
            f"is {wanted}; write the file for {wanted}, or set train.global_batch="
            f"{schedule.m * train.micro_batch * dp}"
        )
