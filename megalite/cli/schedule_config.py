"""The stages and the schedule of a run, for `megalite schedule --config` and `megalite plan`.

Times are modelled from FLOPs, in units of the mean work of a rank on one microbatch: they show the
balance of stages as far as all kernels run at equal rates. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from megalite.checks import open_run
from megalite.config import RunConfig
from megalite.run.batch_plan import num_micro_batches
from megalite.run.pipeline_schedule import make_schedule, modelled_durations, schedule_name
from megalite.run.stages import stage_layer_counts
from megalite.schedules import Durations, Schedule


@dataclass(frozen=True)
class Plan:
    """A resolved config with its stages' modelled times, in units of a rank's mean work.

    model_share: the share of that work that is not recomputation.
    """

    config: RunConfig
    durations: Durations
    model_share: float

    @cached_property
    def name(self) -> str:
        """The schedule's name; for "auto" that of the one chosen, which takes a while to find."""
        return schedule_name(self.config)

    @property
    def num_micro_batches(self) -> int:
        """Microbatches of a replica in a step of the full batch."""
        return num_micro_batches(self.config)

    @cached_property
    def own(self) -> Schedule:
        """The run's schedule."""
        return self.schedule(self.name)[0]

    def schedule(self, name: str) -> tuple[Schedule, Durations]:
        """A schedule in place of the config's. Raises ScheduleError if it does not fit the run."""
        pipeline = self.config.pipeline.model_copy(update={"schedule": name})
        config = self.config.model_copy(update={"pipeline": pipeline})
        return make_schedule(config, self.num_micro_batches), self.durations

    def work(self) -> list[float]:
        """Work of each stage on one microbatch: forward, input gradient and weight gradient."""
        return [sum(stage) for stage in zip(*_parts(self.durations), strict=True)]


def plan_of(path: str, overrides: list[str], world_size: int | None = None) -> Plan:
    """The plan of a config file; with one replica if neither it nor `world_size` gives the number.

    Raises ConfigError as `megalite train` would.
    """
    config = open_run(path, overrides, world_size).config
    times = modelled_durations(config)
    total = sum(map(sum, _parts(times)))
    mean = total / config.parallel.pp
    forward, to_input, to_weight = (tuple(t / mean for t in part) for part in _parts(times))

    # The same run without recomputation has the work that the model itself needs.
    kept = config.model_copy(
        update={"train": config.train.model_copy(update={"recompute": "none"})}
    )
    once = sum(map(sum, _parts(modelled_durations(kept))))
    return Plan(config, Durations(forward, to_input, to_weight), once / total)


def _parts(times: Durations) -> tuple[tuple[float, ...], ...]:
    return times.forward, times.backward_input, times.backward_weight


def stage_values(plan: Plan) -> list[dict[str, Any]]:
    """The rank, the layers and the share of the work of each stage, as values."""
    counts = stage_layer_counts(plan.config)
    ends = accumulate(counts)
    return [
        {"pipeline_rank": rank, "layers": list(range(end - count, end)), "work": work}
        for rank, count, end, work in zip(plan.own.place, counts, ends, plan.work(), strict=True)
    ]


def stage_lines(plan: Plan) -> Iterator[str]:
    """A table of the stages: rank, layers and share of the work of each."""
    parallel, stages = plan.config.parallel, stage_values(plan)
    per_rank = [
        sum(stage["work"] for stage in stages if stage["pipeline_rank"] == pp)
        for pp in range(parallel.pp)
    ]
    yield "stage  rank  layers        work"
    for number, stage in enumerate(stages):
        layers = f"{stage['layers'][0]}-{stage['layers'][-1]}" if stage["layers"] else "none"
        ends = [name for name, at in (("embedding", 0), ("head", len(stages) - 1)) if at == number]
        row = f"{number:>5}  {stage['pipeline_rank']:>4}  {layers:<8}  {stage['work']:8.1%}"
        yield f"{row}  {' + '.join(ends)}".rstrip()
    yield (
        f"work: of the mean rank's {plan.config.model.num_layers / parallel.pp:g} layers with its "
        f"share of the head; the busiest rank has {max(per_rank):.1%}"
    )
