"""`megalite plan`: what a run takes on every rank, before it runs. Without torch."""

from __future__ import annotations

from typing import Annotated

import typer


def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings that replace the file's."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks in all, where the config leaves parallel.dp to them."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME|TOML", help="The GPU: h100 and the like, or a file."),
    ] = None,
) -> None:
    """Show a run's stages, the memory of its ranks, and the least time of a step.

    Ends with exit code 2 where a rank takes more memory than the GPU has.
    """
    from megalite.cli.plan_fit import changes_that_fit, unfit_lines
    from megalite.cli.plan_report import make_report, report_lines
    from megalite.hardware import load_hardware, named_hardware

    report = make_report(config, overrides or [], gpus)
    own = report.config.log.hardware
    device = None
    if hardware is not None:
        device = named_hardware(hardware)
    elif own is not None:
        device = load_hardware(own)
    for line in list(report_lines(report, device)):  # all, or an error alone
        typer.echo(line)
    if device is not None and not report.fits(device):
        for line in unfit_lines(report, device, changes_that_fit(report, device)):
            typer.echo(line)
        raise typer.Exit(2)
