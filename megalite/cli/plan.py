"""`megalite plan`: memory and time of a run on every rank, before it runs. Without torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from megalite.cli.options import AsJson, ConfigFile, Overrides, path
from megalite.errors import EXIT_USER


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks in all, where the config leaves parallel.dp to them."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME|TOML", parser=path, help="The GPU: h100 or such, or a file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run's stages, the memory of its ranks, and the least time of a step.

    Ends with exit code 2 where a rank takes more memory than the GPU has.
    """
    from megalite.cli.plan_fit import changes_that_fit, unfit_lines
    from megalite.cli.plan_report import make_report, report_lines, report_values
    from megalite.run.hardware import load_hardware, named_hardware

    report = make_report(config, overrides or [], gpus)

    # Without a device nothing is held against a limit: the report is then sizes only.
    own = report.config.log.hardware
    device = None
    if hardware is not None:
        device = named_hardware(hardware)
    elif own is not None:
        device = load_hardware(own)
    unfit = device is not None and not report.fits(device)
    changes = changes_that_fit(report, device) if device is not None and unfit else []

    if as_json:
        values = report_values(report, device)
        values["changes"] = [
            {"settings": list(change), "process_bytes": other.most_bytes}
            for change, other in changes
        ]
        typer.echo(json.dumps(values, indent=2, allow_nan=False))
    else:
        lines = list(report_lines(report, device))  # complete, so an error is printed alone
        lines += unfit_lines(report, device, changes) if device is not None and unfit else []
        typer.echo("\n".join(lines))
    if unfit:
        raise typer.Exit(EXIT_USER)
