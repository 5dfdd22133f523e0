"""Checks of a run's settings: from a TOML file, or a config made in code, to a run that can start.

`open_run` reads a TOML file and its overrides, checks every setting against the others, the world
size and the schedule's file, and fills in the settings that were left open. All problems are raised
together. Knows no torch. Reading order: this file, `settings` (which calls `lengths`, `precision`
and `kernels`), `schedule` (reads the schedule's file), `packages` (looks for optional ones).
"""

from __future__ import annotations

import re
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
from megalite.config.load import InvalidSettings, LoadedConfig, load_config
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

    See `check_and_resolve`. Raises ConfigError with one line a problem; where settings cannot be
    read, the other ones are checked with them.
    """
    try:
        loaded = load_config(path, list(overrides))
    except InvalidSettings as error:
        # All problems at once, also those of settings beside one that cannot be read.
        found = [
            _problems(one.config, world_size, one.origins, keep_dp_open, more)
            for one in error.stand_ins
        ]
        raise ConfigError([*error.problems, *_in_all(found, error.wrong)]) from None
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
    problems = _problems(config, world_size, origins, keep_dp_open, more)
    if problems:
        raise ConfigError(problems)
    is_open = _stays_open(config, world_size, keep_dp_open)
    return resolve_schedule(config) if is_open else resolve(config, world_size)


def _stays_open(config: RunConfig, world_size: int | None, keep_dp_open: bool) -> bool:
    """True if parallel.dp is not known and is to be left so."""
    return keep_dp_open and config.parallel.dp is None and world_size is None


def _problems(
    config: RunConfig,
    world_size: int | None,
    origins: Origins | None,
    keep_dp_open: bool,
    more: Sequence[Check],
) -> list[str]:
    problems = check_config(config, world_size, origins)
    is_open = _stays_open(config, world_size, keep_dp_open)
    # The microbatches of a schedule's file can only be compared with a layout that fits the world.
    known = not is_open and not list(world_problems(config, world_size))
    dp = Topology.of(config.parallel, world_size).dp if known else None
    problems += schedule_problems(config, dp)
    for check in more:
        problems += check(config)
    return problems


def _in_all(found: Sequence[list[str]], wrong: frozenset[str]) -> list[str]:
    """The problems that all lists have and that name no setting that is `wrong` itself."""
    # A setting of no section is a common word: it is named by its "=".
    ends = {name: r"\b" if "." in name else "=" for name in wrong}
    names = [re.compile(rf"(?<![\w.]){re.escape(name)}{end}") for name, end in ends.items()]
    return [
        problem
        for problem in (found[0] if found else [])
        if all(problem in other for other in found)
        and not any(name.search(problem) for name in names)
    ]
