"""Checks of a run's settings: from a TOML file, or a config made in code, to a run that can start.

`open_run` reads a TOML file and its overrides, checks every setting against the others, the world
size and the schedule's file, and fills in the settings that were left open. All problems are raised
together. Knows no torch. Reading order: this file, `settings` (which calls `lengths`, `precision`
and `kernels`), `schedule` (reads the schedule's file), `packages` (looks for optional ones).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megalite.checks.schedule import schedule_problems
from megalite.checks.settings import (
    Origins,
    check_config,
    resolve,
    resolve_schedule,
    world_problems,
)
from megalite.config import RunConfig
from megalite.config.load import LoadedConfig, load_config
from megalite.errors import ConfigError
from megalite.layout.topology import Topology

Check = Callable[[RunConfig], list[str]]


def open_run(
    path: str | Path,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    *,
    keep_dp_open: bool = False,
    more: Sequence[Check] = (),
) -> LoadedConfig:
    """The checked and resolved run of a TOML file, with the origin of each value.

    See `check_and_resolve`. Raises ConfigError with one line a problem.
    """
    loaded = load_config(path, list(overrides))
    config = check_and_resolve(
        loaded.config, world_size, origins=loaded.origins, keep_dp_open=keep_dp_open, more=more
    )
    return loaded.with_config(config)


def check_and_resolve(
    config: RunConfig,
    world_size: int | None = None,
    *,
    origins: Origins | None = None,
    keep_dp_open: bool = False,
    more: Sequence[Check] = (),
) -> RunConfig:
    """The config with parallel.dp, pipeline.schedule and train.steps filled in, if it can run.

    A parallel.dp that neither the config nor `world_size` (None: not known) gives is 1, or stays
    open with `keep_dp_open`: then what depends on it is not checked. `more` are checks whose
    problems are reported together with the others. `origins` as in `check_config`. Raises
    ConfigError with one line a problem.
    """
    problems = check_config(config, world_size, origins)
    is_open = keep_dp_open and config.parallel.dp is None and world_size is None
    # The microbatches of a schedule's file can only be compared with a layout that fits the world.
    known = not is_open and not list(world_problems(config, world_size))
    dp = Topology.of(config.parallel, world_size).dp if known else None
    problems += schedule_problems(config, dp)
    for check in more:
        problems += check(config)
    if problems:
        raise ConfigError(problems)
    return resolve_schedule(config) if is_open else resolve(config, world_size)
