"""What `megalite schedule --config` and `megalite plan` show of a run's stages and its schedule.

Times are modelled from FLOPs, in units of the mean work of a rank on one microbatch: what they say
of balance holds as far as the kernels' rates are alike. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megalite.checks.schedule import require_schedule
from megalite.checks.settings import require_valid, resolve
from megalite.config import RunConfig
from megalite.config.load import load_config
from megalite.run.pipeline_schedule import make_schedule, modelled_durations, schedule_name
from megalite.run.stages import stage_layer_counts
from megalite.schedules import Durations, Schedule


@dataclass(frozen=True)
class Plan:
    """A resolved config with its stages' modelled times, in units of a rank's mean work.

    model_share: of that work, what is not done again.
    """

    config: RunConfig
    durations: Durations
    model_share: float

    @cached_property
    def name(self) -> str:
        """The schedule's; of an automatic one what was chosen, which takes a while to find."""
        return schedule_name(self.config)

    @property
    def v(self) -> int:
        return self.config.parallel.vpp

    @property
    def num_micro_batches(self) -> int:
        train = self.config.train
        return train.global_batch // (train.micro_batch * (self.config.parallel.dp or 1))

    @cached_property
    def own(self) -> Schedule:
        """The run's schedule."""
        return self.schedule(self.name)[0]

    def schedule(self, name: str) -> tuple[Schedule, Durations]:
        """A schedule in place of the config's. Raises ScheduleError where it does not fit."""
        pipeline = self.config.pipeline.model_copy(update={"schedule": name})
        config = self.config.model_copy(update={"pipeline": pipeline})
        return make_schedule(config, self.num_micro_batches), self.durations

    def work(self) -> list[float]:
        """Of each stage on one microbatch: forward, input gradient, weight gradient."""
        return [sum(stage) for stage in zip(*_parts(self.durations), strict=True)]


def plan_of(path: str, overrides: list[str], world_size: int | None = None) -> Plan:
    """The plan of a config file, with one replica where neither it nor `world_size` says how many.

    Raises ConfigError as `megalite train` would.
    """
    loaded = load_config(path, overrides)
    require_valid(loaded.config, world_size, loaded.origins)
    config = resolve(loaded.config, world_size)
    require_schedule(config)
    times = modelled_durations(config)
    total = sum(map(sum, _parts(times)))
    mean = total / config.parallel.pp
    forward, to_input, to_weight = (tuple(t / mean for t in part) for part in _parts(times))
    kept = config.model_copy(
        update={"train": config.train.model_copy(update={"recompute": "none"})}
    )
    once = sum(map(sum, _parts(modelled_durations(kept))))
    return Plan(config, Durations(forward, to_input, to_weight), once / total)


def _parts(times: Durations) -> tuple[tuple[float, ...], ...]:
    return times.forward, times.backward_input, times.backward_weight


def stage_lines(plan: Plan) -> Iterator[str]:
    """Who has which layers, and how much of the work."""
    parallel, place = plan.config.parallel, plan.own.place
    counts, work = stage_layer_counts(plan.config), plan.work()
    first = [sum(counts[:stage]) for stage in range(len(counts))]
    per_rank = [
        sum(w for w, rank in zip(work, place, strict=True) if rank == pp)
        for pp in range(parallel.pp)
    ]
    yield "stage  rank  layers        work"
    for stage, (rank, count, amount) in enumerate(zip(place, counts, work, strict=True)):
        layers = f"{first[stage]}-{first[stage] + count - 1}" if count else "none"
        ends = [name for name, at in (("embedding", 0), ("head", len(counts) - 1)) if at == stage]
        yield f"{stage:>5}  {rank:>4}  {layers:<8}  {amount:8.1%}  {' + '.join(ends)}".rstrip()
    yield (
        f"work: of the mean rank's {plan.config.model.num_layers / parallel.pp:g} layers with its "
        f"share of the head; the busiest rank has {max(per_rank):.1%}"
    )
