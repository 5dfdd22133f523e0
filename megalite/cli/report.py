"""`megalite report`: what a run came to, or several beside each other, and their loss curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalite.cli.formatting import print_json
from megalite.cli.options import AsJson, file, near_runs, require_suffix
from megalite.errors import MegaliteError

if TYPE_CHECKING:
    from megalite.record.report import RunRecord


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", parser=file, help="Run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=file,
            help="The picture to write (default: RUN/loss.png; of several runs none).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a run's losses and where its time went, or compare runs.

    Draws the loss curves into a picture.
    """
    from megalite.checks.packages import missing_package
    from megalite.record.figure import save
    from megalite.record.loss_figure import loss_figure
    from megalite.record.report import comparison, figures, summary, time_table

    # Without matplotlib there is all but the picture, unless that was asked for.
    lacking = missing_package("matplotlib")
    if out is not None and lacking:
        raise MegaliteError(f"--out {lacking}")

    if out is not None:
        require_suffix("--out", out, ".png")

    with near_runs(*runs):
        records = dict(zip(_names(runs), _read_all(runs), strict=True))
    if as_json:
        lines = []
    elif len(records) == 1:
        (record,) = records.values()
        lines = [*summary(record), "", *time_table(record)]
    else:
        lines = comparison(records)
    for line in lines:
        typer.echo(line)

    # A picture of several runs belongs to none of their folders. One that was not asked for is left
    # out where it cannot be written, as in the folder of another user's run.
    drawn = out or (runs[0] / "loss.png" if len(runs) == 1 else None)
    absent = "of several runs only with --out FILE"
    if drawn is not None and lacking:
        drawn, absent = None, lacking
    if drawn is not None:
        try:
            save(loss_figure(records), drawn)
        except MegaliteError as error:
            if out is not None:
                raise
            drawn, absent = None, f"{error}, or name another place by --out FILE"
    if as_json:
        values = [
            {"name": name, "path": str(run), **figures(record)}
            for run, (name, record) in zip(runs, records.items(), strict=True)
        ]
        return print_json({"runs": values, "loss_curve": None if drawn is None else str(drawn)})
    typer.echo(f"\nloss curve: {absent if drawn is None else drawn}")


def _read_all(runs: Sequence[Path]) -> list[RunRecord]:
    """The records of runs. Raises MegaliteError with a line for each that cannot be read."""
    from megalite.record.report import read_run

    records, problems = [], []
    for run in runs:
        try:
            records.append(read_run(run))
        except MegaliteError as error:
            problems.append(str(error))
    if problems:
        raise MegaliteError("\n".join(problems))
    return records


def _names(runs: Sequence[Path]) -> list[str]:
    """The shortest end of each run's path that no other run's path has.

    Raises MegaliteError for a run that is given twice.
    """
    given: dict[Path, Path] = {}
    for run in runs:
        path = run.resolve()
        if path in given:
            raise MegaliteError(f"{run} is the same run as {given[path]}; give each run once")
        given[path] = run
    ends = [[Path(*path.parts[at:]) for at in range(len(path.parts))][::-1] for path in given]
    return [
        str(next(end for end in own if sum(end in others for others in ends) == 1)) for own in ends
    ]
