"""`megalite report`: what a run came to, or several beside each other, and their loss curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.options import file
from megalite.errors import MegaliteError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", parser=file, help="Run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=file,
            help="The picture to write (default: RUN/loss.png; of several runs loss.png).",
        ),
    ] = None,
) -> None:
    """Print a run's losses and where its time went, or compare runs.

    Draws the loss curves into a picture.
    """
    from megalite.checks.packages import missing_package
    from megalite.record.figure import save
    from megalite.record.loss_figure import loss_figure
    from megalite.record.report import comparison, read_run, summary, time_table

    # Without matplotlib there is all but the picture, unless that was asked for.
    lacking = missing_package("matplotlib")
    if out is not None and lacking:
        raise MegaliteError(f"--out {lacking}")

    # The whole path tells folders of one name apart.
    names = [folder.resolve().name for folder in runs]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in runs]
    records = {name: read_run(folder) for name, folder in zip(names, runs, strict=True)}

    if len(records) == 1:
        (record,) = records.values()
        lines = [*summary(record), "", *time_table(record)]
    else:
        lines = comparison(records)
    for line in lines:
        typer.echo(line)
    picture = out or (runs[0] / "loss.png" if len(records) == 1 else Path("loss.png"))
    if not lacking:
        save(loss_figure(records), picture)
    typer.echo(f"\nloss curve: {lacking or picture}")
