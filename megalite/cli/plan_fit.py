"""Changes of settings with which a run that does not fit a GPU's memory would fit.

Each change is tried by planning again with it, as a user would; a change that the config check
refuses is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from megalite.cli.plan_report import GIB, Report, make_report
from megalite.errors import ConfigError, ScheduleError
from megalite.planner.changes import Change, memory_changes
from megalite.run.hardware import Hardware

_MOST_PAIRS = 4  # shown


def changes_that_fit(report: Report, device: Hardware) -> list[tuple[Change, Report]]:
    """The least change of each kind that fits on as many ranks, with the report of the changed run.

    If no single change fits, pairs of them. Roughly in the order of what they cost in speed.
    """
    kinds = list(memory_changes(report.config, dp_follows=report.gpus is not None))
    singles = [first for kind in kinds if (first := _first(report, device, kind)) is not None]
    if singles:
        return singles

    # Pairs are of the strongest change of each kind, so that a few plans answer.
    pairs = []
    for one, other in combinations([kind[-1] for kind in kinds if kind], 2):
        found = _first(report, device, [(*one, *other)])
        if found is not None:
            pairs.append(found)
        if len(pairs) == _MOST_PAIRS:
            break
    return pairs


def _first(
    report: Report, device: Hardware, changes: Sequence[Change]
) -> tuple[Change, Report] | None:
    for change in changes:
        keys = [text.partition("=")[0] for text in change]
        if len(set(keys)) < len(keys):
            continue
        kept = [text for text in report.overrides if text.partition("=")[0].strip() not in keys]
        try:
            other = make_report(report.path, [*kept, *change], report.gpus)
            if other.layout.world_size == report.layout.world_size and other.fits(device):
                return change, other
        except (ConfigError, ScheduleError):
            continue
    return None


def unfit_lines(
    report: Report, device: Hardware, found: Sequence[tuple[Change, Report]]
) -> Iterator[str]:
    """Lines that report by how much a run does not fit, and the changes that would fit."""
    over = report.most_bytes / GIB - device.memory_gib
    yield f"does not fit: pipeline rank {report.fullest} takes {over:,.1f} GiB more than there is"
    for change, other in found:
        yield f"  fits with {' '.join(change)}: {other.most_bytes / GIB:,.1f} GiB"
    if not found:
        yield (
            "  no change, nor two of them, of ZeRO, loss chunks, sequence parallelism, schedule, "
            "micro batch, recompute, tp and pp makes it fit on as many ranks; take more ranks"
        )
