"""`megalite plan`: memory and time of a run on every rank, before it runs. Without torch."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from megalite.cli.completion import completion, hardware_from
from megalite.cli.formatting import print_json
from megalite.cli.options import AsJson, ConfigFile, Gpus, Settings, path, unknown_options
from megalite.errors import EXIT_USER, all_of


def plan(
    ctx: typer.Context,
    config: ConfigFile,
    settings: Settings = None,
    gpus: Gpus = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            parser=path,
            help="The GPU: a100, h100, h200, b200, or a TOML file (default: log.hardware).",
            autocompletion=completion(hardware_from),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a run's memory and least step time, before it runs.

    Also its stages and their share of the work. Needs no GPU. Exit code 2 where a rank takes more
    memory than the GPU has, with the changes that would make it fit.
    """
    from megalite.cli.plan_fit import changes_that_fit, unfit_lines
    from megalite.cli.plan_report import make_report, report_lines, report_values
    from megalite.run.hardware import load_hardware, named_hardware

    _, device, report = all_of(
        partial(unknown_options, ctx),
        lambda: None if hardware is None else named_hardware(hardware),
        partial(make_report, config, settings or [], gpus),
    )

    # Without a device nothing is held against a limit: the report is then sizes only.
    if device is None and (own := report.config.log.hardware) is not None:
        device = load_hardware(own)
    unfit = device is not None and not report.fits(device)
    changes = changes_that_fit(report, device) if device is not None and unfit else []

    if as_json:
        values = report_values(report, device)
        values["changes"] = [
            {"settings": list(change), "process_bytes": other.most_bytes}
            for change, other in changes
        ]
        print_json(values)
    else:
        lines = list(report_lines(report, device))  # complete, so an error is printed alone
        lines += unfit_lines(report, device, changes) if device is not None and unfit else []
        typer.echo("\n".join(lines))
    if unfit:
        raise typer.Exit(EXIT_USER)
